"""Rows and rollouts (docs/formats.md): their types, their checks, and the rollout of a failed episode.

Inside the library they are plain dicts, on which nothing is validated twice. `Row` and `Failure` are the
types of these dicts; `Rollout` is a dict with properties for the keys that every rollout has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel, ConfigDict, TypeAdapter
from typing_extensions import NotRequired, TypedDict

from gym_serve.types.endings import ending_of, is_failure
from gym_serve.types.errors import (
    DeadlineExceeded,
    GymError,
    InvalidRequest,
    OperatorError,
    PolicyDeadline,
    error_class,
)
from gym_serve.types.model_endpoint import public_row
from gym_serve.types.protocols import TOKEN_KEYS, schemas
from gym_serve.types.requests import JSON, Response, parse
from gym_serve.types.timeline import TIMELINE_FIELD, Timeline

if TYPE_CHECKING:  # importing the SDK takes longer than all of gym_serve
    from openai.types.responses import Response as OpenAIResponse
    from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming


class AgentRef(TypedDict):
    """The agent that runs a row."""

    name: str


class Row(TypedDict, total=False):
    """A row: a prompt, and keys of its own. Subclass it to type those; plain dicts are accepted as well.

    One of ``prompt`` and ``responses_create_params`` is required.
    """

    prompt: str | list[JSON]
    """A text, or input items of OpenAI's Responses API."""
    responses_create_params: ResponseCreateParamsNonStreaming
    """The whole body of ``POST /v1/responses`` instead."""
    agent_ref: AgentRef
    """Which agent of the graph; it may be left out if there is one."""


class Failure(TypedDict):
    """Why a rollout has no reward (docs/formats.md, Failures)."""

    kind: str
    """The error's code; ``{stage}_timeout`` if time ran out, ``{stage}_deadline`` if the policy used it."""
    stage: str
    """``seed``, ``model``, ``tool``, ``harness``, ``verify``, ``close`` or ``episode``."""
    status: int
    """HTTP status of the error."""
    retryable: bool
    """Whether another attempt may succeed."""
    detail: str
    """The message."""
    server: NotRequired[str]
    """The server of the graph that failed, if known."""
    retry_after: NotRequired[float]
    """Seconds to wait, if the server says so."""


class TokenBundle(TypedDict):
    """The tokens of one model call (docs/formats.md, Training tokens)."""

    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    generation_log_probs: list[float]
    """Natural logarithms, one per generated token."""


class Rollout(dict[str, Any]):
    """A rollout: a dict of the row, the response, the reward and the verifier's fields.

    The properties read the keys that every rollout has (docs/formats.md, Rollouts). The keys of the row and
    of the verifier are read as of any dict: ``rollout["extracted_answer"]``.
    """

    @property
    def reward(self) -> float:
        """The reward; 0 for a failed rollout, which is masked."""
        return float(self["reward"])

    @property
    def rollout_id(self) -> str:
        """Unique in a run: ``"{task}-{rollout}"``; a retry has its attempt behind it."""
        return str(self["_ng_rollout_id"])

    @property
    def task_index(self) -> int:
        """Number of the task, from 0; the repeats of a row share it."""
        return int(self["_ng_task_index"])

    @property
    def rollout_index(self) -> int:
        """Number of the repeat, from 0."""
        return int(self["_ng_rollout_index"])

    @property
    def attempt(self) -> int:
        """Number of the attempt, from 0."""
        return int(self.get("_ng_attempt_index", 0))

    @property
    def latency(self) -> float:
        """Duration of the attempt in seconds."""
        return float(self["_ng_latency_s"])

    @property
    def timeline(self) -> Timeline | None:
        """When its model calls, tool calls and stages ran, and where; None if that was not recorded."""
        return Timeline.of(self)

    @property
    def failure(self) -> Failure | None:
        """Why it failed; None for a rollout with a reward."""
        return self.get("failure") if is_failure(self) else None

    @property
    def masked(self) -> bool:
        """Whether it must not be trained on: it failed, or the environment says so."""
        return ending_of(self).masked

    @property
    def output(self) -> list[JSON]:
        """The items of the episode, in order: messages, reasoning, calls and their outputs."""
        response = self.get("response")
        items: list[JSON] = response.get("output") or [] if isinstance(response, dict) else []
        return items

    @property
    def output_text(self) -> str:
        """The text of the assistant's messages, joined as in OpenAI's SDK."""
        return Response(output=self.output).output_text

    @property
    def response(self) -> OpenAIResponse:
        """The response as a model of OpenAI's SDK, made at each access; unknown fields are kept.

        Raises `KeyError`: a failed rollout may have none.
        """
        from openai.types.responses import Response as OpenAIResponse

        return OpenAIResponse.construct(**self["response"])

    @property
    def tokens(self) -> list[TokenBundle]:
        """The tokens of each model call, in order; empty if the model sends none."""
        calls = (item for item in self.output if item.get(TOKEN_KEYS[0]))
        return [cast(TokenBundle, {key: item[key] for key in TOKEN_KEYS}) for item in calls]


_LARGEST_REWARD = 1e100  # sums of squares stay finite

# Keys that say how a rollout ended and what is trained on; a row of a data set may not have them.
_MARKS = (
    *("failure", "mask_sample", "_ng_failure_class", "_ng_failure_terminal"),
    *("stopped_by", "verification_skipped", "branches", "captured_input", "captured_context"),
)

_OF_ATTEMPT = frozenset(
    {*_MARKS, "_ng_attempt_index", TIMELINE_FIELD, "error", "model_usage", "reason", "response", "reward"}
)

REPLACED = "_ng_replaced"
"""Key of a rollout: the values of its row that the verdict has replaced, such as the row's ``answer`` by the
model's."""


class ResponsesParams(BaseModel):
    """The body of OpenAI's ``POST /v1/responses``, less streaming; an unknown key is an error.

    Values are handed on as they are: the model server that receives them judges them.
    """

    model_config = ConfigDict(extra="forbid")

    input: str | list[JSON]
    background: Any = None
    include: Any = None
    instructions: Any = None
    max_output_tokens: Any = None
    max_tool_calls: Any = None
    metadata: Any = None
    model: Any = None
    parallel_tool_calls: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    prompt_cache_key: Any = None
    reasoning: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    stream: Any = None
    temperature: Any = None
    text: Any = None
    tool_choice: Any = None
    tools: list[JSON] | None = None
    top_logprobs: Any = None
    top_p: Any = None
    truncation: Any = None
    user: Any = None


class _RowModel(BaseModel):
    responses_create_params: ResponsesParams


ROW_PARAMS: JSON = {**schemas.PARAMS, "additionalProperties": False}  # JSON schema of `ResponsesParams`

# JSON schemas: of a row, of a rollout, and of the body of ``/aggregate_metrics``.
ROW: JSON = {
    "type": "object",
    "required": ["responses_create_params"],
    "properties": {
        "responses_create_params": ROW_PARAMS,
        "agent_ref": {"type": "object", "properties": {"name": {"type": "string"}}},
    },
}
ROLLOUT: JSON = {
    "type": "object",
    "required": ["responses_create_params", "reward"],
    "properties": {"reward": {"type": "number"}},
}
VERIFIED: JSON = {
    "type": "object",
    "required": ["verify_responses"],
    "properties": {"verify_responses": {"type": "array", "items": {"type": "object"}}},
}

_ROW: TypeAdapter[Any] = TypeAdapter(_RowModel)
_PARAMS: TypeAdapter[Any] = TypeAdapter(ResponsesParams)


def with_prompt(row: JSON) -> JSON:
    """A row ``{"prompt": ..., own keys}`` with the ``responses_create_params`` that its prompt makes; one
    that has these, or no prompt, is returned as it is."""
    if "prompt" not in row or "responses_create_params" in row:
        return row
    prompt = row["prompt"]
    if not isinstance(prompt, str | list):
        raise InvalidRequest(f"`prompt` must be a text or a list of messages, got {type(prompt).__name__}")
    return {**row, "responses_create_params": {"input": prompt}}


def check_row(row: Any) -> None:
    """Check a row against the contract. Raises `InvalidRequest`: all of its problems, each with its place."""
    if not isinstance(row, dict):
        raise InvalidRequest(f"a row must be a JSON object, got a {type(row).__name__}")
    parse(_ROW, row, "row")


def check_params(params: Any) -> None:
    """The same for a bare Responses body."""
    if not isinstance(params, dict):
        raise InvalidRequest(f"a Responses body is a JSON object, not {type(params).__name__}")
    parse(_PARAMS, params, "body")


def check_reward(reward: Any) -> None:
    """Raise `InvalidRequest` if a reward is no number, or so large that no mean could be taken."""
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise InvalidRequest(f"reward: a number is missing, got {str(reward)[:200]}")
    if not abs(reward) <= _LARGEST_REWARD:
        raise InvalidRequest(f"reward: out of range, {str(reward)[:50]}")


def agent_name(row: Mapping[str, Any]) -> str | None:
    """The agent that a row or a rollout names (``agent_ref.name``); None if it names none."""
    ref = row.get("agent_ref")
    name = ref.get("name") if isinstance(ref, Mapping) else None
    return str(name) if name else None


def failed_rollout(row: JSON, error: GymError, response: JSON | None = None) -> JSON:
    """The rollout of an episode that ended without a reward: a value, masked out of training."""
    row = public_row(row)
    stage = error.stage or "episode"
    kind = error.code
    if isinstance(error, DeadlineExceeded):
        kind = f"{stage}_timeout"
    elif isinstance(error, PolicyDeadline):
        kind = f"{stage}_deadline"
    config = row.get("instance_config")
    failure = {"kind": kind, "stage": stage, "status": error.status, "retryable": error.retryable}
    failure |= {"detail": error.message, "server": error.server or None, "retry_after": error.retry_after}
    return {
        **row,
        **({"response": response} if response is not None else {}),
        "reward": 0.0,
        "mask_sample": True,
        "instance_config": {**(config if isinstance(config, dict) else {}), "mask_sample": True},
        "_ng_failure_class": kind,
        "_ng_failure_terminal": not error.retryable,
        "error": error.message,  # what TRL's example tells a failed rollout by
        "failure": {key: value for key, value in failure.items() if value is not None},
    }


def operator_error(rollout: Mapping[str, Any]) -> OperatorError | None:
    """The error that a rollout failed with, if only the operator can mend it; None for any other rollout."""
    kind = rollout.get("_ng_failure_class")
    cls = error_class(kind) if isinstance(kind, str) else None
    if cls is None or not issubclass(cls, OperatorError):
        return None
    record = rollout.get("failure")
    fields: Mapping[str, Any] = record if isinstance(record, Mapping) else {}
    server, stage, wait = fields.get("server"), fields.get("stage"), fields.get("retry_after")
    return cls(
        str(fields.get("detail", "")),
        server=server if isinstance(server, str) else None,
        stage=stage if isinstance(stage, str) else None,
        retry_after=wait if isinstance(wait, int | float) else None,
    )


def of_verdict(verdict: JSON) -> JSON:
    """A verdict without what only a run sets: which rollout it is, and how it failed."""
    return {key: verdict[key] for key in verdict if key != "failure" and not key.startswith("_ng_")}


def replaced(row: JSON, verdict: JSON) -> JSON:
    """The key `REPLACED` of a row's rollout with this verdict; empty if the verdict replaces nothing."""
    names = (row.keys() & verdict.keys()) - _OF_ATTEMPT - {"responses_create_params"}
    values = {name: row[name] for name in sorted(names) if row[name] != verdict[name]}
    return {REPLACED: values} if values else {}


def restored(rollout: JSON) -> JSON:
    """A rollout with the values of its row: a verifier that read its own in their place would compare the
    model's answer with itself."""
    values = rollout.get(REPLACED)
    if not isinstance(values, dict):
        return rollout
    return {key: values.get(key, value) for key, value in rollout.items() if key != REPLACED}


def marks_of(row: Mapping[str, Any]) -> list[str]:
    """The keys of a row that only a run may set, as they say how a rollout ended or what is trained on."""
    marks = [key for key in _MARKS if key in row]
    config = row.get("instance_config")
    nested = isinstance(config, Mapping) and "mask_sample" in config
    return [*marks, "instance_config.mask_sample"] if nested else marks


def unmarked(row: JSON) -> JSON:
    """A row without the marks of an earlier end; of a failed rollout, only its row is left.

    A mark that stayed would turn the reward of the next attempt into a failure, or bring old tokens into it.
    """
    if not marks_of(row):
        return row
    left_out = _OF_ATTEMPT if row.get("_ng_failure_class") else _MARKS
    fresh = {key: value for key, value in row.items() if key not in left_out}
    config = fresh.pop("instance_config", None)
    if isinstance(config, dict):
        config = {key: value for key, value in config.items() if key != "mask_sample"}
    return {**fresh, "instance_config": config} if config else fresh

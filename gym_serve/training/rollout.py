"""A rollout as exporters read it (docs/formats.md, Rollouts), with its training tokens.

Rollouts come from files, so nothing in them is trusted: one that does not follow the format is a
`NotExportable`, which `export` counts, and never another exception.

The rollout of an external harness may hold several conversations: the one that was verified, and ``branches``
(sub-agents, dropped retries, a context before it was compacted). To a trainer each is a rollout of its own,
with the reward, the mask and the task of the whole. Each text of the model is in exactly one of them.

Tokens are cut into turns in one place, `token_parts`: laid end to end, the prompts and generations of a
part's turns are exactly its last call's prompt and generation. This holds if each prompt begins with all
tokens before it, which is checked: a trainer would learn from a sequence that the model never saw.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import orjson

from gym_serve.types.endings import ending_of, failure_class, is_failure
from gym_serve.types.errors import BadRequest, InvalidRequest
from gym_serve.types.exact import exact_bytes, exact_json
from gym_serve.types.protocols.tokens import item_tokens, token_versions
from gym_serve.types.requests import JSON
from gym_serve.types.timeline import Timeline

__all__ = [
    "Bundle",
    "NotExportable",
    "Rollout",
    "TokenTurn",
    "number",
    "read_bundle",
    "token_parts",
    "token_turns",
]

_INT64 = 1 << 63
_CAPTURED = ("branches", "captured_input", "captured_context")


class NotExportable(InvalidRequest):
    """A rollout that a format cannot hold."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class Rollout:
    """A checked rollout."""

    raw: JSON
    """All of it, unchanged."""
    params: JSON
    """Its ``responses_create_params``; of a harness, what that asked for in their place."""
    response: JSON
    """The Response of the episode; empty if it failed before the model's first answer."""
    output: list[JSON]
    """Every item of the episode, in order."""
    context: int = 0
    """How many of the first items are there only to be seen: they belong to another branch."""
    branch: int = 0
    """Which of the rollout's conversations this is: 0 is the one that was verified."""

    @classmethod
    def read(cls, raw: Any) -> Rollout:
        """Check a rollout; `NotExportable` if it does not follow the contract."""
        if not isinstance(raw, dict):
            raise NotExportable("no_rollout", f"a rollout must be a JSON object, got {type(raw).__name__}")
        try:
            orjson.dumps(raw)
        except orjson.JSONEncodeError:
            raw = cls._mended(raw)
        params, response = raw.get("responses_create_params"), raw.get("response")
        if not isinstance(params, dict):
            raise NotExportable("no_prompt", "the rollout has no responses_create_params")
        if response is None and ending_of(raw).masked:
            response = {"output": []}
        if not isinstance(response, dict) or not _is_list_of_objects(response.get("output")):
            raise NotExportable("no_response", "the rollout has no response with a list of output items")
        plain = cls(raw, params, response, response["output"])
        if "captured_input" not in raw:
            return plain
        return plain._captured(raw["captured_input"], raw.get("captured_context"))

    @staticmethod
    def _mended(raw: JSON) -> JSON:
        """A rollout with integers over 64 bits as it is, and with whole texts."""
        try:
            whole: JSON = exact_json(exact_bytes(raw))
        except (TypeError, ValueError) as error:
            raise NotExportable("no_json", f"the rollout is not valid JSON: {error}") from None
        return whole

    def conversations(self) -> Iterator[Rollout]:
        """This rollout and its branches, each as a rollout; ids of branches end with ``.1``, ``.2``, ...

        A branch that does not follow the contract is one without a prompt, which no format holds.
        """
        yield self
        branches = self.raw.get("branches")
        own = {k: v for k, v in self.raw.items() if k not in _CAPTURED}
        for number, branch in enumerate(branches if isinstance(branches, list) else (), 1):
            branch = branch if isinstance(branch, dict) else {}  # noqa: PLW2901
            response = branch.get("response")
            if not isinstance(response, dict) or not _is_list_of_objects(response.get("output")):
                response = {"output": []}
            raw = {**own, "_ng_rollout_id": f"{self.id}.{number}", "branch": number, "response": response}
            other = Rollout(raw, self.params, response, response["output"], branch=number)
            yield other._captured(branch.get("input"), branch.get("context"))

    def _captured(self, items: Any, context: Any) -> Rollout:
        """The same with what the harness gave the model: an input, and tools, of its own."""
        params = {**self.params, "input": items if _is_list_of_objects(items) else [], "instructions": None}
        if isinstance(self.response.get("tools"), list):
            params["tools"] = self.response["tools"]
        at = context if type(context) is int and 0 < context <= len(self.output) else 0
        return replace(self, params=params, context=at)

    @property
    def id(self) -> str:
        """Its ``_ng_rollout_id``, else ``"{task}-{rollout}"``."""
        own_id = self.raw.get("_ng_rollout_id")
        return own_id if isinstance(own_id, str) and own_id else f"{self.task}-{self.index or 0}"

    @property
    def task(self) -> str:
        """What the rollouts of one task share: its ``_ng_task_index``, else a digest of its prompt."""
        if self.task_index is not None:
            return str(self.task_index)
        prompt = exact_bytes(self.raw["responses_create_params"], orjson.OPT_SORT_KEYS)
        return hashlib.blake2b(prompt, digest_size=16).hexdigest()

    @property
    def task_index(self) -> int | None:
        return _index(self.raw.get("_ng_task_index"))

    @property
    def index(self) -> int | None:
        return _index(self.raw.get("_ng_rollout_index"))

    @property
    def agent(self) -> str:
        ref = self.raw.get("agent_ref")
        name = ref.get("name") if isinstance(ref, dict) else None
        return name if isinstance(name, str) and name else "agent"

    @property
    def model(self) -> str | None:
        name = self.response.get("model")
        return name if isinstance(name, str) and name else None

    @property
    def created_at(self) -> float:
        return number(self.response.get("created_at")) or 0.0

    @property
    def timeline(self) -> Timeline | None:
        """When its calls ran; None if it does not say."""
        return Timeline.of(self.raw)

    @property
    def reward(self) -> float:
        """Its reward; `NotExportable` if there is none, or it is not a finite number."""
        value = number(self.raw.get("reward"))
        if value is None:
            text = f"{self.raw.get('reward')!r:.80}"
            raise NotExportable("no_reward", f"the reward must be a finite number, got {text}")
        return value

    @property
    def masked(self) -> bool:
        """Whether it must not be learned from: it failed, or its environment said so."""
        return ending_of(self.raw).masked

    @property
    def failure_class(self) -> str | None:
        """How it failed, None if it did not."""
        return str(failure_class(self.raw))[:60] if is_failure(self.raw) else None

    @property
    def extras(self) -> JSON:
        """Everything but the conversations: metadata, the row's keys, the verifier's."""
        conversations = ("responses_create_params", "response", *_CAPTURED)
        return {k: v for k, v in self.raw.items() if k not in conversations}

    def require_trainable(self) -> None:
        """Raise `NotExportable` for what must not be learned from, in formats that have no mask."""
        if self.masked:
            reason = f"failed: {self.failure_class}" if self.failure_class else "masked"
            raise NotExportable(reason, "mask_sample is set, and this format has no mask for a sample")


def number(value: Any) -> float | None:
    """A finite number (True is 1), else None."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _index(value: Any) -> int | None:
    return value if isinstance(value, int) and -_INT64 <= value < _INT64 else None


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


@dataclass(frozen=True)
class Bundle:
    """The tokens of one model call."""

    prompt: list[int]  # every token that the model was given
    generation: list[int]  # every token that it produced
    logprobs: list[float]  # natural-log probability of each produced token


@dataclass(frozen=True)
class TokenTurn:
    """One generation, with the prompt tokens that are new since the one before."""

    prompt: list[int]
    generation: list[int]
    logprobs: list[float]
    versions: list[str | None]  # of the policy that produced each generated token; None if nobody said one
    item: int  # index of its item in ``output``


def read_bundle(item: JSON, where: str) -> Bundle | None:
    """The token bundle on an output item, None without one. Raises `NotExportable` if it is malformed."""
    try:
        ids = item_tokens(item, where)
    except BadRequest as error:
        raise NotExportable("bad_tokens", error.message) from None
    if ids is None:
        return None
    bundle = Bundle(ids["prompt_token_ids"], ids["generation_token_ids"], ids["generation_log_probs"])
    if not all(map(_is_token, bundle.prompt)) or not all(map(_is_token, bundle.generation)):
        raise NotExportable("bad_tokens", f"{where}: token ids must be integers from 0 to 2**31 - 1")
    if not all(map(_is_finite, bundle.logprobs)):
        raise NotExportable("bad_tokens", f"{where}: log probabilities must be finite numbers")
    return bundle


def token_parts(rollout: Rollout) -> list[list[TokenTurn]]:
    """The generations of a conversation, each with its new prompt tokens. Another part begins where a prompt
    does not go on from what was seen before. The prompt of a call without tokens is part of the next one's.
    """
    parts: list[list[TokenTurn]] = []
    context: list[int] = []
    for i, item in enumerate(rollout.output[rollout.context :], rollout.context):
        bundle = read_bundle(item, f"response.output[{i}]")
        if bundle is None or not bundle.generation:
            continue
        if not parts or bundle.prompt[: len(context)] != context:
            parts.append([])
            context = []
        begun = item.get("weight_version")
        one: list[str | None] = [None if begun is None else str(begun)] * len(bundle.generation)
        versions = [*(token_versions(item) or one)]
        new = bundle.prompt[len(context) :]
        parts[-1].append(TokenTurn(new, bundle.generation, bundle.logprobs, versions, i))
        context = bundle.prompt + bundle.generation
    return parts


def token_turns(rollout: Rollout) -> list[TokenTurn]:
    """The turns of a conversation that is one part, for formats that hold no others; or `NotExportable`."""
    parts = token_parts(rollout)
    if not parts:
        raise NotExportable("no_tokens", "no output item carries training tokens")
    first, *others = parts
    if others:
        context = [token for turn in first for token in turn.prompt + turn.generation]
        broken = others[0][0]
        raise NotExportable(
            "broken_prefix",
            f"response.output[{broken.item}]: the prompt differs from the {len(context)} tokens seen so far "
            f"at token {_common_prefix(context, broken.prompt)} (was the history re-tokenized, truncated, or "
            "its reasoning stripped?)",
        )
    return first


def _common_prefix(left: list[int], right: list[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)

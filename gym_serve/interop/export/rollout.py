"""A rollout as exporters read it (docs/formats.md, Rollouts): the few facts that every format needs.

Rollouts come from files, so nothing of them is trusted: what does not follow the contract is a
`NotExportable`, which `export` counts, and never another exception. After `Rollout.read` the whole
rollout is known to be JSON, so that no writer fails halfway on a lone surrogate or a huge integer.

The rollout of an external harness may hold several conversations: the one that was verified, and ``branches``
(sub-agents, dropped retries, a context before it was compacted). Each is a rollout of its own to a trainer,
with the reward, the mask and the task of the whole. What the model said is in exactly one of them; where a
branch goes on from another conversation, that part is its prompt.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import orjson

from gym_serve.types.errors import InvalidRequest
from gym_serve.types.requests import JSON

__all__ = ["NotExportable", "Rollout", "number"]

_INT64 = 1 << 63
_CAPTURED = ("branches", "captured_input", "captured_context")


class NotExportable(InvalidRequest):
    """A rollout that a format cannot hold.

    Args:
        reason: a short, stable name of the kind of problem, for counting.
        detail: what is wrong with this one.
    """

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
        """Check a rollout.

        Raises:
            NotExportable: it does not follow the contract.
        """
        if not isinstance(raw, dict):
            raise NotExportable("no_rollout", f"a rollout is a JSON object, not {type(raw).__name__}")
        try:
            orjson.dumps(raw)
        except orjson.JSONEncodeError as error:
            raise NotExportable("no_json", f"the rollout is no JSON: {error}") from None
        params, response = raw.get("responses_create_params"), raw.get("response")
        if not isinstance(params, dict):
            raise NotExportable("no_prompt", "the rollout has no responses_create_params")
        if response is None and _is_masked(raw):
            response = {"output": []}
        if not isinstance(response, dict) or not _is_list_of_objects(response.get("output")):
            raise NotExportable("no_response", "the rollout has no response with a list of output items")
        if "captured_input" not in raw:
            return cls(raw, params, response, response["output"])
        found = cls(raw, params, response, response["output"])
        return found._captured(raw["captured_input"], raw.get("captured_context"))

    def conversations(self) -> Iterator[Rollout]:
        """This rollout and its branches, each as a rollout; ids of branches end with ``.1``, ``.2``, ...

        A branch that does not follow the contract is one without a prompt, which no format holds.
        """
        yield self
        branches = self.raw.get("branches")
        own = {k: v for k, v in self.raw.items() if k not in _CAPTURED}
        for number, given in enumerate(branches if isinstance(branches, list) else (), 1):
            branch = given if isinstance(given, dict) else {}
            response = branch.get("response")
            if not isinstance(response, dict) or not _is_list_of_objects(response.get("output")):
                response = {"output": []}
            raw = {**own, "_ng_rollout_id": f"{self.id}.{number}", "branch": number, "response": response}
            made = Rollout(raw, self.params, response, response["output"], branch=number)
            yield made._captured(branch.get("input"), branch.get("context"))

    def _captured(self, given: Any, context: Any) -> Rollout:
        """The same with what the harness gave the model: an input, and tools, of its own."""
        asked = {**self.params, "input": given if _is_list_of_objects(given) else [], "instructions": None}
        if isinstance(self.response.get("tools"), list):
            asked["tools"] = self.response["tools"]
        at = context if type(context) is int and 0 < context <= len(self.output) else 0
        return replace(self, params=asked, context=at)

    @property
    def id(self) -> str:
        """Its ``_ng_rollout_id``, else ``"{task}-{rollout}"``."""
        given = self.raw.get("_ng_rollout_id")
        return given if isinstance(given, str) and given else f"{self.task}-{self.index or 0}"

    @property
    def task(self) -> str:
        """What the rollouts of one task share: its ``_ng_task_index``, else a digest of its prompt."""
        if self.task_index is not None:
            return str(self.task_index)
        prompt = orjson.dumps(self.raw["responses_create_params"], option=orjson.OPT_SORT_KEYS)
        return hashlib.blake2b(prompt, digest_size=16).hexdigest()

    @property
    def task_index(self) -> int | None:
        return _index(self.raw.get("_ng_task_index"))

    @property
    def index(self) -> int | None:
        """Which of the task's rollouts it is, from 0."""
        return _index(self.raw.get("_ng_rollout_index"))

    @property
    def agent(self) -> str:
        """Name of the agent that made it."""
        ref = self.raw.get("agent_ref")
        name = ref.get("name") if isinstance(ref, dict) else None
        return name if isinstance(name, str) and name else "agent"

    @property
    def model(self) -> str | None:
        """Name of the model that answered last."""
        name = self.response.get("model")
        return name if isinstance(name, str) and name else None

    @property
    def created_at(self) -> float:
        """Unix time of the last model response, 0.0 if it says none."""
        return number(self.response.get("created_at")) or 0.0

    @property
    def reward(self) -> float:
        """Its reward.

        Raises:
            NotExportable: there is none, or it is no finite number.
        """
        given = self.raw.get("reward")
        value = number(given)
        if value is None:
            raise NotExportable("no_reward", f"the reward is no finite number: {given!r:.80}")
        return value

    @property
    def masked(self) -> bool:
        """Whether it must not be learned from: it failed, or its environment said so."""
        return _is_masked(self.raw)

    @property
    def failure_class(self) -> str | None:
        """How it failed, None if it did not."""
        failure = self.raw.get("failure")
        kind = self.raw.get("_ng_failure_class")
        if not kind and isinstance(failure, dict):
            kind = failure.get("kind") or "unknown"
        return str(kind)[:60] if kind else None

    @property
    def extras(self) -> JSON:
        """Everything but the conversations: stamps, the row's keys, the verifier's."""
        conversations = ("responses_create_params", "response", *_CAPTURED)
        return {k: v for k, v in self.raw.items() if k not in conversations}

    def require_trainable(self) -> None:
        """Leave out what must not be learned from, for formats that have no mask.

        Raises:
            NotExportable: it is masked.
        """
        if self.masked:
            failed = self.failure_class
            reason = f"failed: {failed}" if failed else "masked"
            raise NotExportable(reason, "mask_sample is set, and this format has no mask for a sample")


def number(value: Any) -> float | None:
    """A finite number (True is 1), else None."""
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None


def _index(value: Any) -> int | None:
    return value if isinstance(value, int) and -_INT64 <= value < _INT64 else None


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _is_masked(raw: JSON) -> bool:
    config = raw.get("instance_config")
    nested = config.get("mask_sample") if isinstance(config, dict) else None
    return bool(raw.get("mask_sample") or nested or raw.get("failure"))

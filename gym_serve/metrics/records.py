"""The few facts of a rollout that metrics need, and how they are read from its JSON.

Invariants: a number is finite, and small enough that squares and sums stay so (NaN and
infinities are not JSON, and one would swallow every mean it enters: they count as missing);
booleans are 0 and 1; a failed rollout has no score at all, rather than a score of 0.
Nothing here trusts the verifier's own fields: a value of an unexpected type is a missing
value, never an exception.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from gym_serve.metrics.spec import MetricSpec, Score
from gym_serve.types.errors import InvalidRequest

__all__ = [
    "LATENCY_FIELD",
    "ROLLOUT_INDEX",
    "TASK_INDEX",
    "Group",
    "RolloutRecord",
    "failure_class",
    "read_record",
    "read_stamp",
]

TASK_INDEX = "_ng_task_index"
ROLLOUT_INDEX = "_ng_rollout_index"
LATENCY_FIELD = "_ng_latency_s"
"""Numeric field with the seconds that an episode took, where the collector stamps it."""

_LARGEST = 1e150
_SHORT_ANSWER = 64  # characters; a longer answer is kept as a digest: majority only asks "the same?"


@dataclass(slots=True)
class RolloutRecord:
    """What is kept of one rollout that was scored."""

    index: int
    fields: dict[str, int | float]
    scores: dict[str, int | float]
    answer: Hashable = None
    labels: tuple[str | None, ...] = ()
    """The values of ``spec.subset`` and of each breakdown's field, in that order."""


@dataclass(slots=True)
class Group:
    """The scored rollouts of one task; their order defines "the first k"."""

    task_index: int
    rollouts: list[RolloutRecord]
    expected: int
    """How many rollouts the task has, those that failed or are missing included."""
    row: Mapping[str, Any] = field(default_factory=lambda: {"agent_ref": {"name": "agent"}})


def read_record(rollout: Mapping[str, Any], index: int, spec: MetricSpec) -> RolloutRecord:
    """Read what ``spec`` asks for from one rollout."""
    # A missing label still takes its place, so that positions agree with the spec.
    labels = (
        _label(rollout.get(spec.subset)) if spec.subset else None,
        *(_label(rollout.get(b.field, b.missing)) for b in spec.breakdowns),
    )
    scores = {s.name: value for s in spec.scores if (value := _score(rollout, s)) is not None}
    answer = None
    if spec.answer is not None:
        answer = _comparable(rollout.get(spec.answer))
        scores["no_answer"] = int(answer is None)
    return RolloutRecord(index, _numeric_fields(rollout), scores, answer, labels)


def read_stamp(rollout: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """An index that the collector stamped on a rollout.

    Raises:
        InvalidRequest: it is no 64-bit integer, or is missing and has no ``default``.
    """
    value = rollout.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise InvalidRequest(f"rollout field {key!r} must be a 64-bit integer, not a {type(value).__name__}")
    return value


def failure_class(rollout: Mapping[str, Any]) -> str | None:
    """The class of a failed rollout's failure; None for a rollout that was scored."""
    name = rollout.get("_ng_failure_class")
    if isinstance(name, str) and name:
        return name
    return "masked" if name or rollout.get("mask_sample") is True else None


def _numeric_fields(rollout: Mapping[str, Any]) -> dict[str, int | float]:
    response = rollout.get("response")
    usage = response.get("usage") if isinstance(response, Mapping) else None
    return {
        name: number
        for source in (rollout, usage if isinstance(usage, Mapping) else {})
        for name, value in source.items()
        if name not in (TASK_INDEX, ROLLOUT_INDEX) and (number := _number(value)) is not None
    }


def _number(value: object) -> int | float | None:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int | float) and abs(value) <= _LARGEST:  # false for NaN
        return value
    return None


def _score(rollout: Mapping[str, Any], score: Score) -> int | float | None:
    if score.requires is not None and rollout.get(score.requires) is None:
        return None
    value = _number(rollout.get(score.field))
    if value is None or score.above is None:
        return value
    return int(value > score.above)


def _label(value: object) -> str | None:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() <= 64:  # Python refuses to print endless ones
        return str(value)
    return value if isinstance(value, str) and value else None


def _comparable(answer: object) -> Hashable:
    """A small key that two answers share exactly when they are equal; None for no answer."""
    if answer is None or isinstance(answer, int | float):
        return answer
    if isinstance(answer, str):
        if len(answer) <= _SHORT_ANSWER:
            return answer
        data = answer.encode("utf-8", "surrogatepass")
    else:
        try:
            data = b"\0" + orjson.dumps(answer, option=orjson.OPT_SORT_KEYS)
        except orjson.JSONEncodeError:  # too deep or no JSON: cannot be compared, so equal to no other
            return object()
    return hashlib.blake2b(data, digest_size=16).digest()

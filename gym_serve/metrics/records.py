"""What metrics are computed from: the spec of an environment, and the few facts kept of each rollout.

Numbers are finite, and small enough that their squares and sums stay finite (one NaN would swallow every mean
it enters: it counts as missing). Booleans are 0 and 1. A failed rollout has no score, rather than a score of
0. The verifier's own fields are not trusted: a value of an unexpected type counts as missing.

`RecordStore` keeps the records of a million rollouts in about 8 bytes a number: all numbers are in one flat
array, and a rollout is a slice of it, whose names are one of a few schemas.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import orjson

from gym_serve.types.errors import InvalidRequest
from gym_serve.types.exact import exact_bytes

TASK_INDEX = "_ng_task_index"
ROLLOUT_INDEX = "_ng_rollout_index"
LATENCY_FIELD = "_ng_latency_s"
"""Seconds that the episode took, as the collector measured it."""

_LARGEST = 1e150
_SHORT_ANSWER = 64  # characters; a longer answer is kept as a digest: majority only asks "the same?"
_T = TypeVar("_T", bound=Hashable)
_EXACT = 2**53  # integers up to here survive as floats


@dataclass(frozen=True)
class Score:
    """A named score of a rollout, read from one of its top-level fields."""

    name: str
    """Name in the metrics: ``accuracy`` gives ``pass@1/accuracy``."""
    field: str = "reward"
    """Numeric field of the rollout that holds the score."""
    requires: str | None = None
    """The rollout has this score only where this other field is present and not null."""
    above: float | None = None
    """When given, the score is 1 for a value above this threshold and 0 otherwise."""


@dataclass(frozen=True)
class Breakdown:
    """The mean reward for each value of a field, as ``mean/reward_{prefix}{value}``."""

    field: str
    prefix: str = ""
    missing: str | None = None
    """Value for rollouts without the field; None leaves them out."""


@dataclass(frozen=True)
class MetricSpec:
    """The metrics of one environment. The default has the statistics of numeric fields alone."""

    scores: tuple[Score, ...] = ()
    """Scores that get pass@k, averages and, with ``answer``, majority@k."""
    answer: str | None = None
    """Field of the extracted answer; with it come majority@k and the score ``no_answer``."""
    subset: str | None = None
    """Field whose values split the tasks; ``easy/pass@1/accuracy`` for the value ``easy``."""
    sample_std_dev: bool = False
    """Add ``avg_sample_std_dev``, the spread within a task (a fraction, not a percentage)."""
    breakdowns: tuple[Breakdown, ...] = ()
    key_metrics: tuple[str, ...] = ("mean/*",)
    """Patterns of the headline metrics: see `select_key_metrics`."""


STATISTICS_ONLY = MetricSpec()
"""No scores: the statistics of numeric fields, which every environment has."""


@dataclass(slots=True)
class RolloutRecord:
    """The facts kept of one rollout."""

    index: int
    fields: dict[str, int | float]
    scores: dict[str, int | float]
    answer: Hashable = None
    labels: tuple[str | None, ...] = ()
    """The values of ``spec.subset`` and of each breakdown's field, in that order."""
    scored: bool = True
    """False for a rollout that failed (its reward is the 0 that ``--failures zero`` counts) or is masked."""


@dataclass(slots=True)
class Group:
    """The scored rollouts of one task; their order defines "the first k"."""

    task_index: int
    rollouts: list[RolloutRecord]
    expected: int
    """How many rollouts the task should have, failed and missing ones included."""


def unscored_record(rollout: Mapping[str, Any], index: int, spec: MetricSpec, failure: str) -> RolloutRecord:
    """The record of a rollout that has no score, for the given class of `failure_class`."""
    fields = {} if failure == MASKED else {"reward": 0.0}
    return RolloutRecord(index, fields, {}, None, _labels(rollout, spec), scored=False)


def read_record(rollout: Mapping[str, Any], index: int, spec: MetricSpec) -> RolloutRecord:
    """Read what ``spec`` asks for from one rollout."""
    scores = {s.name: value for s in spec.scores if (value := _score(rollout, s)) is not None}
    answer = None
    if spec.answer is not None:
        answer = _comparable(rollout.get(spec.answer))
        scores["no_answer"] = int(answer is None)
    return RolloutRecord(index, _numeric_fields(rollout), scores, answer, _labels(rollout, spec))


def _labels(rollout: Mapping[str, Any], spec: MetricSpec) -> tuple[str | None, ...]:
    # A missing label still takes its place, so that positions agree with the spec.
    return (
        _label(rollout.get(spec.subset)) if spec.subset else None,
        *(_label(rollout.get(b.field, b.missing)) for b in spec.breakdowns),
    )


def read_index(rollout: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """The task or rollout index of a rollout. Raises InvalidRequest: it is not a 64-bit integer, or is
    missing and has no ``default``."""
    value = rollout.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise InvalidRequest(f"`{key}` must be a 64-bit integer, got a {type(value).__name__}")
    return value


MASKED = "masked"
"""The `failure_class` of a rollout that did not fail, but that its environment leaves out of scores."""


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
            data = b"\0" + exact_bytes(answer, orjson.OPT_SORT_KEYS)
        except (TypeError, ValueError):  # too deep or no JSON: cannot be compared, so equal to no other
            return object()
    return hashlib.blake2b(data, digest_size=16).digest()


class RecordStore:
    """Rollout records by position, in the order they were appended."""

    def __init__(self) -> None:
        self.tasks = array("q")
        self.indices = array("q")
        self.scored = array("b")
        self._fields = _NumberRows()
        self._scores = _NumberRows()
        self._answers: _Interned[Hashable] = _Interned()
        self._labels: _Interned[tuple[str | None, ...]] = _Interned()

    def append(self, task: int, record: RolloutRecord) -> None:
        self.tasks.append(task)
        self.indices.append(record.index)
        self.scored.append(record.scored)
        self._fields.append(record.fields)
        self._scores.append(record.scores)
        self._answers.append(record.answer)
        self._labels.append(record.labels)

    def __len__(self) -> int:
        return len(self.tasks)

    def has_fields(self, position: int) -> bool:
        """Whether the record has numeric fields: that of a masked rollout has none."""
        return self._fields.has(position)

    def __getitem__(self, position: int) -> RolloutRecord:
        return RolloutRecord(
            self.indices[position],
            self._fields[position],
            self._scores[position],
            self._answers[position],
            self._labels[position],
            bool(self.scored[position]),
        )


class _NumberRows:
    def __init__(self) -> None:
        self._schemas: _Interned[tuple[tuple[str, bool], ...]] = _Interned()  # (name, is an integer)
        self._ends = array("q", [0])
        self._numbers = array("d")

    def append(self, row: Mapping[str, int | float]) -> None:
        self._schemas.append(
            tuple((name, isinstance(value, int) and abs(value) <= _EXACT) for name, value in row.items())
        )
        self._numbers.extend(row.values())
        self._ends.append(len(self._numbers))

    def has(self, position: int) -> bool:
        return self._ends[position] < self._ends[position + 1]

    def __getitem__(self, position: int) -> dict[str, int | float]:
        numbers = self._numbers[self._ends[position] : self._ends[position + 1]]
        return {
            name: int(value) if is_integer else value
            for (name, is_integer), value in zip(self._schemas[position], numbers, strict=True)
        }


class _Interned(Generic[_T]):
    def __init__(self) -> None:
        self._codes = array("q")
        self._code_of: dict[_T, int] = {}
        self._values: list[_T] = []

    def append(self, value: _T) -> None:
        code = self._code_of.setdefault(value, len(self._values))
        if code == len(self._values):
            self._values.append(value)
        self._codes.append(code)

    def __getitem__(self, position: int) -> _T:
        return self._values[self._codes[position]]

"""Compact, append-only store of rollout records: about 8 bytes a number, not a dict a rollout.

All numbers lie in one flat array. A rollout is a slice of it, whose names are one of a few
schemas (rollouts of one environment have the same fields, give or take an optional one), so
a field that few rollouts have costs nothing in the others. Answers and labels repeat: each
distinct one is kept once.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

from gym_serve.metrics.records import RolloutRecord

__all__ = ["RecordStore"]

_T = TypeVar("_T", bound=Hashable)
_EXACT = 2**53  # integers up to here survive as floats


class RecordStore:
    """Rollout records by position, in the order they were appended."""

    def __init__(self) -> None:
        self.tasks = array("q")
        self.indices = array("q")
        self._fields = _NumberRows()
        self._scores = _NumberRows()
        self._answers: _Interned[Hashable] = _Interned()
        self._labels: _Interned[tuple[str | None, ...]] = _Interned()

    def append(self, task: int, record: RolloutRecord) -> None:
        """Store ``record`` as a rollout of ``task``."""
        self.tasks.append(task)
        self.indices.append(record.index)
        self._fields.append(record.fields)
        self._scores.append(record.scores)
        self._answers.append(record.answer)
        self._labels.append(record.labels)

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, position: int) -> RolloutRecord:
        return RolloutRecord(
            self.indices[position],
            self._fields[position],
            self._scores[position],
            self._answers[position],
            self._labels[position],
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

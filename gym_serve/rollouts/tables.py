"""Compact maps for a million entries: `IntTable`, `FloatTable`, `TaskMeans`; and `digest`, a key of JSON.

A dict costs about 150 bytes an entry, an `IntTable` at most 36: two flat arrays with open addressing. They
number the tasks of a long data set and remember what an interrupted run has finished.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator

import orjson

from gym_serve.types.exact import exact_bytes

_MIX = 0x9E3779B97F4A7C15  # Fibonacci hashing: neighbouring keys spread over the table


class IntTable:
    """Keys from 0 to 2**63 - 1, values from 0 to 2**32 - 1. Entries are never removed."""

    def __init__(self) -> None:
        self._len = 0
        self._resize(1024)

    def __len__(self) -> int:
        return self._len

    def get(self, key: int) -> int | None:
        slot = self._slot(key)
        return self._values[slot] if self._keys[slot] else None

    def values(self) -> Iterator[int]:
        return (value for key, value in zip(self._keys, self._values, strict=True) if key)

    def items(self) -> Iterator[tuple[int, int]]:
        return ((key - 1, value) for key, value in zip(self._keys, self._values, strict=True) if key)

    def __setitem__(self, key: int, value: int) -> None:
        slot = self._slot(key)
        if not self._keys[slot]:
            if 3 * self._len >= 2 * len(self._keys):
                self._grow()
                slot = self._slot(key)
            self._keys[slot] = key + 1  # 0 marks a free slot
            self._len += 1
        self._values[slot] = value

    def _slot(self, key: int) -> int:
        mask = len(self._keys) - 1
        slot = (key * _MIX >> 20) & mask
        while self._keys[slot] not in (0, key + 1):
            slot = (slot + 1) & mask
        return slot

    def _resize(self, slots: int) -> None:
        self._keys = array("Q", bytes(8 * slots))
        self._values = array("I", bytes(4 * slots))

    def _grow(self) -> None:
        keys, values = self._keys, self._values
        self._resize(2 * len(keys))
        for key, value in zip(keys, values, strict=True):
            if key:
                slot = self._slot(key - 1)
                self._keys[slot], self._values[slot] = key, value


class FloatTable:
    """Keys as of `IntTable`, values of 64 bits; 44 bytes an entry."""

    def __init__(self) -> None:
        self._places = IntTable()
        self._values = array("d")

    def get(self, key: int) -> float | None:
        place = self._places.get(key)
        return None if place is None else self._values[place]

    def __setitem__(self, key: int, value: float) -> None:
        self._places[key] = len(self._values)
        self._values.append(value)


class TaskMeans:
    """The mean over tasks of the mean of each, known at any time; 48 bytes a task at most."""

    def __init__(self) -> None:
        self._places = IntTable()
        self._totals = array("d")
        self._counts = array("I")
        self._sum, self._rounding = 0.0, 0.0

    def add(self, task: int, value: float) -> None:
        place = self._places.get(task)
        if place is None:
            self._places[task] = place = len(self._totals)
            self._totals.append(0.0)
            self._counts.append(0)
        before = self._totals[place] / self._counts[place] if self._counts[place] else 0.0
        self._totals[place] += value
        self._counts[place] += 1
        self._grow(-before)
        self._grow(self._totals[place] / self._counts[place])

    @property
    def mean(self) -> float | None:
        return (self._sum + self._rounding) / len(self._totals) if self._totals else None

    def _grow(self, value: float) -> None:
        total = self._sum + value  # what rounding loses is kept (Neumaier 1974)
        large, small = (self._sum, value) if abs(self._sum) >= abs(value) else (value, self._sum)
        self._rounding += (large - total) + small
        self._sum = total


def digest(value: object) -> int:
    """63 bits of a JSON value; two of a million values share theirs with a chance of 1 in 18 million. Raises
    `TypeError`: the value is not JSON."""
    data = exact_bytes(value, orjson.OPT_SORT_KEYS)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1

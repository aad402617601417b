"""`Duplicates`: which rows were seen before, in about 30 bytes a row."""

from __future__ import annotations

from gym_serve.rollouts.digests import digest
from gym_serve.rollouts.int_table import IntTable

__all__ = ["Duplicates"]


class Duplicates:
    """Remembers values and the place of each one's first occurrence."""

    def __init__(self) -> None:
        self._first = IntTable()
        self._files: list[tuple[str, int]] = []
        self._lines = 0

    def first_place(self, value: object, where: str) -> str | None:
        """Where the same value was first seen; None if it was not, and is now.

        Args:
            value: any JSON value.
            where: its place, ``"rows.jsonl:17"``; the lines of one file come one after the other.
        """
        file, _, line = where.rpartition(":")
        if not self._files or self._files[-1][0] != file:
            self._files.append((file, self._lines))
        position = self._files[-1][1] + int(line)
        self._lines = position
        key = digest(value)
        first = self._first.get(key)
        if first is None:
            self._first[key] = position
            return None
        name, start = next(entry for entry in reversed(self._files) if entry[1] < first)
        return f"{name}:{first - start}"

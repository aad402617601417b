"""`RowStatistics`: what is in a data set, gathered in one pass and in little memory.

The numbers are NeMo Gym's (``dataset collate``): tools, turns and temperature of a row, the words of its
``responses_create_params`` as JSON (a proxy for tokens), and of each further field the numbers and the
texts in it, those in lists one by one.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gym_serve.cli.dataset.checks import Duplicates
from gym_serve.rollouts.analysis.reading import agent_of
from gym_serve.rollouts.tables import IntTable, digest
from gym_serve.types.requests import JSON

_MOST_FIELDS = 500  # a data set has few fields; names made up per row must not fill the memory
_PARAMS = "responses_create_params"


@dataclass
class NumberStatistics:
    """Mean and spread of numbers that come one by one (Welford)."""

    total: int = 0
    mean: float = 0.0
    squares: float = 0.0
    min: float = math.inf
    max: float = -math.inf

    def add(self, value: float) -> None:
        """Take one number in."""
        self.total += 1
        delta = value - self.mean
        self.mean += delta / self.total
        self.squares += delta * (value - self.mean)
        self.min, self.max = min(self.min, value), max(self.max, value)

    def result(self) -> JSON:
        """``total``, ``average``, ``min``, ``max`` and ``stddev`` (of the sample); null without numbers."""
        deviation = math.sqrt(self.squares / (self.total - 1)) if self.total > 1 else 0.0
        figures = {"average": self.mean, "min": self.min, "max": self.max, "stddev": deviation}
        return {"total": self.total, **(figures if self.total else dict.fromkeys(figures))}


@dataclass
class _Field:
    rows: int = 0
    texts: int = 0
    numbers: NumberStatistics = field(default_factory=NumberStatistics)
    different: IntTable = field(default_factory=IntTable)

    def add(self, value: Any) -> None:
        self.rows += 1
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str):
                self.texts += 1
                self.different[digest(item)] = 1
            elif isinstance(item, int | float):
                self.numbers.add(float(item))

    def result(self) -> JSON:
        return {
            "rows": self.rows,
            "texts": self.texts,
            "unique_texts": len(self.different),
            "numbers": self.numbers.result(),
        }


class RowStatistics:
    """Accumulates rows that are well-formed."""

    def __init__(self) -> None:
        self._rows = self._duplicates = 0
        self._seen = Duplicates()
        self._prompts = IntTable()
        self._agents: Counter[str] = Counter()
        self._fields: dict[str, _Field] = {}
        names = ("number_of_tools", "number_of_turns", "json_dumped_number_of_words", "temperature")
        self._numbers = {name: NumberStatistics() for name in names}

    def add(self, row: JSON, where: str) -> None:
        """Take in a row from its place, ``"rows.jsonl:17"``."""
        self._rows += 1
        self._duplicates += self._seen.first_place(row, where) is not None
        self._prompts[digest(row[_PARAMS]["input"])] = 1
        self._agents[agent_of(row)] += 1
        for name, number in _numbers(row[_PARAMS]):
            self._numbers[name].add(number)
        for name, value in row.items():
            if name not in self._fields and len(self._fields) < _MOST_FIELDS:
                self._fields[name] = _Field()
            if name in self._fields:
                self._fields[name].add(value)

    def result(self) -> JSON:
        """All of it, as JSON can hold it."""
        return {
            "rows": self._rows,
            "duplicate_rows": self._duplicates,
            "unique_prompts": len(self._prompts),
            "agents": dict(self._agents.most_common()),
            "numbers": {name: numbers.result() for name, numbers in self._numbers.items()},
            "fields": {name: found.result() for name, found in self._fields.items()},
        }


def _numbers(params: JSON) -> Iterator[tuple[str, float]]:
    if params.get("tools") is not None:
        yield "number_of_tools", len(params["tools"])
    given = params["input"]
    turns = 1 if isinstance(given, str) else sum(1 for item in given if item.get("role") == "user")
    if turns:
        yield "number_of_turns", turns
    yield "json_dumped_number_of_words", len(json.dumps(params).split())
    if isinstance(temperature := params.get("temperature"), int | float):
        yield "temperature", temperature

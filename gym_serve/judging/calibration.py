"""How far a judge agrees with people: agreement and Cohen's kappa on labelled rows.

Agreement alone flatters: a judge that always says the more common label agrees often by chance. Kappa is the
agreement beyond chance, (p_o - p_e) / (1 - p_e); 0 is chance, 1 is full agreement (Cohen, "A coefficient of
agreement for nominal scales", 1960).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from gym_serve.types.errors import InvalidRequest, VerifierFailed
from gym_serve.types.requests import JSON

__all__ = ["Calibration", "calibrate"]

T = TypeVar("T")

Label = Hashable


@dataclass(frozen=True)
class Calibration:
    """A judge beside people.

    Attributes:
        pairs: how often each pair (person's label, judge's label) came up; None is a reply without verdict.
        failed: rows whose judge failed; they are in none of the figures.
    """

    pairs: Mapping[tuple[Label, Label], int]
    failed: int = 0

    @classmethod
    def of(cls, labels: Iterable[tuple[Label, Label]], failed: int = 0) -> Calibration:
        """The calibration of (person's label, judge's label) pairs.

        Raises:
            InvalidRequest: there is no pair.
        """
        pairs = Counter(labels)
        if not pairs:
            raise InvalidRequest("calibration: there is no labelled row with a verdict")
        return cls(pairs, failed)

    @property
    def rows(self) -> int:
        """How many rows the figures rest on."""
        return sum(self.pairs.values())

    @property
    def agreement(self) -> float:
        """Share of rows with the same label, 0 to 1."""
        return sum(count for (person, judge), count in self.pairs.items() if person == judge) / self.rows

    @property
    def kappa(self) -> float | None:
        """Cohen's kappa, -1 to 1; None where both gave one and the same label to all rows."""
        people, judges = Counter[Label](), Counter[Label]()
        for (person, judge), count in self.pairs.items():
            people[person] += count
            judges[judge] += count
        chance = sum(people[label] * judges[label] for label in people) / self.rows**2
        return None if chance == 1.0 else (self.agreement - chance) / (1.0 - chance)

    def to_json(self) -> JSON:
        """The figures; ``confusion`` is by the person's label, then the judge's."""
        confusion: dict[str, dict[str, int]] = {}
        for (person, judge), count in sorted(self.pairs.items(), key=repr):
            row = confusion.setdefault(str(person), {})
            row[str(judge)] = row.get(str(judge), 0) + count
        return {
            "rows": self.rows,
            "failed": self.failed,
            "agreement": self.agreement,
            "kappa": self.kappa,
            "confusion": confusion,
        }


async def calibrate(
    labelled: Iterable[tuple[T, Label]], judge: Callable[[T], Awaitable[Label]]
) -> Calibration:
    """Let a judge label what people have labelled, all at once: `JudgeCalls` bounds what runs.

    Args:
        labelled: each question with the person's label.
        judge: the judge's label of a question; one that raises `VerifierFailed` is counted as failed.

    Raises:
        InvalidRequest: no question got a label.
    """

    async def pair(question: T, label: Label) -> tuple[Label, Label] | None:
        try:
            return label, await judge(question)
        except VerifierFailed:
            return None

    asked = [asyncio.create_task(pair(question, label)) for question, label in labelled]
    try:
        pairs = await asyncio.gather(*asked)
    finally:
        for task in asked:  # the others of one that failed in a way that was not foreseen
            task.cancel()
    judged = [found for found in pairs if found is not None]
    return Calibration.of(judged, failed=len(pairs) - len(judged))

"""Verifier fixtures: what a verifier must say to given responses, one case a line of ``fixtures.jsonl``.

    {"name": "full: ...",        the part before ":" is its kind
     "row": {...},               the row
     "calls": [{"name", "arguments"}],   tools called in the session before (optional)
     "output": [...],            the output items of the response to score
     "judge": [...],             replies of the models that the verifier asks, in order (optional):
                                 a text, a list of output items, or a whole response
     "reward": 1.0,              what the verifier answers, with these ``fields`` among others;
     "fields": {...},
     "error": null}              or the code of its error, and then no reward

Every case runs twice, each time in a session of its own, and the whole verdict must be the same: a reward
that depends on chance or on what came before cannot be learned from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from typing_extensions import Self

from gym_serve.rollouts.rows import read_rows
from gym_serve.types.errors import InvalidRequest
from gym_serve.types.requests import JSON, problems_of

Kind = Literal["full", "zero", "malformed", "other"]

KINDS: tuple[Kind, ...] = ("full", "zero", "malformed")
"""The kinds that every verifier needs: the full reward, none, and a row or response that is broken."""


class ToolCall(BaseModel):
    """A tool that is called in the session before the response is scored."""

    model_config = ConfigDict(extra="forbid")

    name: str
    arguments: JSON = {}


class Fixture(BaseModel):
    """One case; the keys are explained at the top of the module."""

    model_config = ConfigDict(extra="forbid")

    name: str
    row: JSON
    output: list[JSON]
    reward: float | None = None
    fields: JSON = {}
    error: str | None = None
    calls: list[ToolCall] = []
    judge: list[Any] = []

    @model_validator(mode="after")
    def _one_expectation(self) -> Self:
        if (self.reward is None) == (self.error is None):
            raise ValueError("either a reward or an error is expected")
        return self

    @property
    def kind(self) -> Kind:
        """The part of the name before ``:``, else derived from the expected verdict."""
        prefix = self.name.partition(":")[0].strip().lower()
        for kind in KINDS:
            if prefix == kind:
                return kind
        if ":" in self.name:
            return "other"
        if self.reward is None:
            return "malformed"
        return "full" if self.reward >= 1 else "other" if self.reward > 0 else "zero"


def load_fixtures(path: str | Path) -> list[Fixture]:
    """The cases of a file.

    Raises:
        InvalidRequest: it cannot be read, has no cases, or lines that are none; all of them.
    """
    fixtures, problems = [], []
    for where, line, problem in read_rows(Path(path)):
        try:
            if line is None:
                problems.append(f"{where}: {problem}")
            else:
                fixtures.append(Fixture.model_validate(line))
        except ValidationError as error:
            problems += [f"{where}: {problem}" for problem in problems_of(error, "the case")]
    if problems:
        raise InvalidRequest("\n".join(problems))
    if not fixtures:
        raise InvalidRequest(f"{path}: no fixtures")
    return fixtures


def missing_kinds(fixtures: Iterable[Fixture]) -> list[Kind]:
    """The kinds of `KINDS` that no case is of."""
    there = {fixture.kind for fixture in fixtures}
    return [kind for kind in KINDS if kind not in there]


def expectation_problems(
    fixture: Fixture, verdict: Mapping[str, Any] | None, error: str | None
) -> Iterator[str]:
    """How a verdict, or the code of an error, differs from what a case expects."""
    if fixture.error is not None:
        if error != fixture.error:
            got = f"the error {error!r}" if error else f"the reward {(verdict or {}).get('reward')}"
            yield f"the error {fixture.error!r} was expected, not {got}"
        return
    if verdict is None:
        yield f"the reward {fixture.reward} was expected, not the error {error!r}"
        return
    if not _same(fixture.reward, verdict.get("reward")):
        yield f"reward: {fixture.reward} was expected, not {verdict.get('reward')}"
    for name, value in fixture.fields.items():
        if not _same(value, verdict.get(name)):
            yield f"{name}: {value!r} was expected, not {verdict.get(name)!r}"


def _same(expected: Any, given: Any) -> bool:
    if isinstance(expected, float) and isinstance(given, int | float) and not isinstance(given, bool):
        return math.isclose(expected, given, rel_tol=1e-9, abs_tol=1e-12)
    return bool(expected == given)

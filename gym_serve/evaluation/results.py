"""`results_of`: the scores of a run, from its files: by benchmark and model, broken down, beside a baseline.

A score is the mean over rows of the mean of their rollouts. A failed or masked rollout is no score: coverage
says how many there are. Differences to a baseline are paired by row, where it asked the same of it; their
intervals are bootstraps over rows, and the p-values, of a sign-flip test (Fisher's randomization), are
corrected for their number by Holm's method.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from gym_serve.evaluation.benchmark import ROW_ID
from gym_serve.metrics.aggregator import mean_over_tasks
from gym_serve.metrics.estimators import majority_curve, pass_at_k, sign_flip
from gym_serve.metrics.records import ROLLOUT_INDEX
from gym_serve.rollouts import Outputs
from gym_serve.rollouts.analysis.reading import agent_of
from gym_serve.rollouts.files import read_records
from gym_serve.rollouts.rows import METADATA_KEYS
from gym_serve.rollouts.tables import digest
from gym_serve.types.endings import failure_class
from gym_serve.types.requests import JSON, message_text

_WORST = 5
_NOT_COLUMNS = {"responses_create_params", "agent_ref", ROW_ID, *METADATA_KEYS}


@dataclass(frozen=True)
class Score:
    """A mean over rows, as a fraction, and its 95% interval; ``low`` and ``high`` are None for one row."""

    mean: float
    low: float | None
    high: float | None
    rows: int


@dataclass(frozen=True)
class Difference:
    """A cell beside the same cell of the baseline, over the rows of both."""

    baseline: float
    mean: float
    low: float | None
    high: float | None
    rows: int
    p: float
    """Of the sign-flip test, corrected by Holm's method for the number of cells."""

    @property
    def is_clear(self) -> bool:
        return self.p < 0.05


@dataclass
class Cell:
    """One benchmark with one model."""

    benchmark: str
    model: str
    score: Score | None = None
    scored: int = 0
    asked: int = 0
    reducers: dict[str, float] = field(default_factory=dict)
    """With several rollouts of a row: ``pass@k``, ``pass^k``, ``best@k``, ``majority@k``."""
    by: dict[str, dict[str, Score]] = field(default_factory=dict)
    """The score for each value of a field, by field."""
    difference: Difference | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    health: list[str] = field(default_factory=list)
    worst: list[JSON] = field(default_factory=list)
    """Rows with the lowest score, with what the model wrote and why it was not right."""


@dataclass(frozen=True)
class Results:
    """An evaluation in numbers."""

    record: JSON
    cells: list[Cell]
    cost: float | None = None

    @property
    def lowest(self) -> float | None:
        """The lowest score of a cell; None where one has none."""
        scores = [cell.score.mean if cell.score else None for cell in self.cells]
        return None if None in scores else min((s for s in scores if s is not None), default=None)

    def to_json(self) -> JSON:
        return {**self.record, "cost": self.cost, "cells": [asdict(cell) for cell in self.cells]}


def results_of(
    output: Path,
    agents: Mapping[str, tuple[str, str]],
    record: JSON,
    *,
    by: Sequence[str] = (),
    baseline: Path | None = None,
    answers: Mapping[str, str] | None = None,
    cost: float | None = None,
) -> Results:
    """The results of a run.

    Args:
        output: main file of the run.
        agents: benchmark and model, by the name of the agent that plays them.
        by: fields to break scores down by.
        baseline: main file of an earlier evaluation.
        answers: by benchmark, the field of a verdict that has the answer, for majority votes.
    """
    tallies = _read(output, by, answers or {})
    cells = []
    for agent, (benchmark, model) in agents.items():
        cells.append(tallies[agent].cell(benchmark, model, by))
    if baseline is not None:
        stored = _read(baseline, (), {})
        before = {agent: _earlier(stored, agent, cell) for agent, cell in zip(agents, cells, strict=True)}
        pairs = [_pair(before[agent], tallies[agent]) for agent in agents]
        for cell, agent in zip(cells, agents, strict=True):
            if others := len(tallies[agent].other_rows(before[agent])):
                cell.health.append(
                    f"{others:,} rows asked something else in the baseline, and are not compared"
                )
        corrected = holm([None if pair is None else sign_flip(pair[1]) for pair in pairs])
        for cell, pair, p in zip(cells, pairs, corrected, strict=True):
            if pair is not None and p is not None:
                score = _score([[difference] for difference in pair[1]], binary=False)
                cell.difference = Difference(fmean(pair[0]), score.mean, score.low, score.high, score.rows, p)
    return Results(record, cells, cost)


class _Scored(NamedTuple):
    """What counts of a rollout."""

    place: int  # the rollout's index
    reward: float
    answer: Any


class _Tally:
    """The rollouts of one agent."""

    def __init__(self) -> None:
        self.rows: dict[str, list[_Scored]] = defaultdict(list)
        """By rollout index, not as they ended: the first k would be the quickest."""
        self.asked = 0
        self.contents: dict[str, tuple[int, int]] = {}
        """Of each row: digests of its prompt, and of its columns."""
        self.values: dict[str, dict[str, str]] = {}
        self.worst: list[tuple[float, JSON]] = []
        self.counts: Counter[str] = Counter()
        self.letters: Counter[str] = Counter()
        self.limits: Counter[str] = Counter()

    def ask(self, row: JSON) -> None:
        """Add a row that was asked for."""
        self.asked += 1
        columns = {key: value for key, value in row.items() if key not in _NOT_COLUMNS}
        prompt = (row.get("responses_create_params") or {}).get("input")
        self.contents[str(row.get(ROW_ID))] = digest(prompt), digest(columns)

    def other_rows(self, before: _Tally) -> set[str]:
        """The rows whose prompt and columns both differ from those of the same name in another run: their
        place in the data set is all that they share."""
        shared = self.contents.keys() & before.contents.keys()
        pairs = ((row, zip(self.contents[row], before.contents[row], strict=True)) for row in shared)
        return {row for row, pair in pairs if all(one != other for one, other in pair)}

    def add(self, rollout: JSON, by: Sequence[str], answer: str | None) -> None:
        row, reward = str(rollout.get(ROW_ID)), float(rollout["reward"])
        value = None if answer is None else rollout.get(answer)
        scored = _Scored(rollout.get(ROLLOUT_INDEX, 0), reward, _hashable(value))
        insort(self.rows[row], scored, key=itemgetter(0))
        self.values[row] = {field: str(rollout[field]) for field in by if field in rollout}
        response = rollout["response"]
        output = response.get("output") or []
        text = "".join(message_text(item) for item in output if item.get("type") == "message")
        calls = sum(item.get("type") == "function_call" for item in output)
        usage = response.get("usage") or {}
        tokens = usage.get("output_tokens") or 0
        answered = bool(output) or "model_usage" in rollout  # not so of the agents oracle and nop
        has_tools = answered and bool(rollout.get("responses_create_params", {}).get("tools"))
        self.counts.update(
            rollouts=1,
            empty=answered and not (text.strip() or calls),
            cut=answered and response.get("status") == "incomplete",
            tools=has_tools,
            no_call=has_tools and not calls,
            uncounted=bool(text) and not tokens,
            input_tokens=usage.get("input_tokens") or 0,
            output_tokens=tokens,
        )
        if answered and isinstance(limit := rollout.get("stopped_by"), str):
            self.limits[limit] += 1
        if answer is not None:
            self.letters[str(value)] += 1
        self.worst.append(
            (reward, {"row": row, "reward": reward, "reason": rollout.get("reason"), "text": text[-400:]})
        )
        self.worst = sorted(self.worst, key=lambda one: one[0])[:_WORST]

    def cell(self, benchmark: str, model: str, by: Sequence[str]) -> Cell:
        counts = self.counts
        cell = Cell(benchmark, model, scored=counts["rollouts"], asked=self.asked)
        cell.input_tokens, cell.output_tokens = counts["input_tokens"], counts["output_tokens"]
        if self.rows:
            cell.score = _score(self.rewards.values(), binary=self.binary)
            cell.reducers = dict(self._reducers())
            cell.by = {field: groups for field in by if (groups := self._broken_down(field))}
            cell.worst = [row for reward, row in self.worst if reward < 1]
            cell.health = [f"no rollout has the field {name} of --by" for name in by if name not in cell.by]
        cell.health += self._health()
        return cell

    @property
    def rewards(self) -> dict[str, list[float]]:
        return {row: [one.reward for one in scored] for row, scored in self.rows.items()}

    @property
    def binary(self) -> bool:
        return all(one.reward in (0, 1) for scored in self.rows.values() for one in scored)

    def _broken_down(self, field: str) -> dict[str, Score]:
        groups: dict[str, list[list[float]]] = defaultdict(list)
        for row, rewards in self.rewards.items():
            if field in self.values[row]:
                groups[self.values[row][field]].append(rewards)
        return {value: _score(those, binary=self.binary) for value, those in sorted(groups.items())}

    def _reducers(self) -> Iterator[tuple[str, float]]:
        groups = list(self.rewards.values())
        k = min(map(len, groups))
        if k < 2:
            return
        if self.binary:
            yield f"pass@{k}", fmean(pass_at_k(rewards, k) or 0.0 for rewards in groups)
            yield f"pass^{k}", fmean(math.comb(int(sum(r)), k) / math.comb(len(r), k) for r in groups)
        yield f"best@{k}", fmean(max(rewards[:k]) for rewards in groups)
        if self.letters:
            votes = ([(one.answer, one.reward) for one in scored] for scored in self.rows.values())
            yield f"majority@{k}", fmean(majority_curve(each, k)[-1] for each in votes)

    def _health(self) -> Iterator[str]:
        """What looks wrong about the run itself, one line each."""
        counts, total, asked = self.counts, self.counts["rollouts"], self.asked
        if total < asked:
            yield f"{asked - total:,} of {asked:,} rollouts have no score"
        if not total:
            return
        for name, what in (
            ("empty", "answers are empty"),
            ("cut", "answers end at a limit of tokens"),
            ("uncounted", "answers have text, and no output tokens in their usage"),
        ):
            if counts[name]:
                yield f"{counts[name]:,} of {total:,} {what}"
        for limit, count in sorted(self.limits.items()):
            yield f"{count:,} of {total:,} rollouts were stopped by {limit}, and are scored as they stand"
        if counts["tools"] and counts["no_call"] == counts["tools"]:
            yield f"no answer calls a tool, though {counts['tools']:,} have tools"
        if self.letters and total >= 10 and (commonest := self.letters.most_common(1)[0])[1] == total:
            yield f"all answers are {commonest[0]}"
        means = [fmean(rewards) for rewards in self.rewards.values()]
        if len(means) >= 10 and len(set(means)) == 1 and means[0] in (0, 1):
            yield "every row is solved" if means[0] else "no row is solved"


def _read(output: Path, by: Sequence[str], answers: Mapping[str, str]) -> dict[str, _Tally]:
    tallies: dict[str, _Tally] = defaultdict(_Tally)
    outputs = Outputs.of(output)
    if outputs.inputs.exists():
        for row in read_records(outputs.inputs):
            tallies[agent_of(row)].ask(row)
    for rollout in read_records(outputs.rollouts):
        if failure_class(rollout) is None and isinstance(rollout.get("response"), dict):
            benchmark = str(rollout.get(ROW_ID)).partition("/")[0]
            tallies[agent_of(rollout)].add(rollout, by, answers.get(benchmark))
    return tallies


def _score(rows: Iterable[list[float]], *, binary: bool) -> Score:
    figure = mean_over_tasks(list(rows), binary=binary)
    interval = figure.confidence()
    return Score(figure.value, interval.get("low"), interval.get("high"), figure.num_tasks)


def _earlier(stored: Mapping[str, _Tally], agent: str, cell: Cell) -> _Tally:
    """What a baseline has of a cell's model, or of another one that it has alone; the cell says so."""
    if agent in stored:
        return stored[agent]
    place = f"{cell.benchmark}/"
    others = [name for name, one in stored.items() if any(row.startswith(place) for row in one.contents)]
    if len(others) == 1:
        cell.health.append(f"the baseline is of another model: {others[0]}")
        return stored[others[0]]
    models = f"only {', '.join(sorted(others))}" if others else "nothing of this benchmark"
    cell.health.append(f"not compared, the baseline has {models}")
    return _Tally()


def _pair(before: _Tally, after: _Tally) -> tuple[list[float], list[float]] | None:
    """The baseline's means, and the differences to them, of the rows that both have asked and scored."""
    first, second = before.rewards, after.rewards
    rows = sorted((first.keys() & second.keys()) - after.other_rows(before))
    if not rows:
        return None
    means = [fmean(first[row]) for row in rows]
    return means, [fmean(second[row]) - mean for row, mean in zip(rows, means, strict=True)]


def holm(p_values: Iterable[float | None]) -> list[float | None]:
    """P-values corrected for their number (Holm 1979); None stays None."""
    values = list(p_values)
    ordered = sorted((p, position) for position, p in enumerate(values) if p is not None)
    corrected, highest = list(values), 0.0
    for rank, (p, position) in enumerate(ordered):
        highest = max(highest, min(1.0, p * (len(ordered) - rank)))
        corrected[position] = highest
    return corrected


def _hashable(value: Any) -> Any:
    return value if isinstance(value, str | int | float | None) else repr(value)

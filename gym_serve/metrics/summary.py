"""The table that ends a run: one row for each environment or agent.

Its mean reward is gym_serve's own, the same in every table and on every page: the mean of each task's
rollouts, and of these the mean over tasks, so that every task has the same weight however many rollouts it
has. NeMo Gym's ``mean/reward`` is the mean over rollouts.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

from gym_serve.metrics.aggregator import Aggregator, Failures
from gym_serve.metrics.estimators import Clusters, Figure, pass_at_k
from gym_serve.metrics.records import LATENCY_FIELD

SUMMARY_COLUMNS = (
    *("name", "scored", "mean reward", "95% interval", "pass@k %", "tokens in/out", "seconds"),
)
"""Headings of `SummaryRow.cells`."""

INTERVALS = {
    "wilson": "Wilson's where all values are 0 or 1",
    "bootstrap": "bootstrap over tasks for other values",
}
"""What stands below a table, by the ``method`` of its intervals."""


@dataclass(frozen=True)
class SummaryRow:
    """Figures of one environment or agent; None where no rollout gives them."""

    name: str
    scored: int
    """Scored rollouts."""
    asked: int
    """Rollouts that were asked for."""
    mean_reward: float | None
    """Mean over tasks of the mean of each."""
    interval: Mapping[str, Any]
    """``num_tasks``; for two tasks or more also ``low``, ``high`` and ``method`` of the 95% interval."""
    pass_at_k: float | None
    """Percent, over the tasks with ``k`` rollouts or more; None if there are other rewards than 0 and 1, of
    which only the means are known, and no chance to pass. With ``k`` of 1 it is the mean reward."""
    k: int
    """The size that at least half of the groups reach; 0 without rollouts."""
    input_tokens: float | None
    """Mean tokens of a rollout, over all its model calls; likewise ``output_tokens``."""
    output_tokens: float | None
    seconds: float | None
    """Mean duration of a rollout's episode."""
    failures: int
    """Attempts without a score."""

    def cells(self) -> tuple[str, ...]:
        pass_at_k = "-" if self.pass_at_k is None else f"{self.pass_at_k:.1f} (k={self.k})"
        return (
            self.name,
            f"{self.scored}/{self.asked}",
            _text(self.mean_reward, 3),
            interval_text(self.interval, 3),
            pass_at_k,
            f"{_text(self.input_tokens, 0)}/{_text(self.output_tokens, 0)}",
            _text(self.seconds, 2),
        )


def interval_text(interval: Any, digits: int = 4) -> str:
    """``low to high``; empty where there is no interval."""
    if not isinstance(interval, Mapping) or "low" not in interval or "high" not in interval:
        return ""
    return f"{interval['low']:.{digits}g} to {interval['high']:.{digits}g}"


def summarize(
    aggregators: Mapping[str, Aggregator],
    asked: Mapping[str, int] | None = None,
    failures: Failures = "mask",
) -> list[SummaryRow]:
    """One row for each aggregator, in the mapping's order. ``asked``: how many rollouts were asked for, where
    that is known; else those that have ended count."""
    asked_counts = asked or {}
    return [_summarize(name, one, asked_counts.get(name, 0), failures) for name, one in aggregators.items()]


def _summarize(name: str, aggregator: Aggregator, asked: int, failures: Failures) -> SummaryRow:
    columns = {field: array("d") for field in ("input_tokens", "output_tokens", LATENCY_FIELD)}
    rewards: list[list[float]] = []
    for group in aggregator.groups(failures):
        rewards.append([r.fields["reward"] for r in group.rollouts if "reward" in r.fields])
        for field, column in columns.items():
            column.extend(r.fields[field] for r in group.rollouts if field in r.fields)
    rewards = [of_task for of_task in rewards if of_task]
    binary = all(reward in (0, 1) for of_task in rewards for reward in of_task)
    k = median_low(map(len, rewards)) if rewards else 0
    means = {field: math.fsum(column) / len(column) for field, column in columns.items() if column}
    mean = mean_over_tasks(rewards, binary=binary)
    coverage = aggregator.coverage()
    return SummaryRow(
        name=name,
        scored=coverage.scored,
        asked=max(asked, coverage.asked),
        mean_reward=mean.value if rewards else None,
        interval=mean.confidence(),
        pass_at_k=_mean_pass_at(rewards, k) if binary else None,
        k=k,
        input_tokens=means.get("input_tokens"),
        output_tokens=means.get("output_tokens"),
        seconds=means.get(LATENCY_FIELD),
        failures=aggregator.failures.total(),
    )


def mean_of(rows: Sequence[SummaryRow]) -> float | None:
    """The mean reward over the tasks of several rows, which share none; None without any."""
    sizes = {row.name: row.interval["num_tasks"] for row in rows}
    total = sum(sizes.values())
    sums = (row.mean_reward * sizes[row.name] for row in rows if row.mean_reward is not None)
    return math.fsum(sums) / total if total else None


def mean_over_tasks(values: list[list[float]], *, binary: bool, scale: float = 1.0) -> Figure:
    """The mean over tasks of the mean of each. ``binary``: whether all values are 0 or 1; ``scale``: see
    `Figure`."""
    clusters = Clusters(len(values))
    figure = Figure(clusters, scale, binary=binary)
    for position, of_task in enumerate(values):
        figure.add(clusters.of(position), math.fsum(of_task) / len(of_task), rollouts=len(of_task))
    return figure


def _mean_pass_at(rewards: list[list[float]], k: int) -> float | None:
    values = [value for scores in rewards if (value := pass_at_k(scores, k)) is not None]
    return 100.0 * math.fsum(values) / len(values) if values else None


def _text(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"

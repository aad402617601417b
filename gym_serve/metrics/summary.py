"""The table that ends a run: one row for each environment or agent."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_low

from gym_serve.metrics.aggregator import Aggregator
from gym_serve.metrics.estimators import pass_at_k
from gym_serve.metrics.records import LATENCY_FIELD

SUMMARY_COLUMNS = (
    "name",
    "rollouts",
    "mean reward",
    "pass@1 %",
    "pass@k %",
    "tokens in",
    "tokens out",
    "seconds",
    "failures",
)
"""Headings of `SummaryRow.cells`."""


@dataclass(frozen=True)
class SummaryRow:
    """Figures of one environment or agent; None where no rollout gives them."""

    name: str
    rollouts: int
    """Scored rollouts."""
    mean_reward: float | None
    pass_at_1: float | None
    """Percent, with the reward as the score."""
    pass_at_k: float | None
    """Percent, over the tasks with ``k`` rollouts or more."""
    k: int
    """The size that at least half of the groups reach; 0 without rollouts."""
    input_tokens: float | None
    """Mean tokens of a rollout, over all its model calls; likewise ``output_tokens``."""
    output_tokens: float | None
    seconds: float | None
    """Mean duration of a rollout's episode."""
    failures: int
    """Failed attempts."""

    def cells(self) -> tuple[str, ...]:
        """The row as text, under `SUMMARY_COLUMNS`."""
        pass_at_k = "-" if self.pass_at_k is None else f"{self.pass_at_k:.1f} (k={self.k})"
        return (
            self.name,
            str(self.rollouts),
            _text(self.mean_reward, 3),
            _text(self.pass_at_1, 1),
            pass_at_k,
            _text(self.input_tokens, 0),
            _text(self.output_tokens, 0),
            _text(self.seconds, 2),
            str(self.failures),
        )


def summarize(aggregators: Mapping[str, Aggregator]) -> list[SummaryRow]:
    """One row for each aggregator, in the mapping's order."""
    return [_summarize(name, aggregator) for name, aggregator in aggregators.items()]


def _summarize(name: str, aggregator: Aggregator) -> SummaryRow:
    columns = {field: array("d") for field in ("reward", "input_tokens", "output_tokens", LATENCY_FIELD)}
    sizes: list[int] = []
    rewards: list[list[float]] = []
    for group in aggregator.groups():
        sizes.append(len(group.rollouts))
        rewards.append([r.fields["reward"] for r in group.rollouts if "reward" in r.fields])
        for field, column in columns.items():
            column.extend(r.fields[field] for r in group.rollouts if field in r.fields)
    k = median_low(sizes) if sizes else 0
    means = {field: math.fsum(column) / len(column) for field, column in columns.items() if column}
    return SummaryRow(
        name=name,
        rollouts=sum(sizes),
        mean_reward=means.get("reward"),
        pass_at_1=_mean_pass_at(rewards, 1),
        pass_at_k=_mean_pass_at(rewards, k),
        k=k,
        input_tokens=means.get("input_tokens"),
        output_tokens=means.get("output_tokens"),
        seconds=means.get(LATENCY_FIELD),
        failures=aggregator.failures.total(),
    )


def _mean_pass_at(rewards: list[list[float]], k: int) -> float | None:
    values = [value for scores in rewards if (value := pass_at_k(scores, k)) is not None]
    return 100.0 * math.fsum(values) / len(values) if values else None


def _text(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"

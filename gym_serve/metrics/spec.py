"""What an environment's metrics are computed from, declared as data.

Declared rather than coded, so that a collection of a million rollouts is aggregated as a
stream by the collector, which needs nothing of the environment but this description.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["STATISTICS_ONLY", "Breakdown", "MetricSpec", "Score"]


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

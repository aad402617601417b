"""mean, max, min, median and std of the numeric fields of a set of rollouts.

std is the sample standard deviation (n - 1 in the denominator). One rollout has no
spread, so its std is 0; a field that only one of several rollouts has gets no std at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

__all__ = ["describe", "median", "stdev"]


def describe(columns: Mapping[str, Sequence[float]], num_rollouts: int) -> dict[str, float]:
    """Statistics keyed ``{statistic}/{field}``.

    Args:
        columns: each field's values over the rollouts that have it; none is empty.
        num_rollouts: how many rollouts the columns were read from.
    """
    stats: dict[str, float] = {}
    for name, values in columns.items():
        stats[f"mean/{name}"] = math.fsum(values) / len(values)
        stats[f"max/{name}"] = float(max(values))
        stats[f"min/{name}"] = float(min(values))
        stats[f"median/{name}"] = median(values)
        if len(values) > 1:
            stats[f"std/{name}"] = stdev(values)
        elif num_rollouts == 1:
            stats[f"std/{name}"] = 0.0
    return stats


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two middle ones."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return float(ordered[middle])
    return (ordered[middle - 1] + ordered[middle]) / 2


def stdev(values: Sequence[float]) -> float:
    """Sample standard deviation of two values or more, by the corrected two-pass formula.

    The correction takes out the rounding of the mean, so that equal values give exactly 0;
    `statistics.stdev` does too, in rational arithmetic that is too slow for a million values.
    """
    mean = math.fsum(values) / len(values)
    deviations = [value - mean for value in values]
    squares = math.fsum(d * d for d in deviations)
    correction = math.fsum(deviations) ** 2 / len(values)
    return math.sqrt(max(0.0, squares - correction) / (len(values) - 1))

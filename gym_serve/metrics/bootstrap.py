"""95% confidence intervals by a cluster bootstrap over tasks.

Rollouts of one task are not independent (they share its difficulty), so tasks are what is
resampled, with all their rollouts. Every figure is a ratio of two sums over tasks, which
covers means over rollouts (tasks of unequal size) and means over tasks alike.

Deterministic: the seed is fixed and `random.Random.random` is the one generator call whose
sequence Python guarantees across versions. Bounded: above `MAX_CLUSTERS` tasks, tasks are
dealt at random into that many clusters of equal size, which are resampled instead; the
widths stay right to about 3%, and a million tasks cost no more than five hundred.
"""

from __future__ import annotations

import math
import random
import statistics
from array import array
from collections.abc import Callable, Sequence
from functools import cached_property
from operator import itemgetter

__all__ = ["Clusters", "Figure"]

MAX_CLUSTERS = 500
RESAMPLES = 1000
SEED = 0


class Clusters:
    """Which cluster each task is in, and the bootstrap's draws, shared by a report's figures.

    Args:
        num_tasks: how many tasks there are; they are known by their positions 0..num_tasks-1.
    """

    def __init__(self, num_tasks: int) -> None:
        self.size = min(num_tasks, MAX_CLUSTERS)
        dealing = random.Random(SEED)
        keys = [dealing.random() for _ in range(num_tasks)]
        self._cluster_of = array("l", bytes(array("l").itemsize * num_tasks))
        for place, task in enumerate(sorted(range(num_tasks), key=keys.__getitem__)):
            self._cluster_of[task] = place % self.size

    def of(self, position: int) -> int:
        """The cluster of the task at ``position``."""
        return self._cluster_of[position]

    @cached_property
    def _draws(self) -> list[Callable[[Sequence[float]], Sequence[float]]]:
        rng = random.Random(SEED + 1)
        indices = list(range(self.size))  # the draws share these ints and hold pointers only
        return [
            itemgetter(*[indices[int(rng.random() * self.size)] for _ in indices]) for _ in range(RESAMPLES)
        ]

    def interval(self, numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, float]:
        """The 2.5% and 97.5% quantiles of ``sum(numerators) / sum(denominators)`` over the draws.

        Args:
            numerators: one sum for each cluster.
            denominators: likewise; not all zero. A draw of clusters without any is left out.
        """
        ratios = {n / d for n, d in zip(numerators, denominators, strict=True) if d}
        if len(ratios) == 1:
            only = ratios.pop()
            return only, only
        estimates = [
            sum(draw(numerators)) / denominator
            for draw in self._draws
            if (denominator := sum(draw(denominators)))
        ]
        cuts = statistics.quantiles(estimates, n=40, method="inclusive")
        return cuts[0], cuts[-1]


class Figure:
    """One average over tasks, accumulated by cluster.

    Args:
        clusters: the clusters of the report's tasks.
        scale: 100 for a percentage.
    """

    __slots__ = ("_clusters", "_denominators", "_numerators", "_scale", "num_tasks")

    def __init__(self, clusters: Clusters, scale: float = 1.0) -> None:
        self._clusters = clusters
        self._scale = scale
        self._numerators = array("d", bytes(8 * clusters.size))
        self._denominators = array("d", bytes(8 * clusters.size))
        self.num_tasks = 0

    def add(self, cluster: int, total: float, count: float = 1.0) -> None:
        """Add one task: the sum of its values and how many they are (at least one)."""
        self._numerators[cluster] += total
        self._denominators[cluster] += count
        self.num_tasks += 1

    @property
    def value(self) -> float:
        """The average over the tasks added; there must be one at least."""
        return self._scale * math.fsum(self._numerators) / math.fsum(self._denominators)

    def confidence(self) -> dict[str, float]:
        """``num_tasks``, and the 95% interval ``low``, ``high`` where tasks are two or more."""
        if self.num_tasks < 2:
            return {"num_tasks": self.num_tasks}
        low, high = self._clusters.interval(self._numerators, self._denominators)
        return {"num_tasks": self.num_tasks, "low": self._scale * low, "high": self._scale * high}

"""Statistics of fields, pass@k and other curves of one task, averages over tasks with confidence intervals.

**Fields.** `describe` gives mean, max, min, median and std. The std is the sample standard deviation (n - 1
in the denominator). One rollout has no spread, so its std is 0; a field that only one of several rollouts
has gets no std.

**Curves.** Item ``k - 1`` of a curve is the value when k rollouts of the task may be used. Values are
fractions; percentages appear when tasks are averaged.

**Averages.** `Figure` averages over tasks, and says by which method its 95% interval is made. Rollouts of
one task are not independent, because they share its difficulty, so both methods take a task as the unit.

- ``wilson``, where every value that is averaged is 0 or 1: Wilson's score interval (E. B. Wilson 1927,
  "Probable inference"), which is right at 0 % and 100 % too. Its sample size is the effective one of a
  clustered sample (Korn and Graubard 1998): the number of independent rollouts that would give the same
  variance. That is the number of tasks where the rollouts of a task all agree, and also where all rollouts
  do.
- ``bootstrap`` otherwise: whole tasks are resampled. Every figure is a ratio of two sums over tasks, which
  covers means over rollouts (tasks of unequal size) and means over tasks. The bootstrap is deterministic:
  the seed is fixed, and `random.Random.random` is the one generator call whose sequence Python guarantees
  across versions. It is bounded: more than `MAX_CLUSTERS` tasks are dealt at random into that many clusters
  of equal size, which are resampled instead; interval widths stay right to about 3%, and a million tasks
  cost no more than five hundred.
"""

from __future__ import annotations

import math
import random
import statistics
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from operator import itemgetter
from typing import Any


def describe(columns: Mapping[str, Sequence[float]], num_rollouts: int) -> dict[str, float]:
    """Statistics keyed ``{statistic}/{field}``. ``num_rollouts``: how many rollouts the columns were read
    from."""
    stats: dict[str, float] = {}
    for name, values in columns.items():
        stats[f"mean/{name}"] = math.fsum(values) / len(values)
        stats[f"max/{name}"] = float(max(values))
        stats[f"min/{name}"] = float(min(values))
        stats[f"median/{name}"] = statistics.median(values)
        if len(values) > 1:
            stats[f"std/{name}"] = stdev(values)
        elif num_rollouts == 1:
            stats[f"std/{name}"] = 0.0
    return stats


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


def pass_curve(scores: Sequence[float]) -> Sequence[float]:
    """pass@k for k = 1..n: the chance that the best of k rollouts out of these n passes.

    For scores of 0 and 1 this is the unbiased estimator ``1 - C(wrong, k) / C(n, k)``. Other
    scores have no such closed form here: the best of the first k.
    """
    if all(score in (0, 1) for score in scores):
        return _binary_pass_curve(len(scores), sum(1 for score in scores if not score))
    return list(accumulate(scores, max))


def pass_at_k(scores: Sequence[float], k: int) -> float | None:
    """pass@k of one task, a fraction; None for a task with fewer than ``k`` rollouts."""
    return pass_curve(scores)[k - 1] if 1 <= k <= len(scores) else None


@lru_cache(maxsize=4096)
def _binary_pass_curve(total: int, wrong: int) -> tuple[float, ...]:
    # `comb` is exact and is 0 for k > wrong: one rounding, in the division.
    return tuple(1.0 - math.comb(wrong, k) / math.comb(total, k) for k in range(1, total + 1))


def average_curve(scores: Sequence[float | None], max_k: int) -> list[float | None]:
    """Mean of those of the first k rollouts that have the score; None while none has."""
    curve: list[float | None] = []
    total, count = 0.0, 0
    for k in range(max_k):
        if k < len(scores) and (score := scores[k]) is not None:
            total += score
            count += 1
        curve.append(total / count if count else None)
    return curve


def majority_curve(votes: Sequence[tuple[Hashable, float | None]], max_k: int) -> list[float]:
    """Score of the most common answer among the first k rollouts, 0 where none answered. ``votes``: each
    rollout's answer (None: no answer) and score. A vote is the pair: the same answer scored in two ways
    counts as two candidates, and ties are averaged."""
    curve: list[float] = []
    counts: Counter[tuple[Hashable, float]] = Counter()
    most, tied = 0, [0.0]
    for k in range(max_k):
        if k < len(votes):
            answer, score = votes[k]
            if answer is not None and score is not None:
                counts[answer, score] += 1
                count = counts[answer, score]
                if count > most:
                    most, tied = count, [score]
                elif count == most:
                    tied.append(score)
        curve.append(math.fsum(tied) / len(tied))
    return curve


def spread_curve(scores: Sequence[float | None], max_k: int) -> list[float | None]:
    """Sample standard deviation over the first k rollouts; None below two scores (Welford)."""
    curve: list[float | None] = []
    mean, squares, count = 0.0, 0.0, 0
    for k in range(max_k):
        if k < len(scores) and (score := scores[k]) is not None:
            count += 1
            delta = score - mean
            mean += delta / count
            squares += delta * (score - mean)
        curve.append(math.sqrt(squares / (count - 1)) if count > 1 else None)
    return curve


MAX_CLUSTERS = 500
RESAMPLES = 1000
FLIPS = 2000
SEED = 0


class Clusters:
    """Which cluster each task is in, and the bootstrap's draws, shared by a report's figures. ``num_tasks``:
    how many tasks there are; they are known by their positions 0..num_tasks-1."""

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
        """The 2.5% and 97.5% quantiles of ``sum(numerators) / sum(denominators)`` over the draws. There is
        one of both for each cluster; a draw whose denominators are all 0 is left out."""
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


Z = statistics.NormalDist().inv_cdf(0.975)
"""Standard deviations on each side of a 95% interval: 1.96."""


def wilson(share: float, size: float) -> tuple[float, float]:
    """Wilson's 95% interval of a share from 0 to 1. ``size``: in how many independent trials; more than 0."""
    shrink = 1 + Z * Z / size
    centre = (share + Z * Z / (2 * size)) / shrink
    half = Z * math.sqrt(share * (1 - share) / size + (Z / (2 * size)) ** 2) / shrink
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def sign_flip(differences: Sequence[float]) -> float:
    """The two-sided p-value of the mean difference, if each sign was chance: of all flips where there are
    few, else of 2,000 drawn ones. The same differences give the same value."""
    changed = [difference for difference in differences if difference]
    total = abs(math.fsum(changed)) - 1e-12
    if 2 ** len(changed) <= FLIPS:
        sums = [0.0]
        for difference in changed:
            sums = [s + d for s in sums for d in (difference, -difference)]
        return sum(abs(s) >= total for s in sums) / len(sums)
    draw = random.Random(SEED)
    extreme = 0
    for _ in range(FLIPS):
        signs = draw.getrandbits(len(changed))
        flipped = sum(d if signs >> position & 1 else -d for position, d in enumerate(changed))
        extreme += abs(flipped) >= total
    return (extreme + 1) / (FLIPS + 1)


class Figure:
    """One average over tasks, accumulated by cluster. ``scale``: 100 for a percentage; ``binary``: whether
    every value of a rollout is 0 or 1, so that the average is a share."""

    __slots__ = (
        *("_binary", "_clusters", "_denominators", "_numerators", "_products", "_rollouts", "_scale"),
        "num_tasks",
    )

    def __init__(self, clusters: Clusters, scale: float = 1.0, *, binary: bool = False) -> None:
        self._clusters = clusters
        self._scale = scale
        self._binary = binary
        self._numerators = array("d", bytes(8 * clusters.size))
        self._denominators = array("d", bytes(8 * clusters.size))
        self._products = (0.0, 0.0, 0.0)
        self._rollouts = 0
        self.num_tasks = 0

    def add(self, cluster: int, total: float, count: float = 1.0, rollouts: int = 1) -> None:
        """Add one task. ``total``/``count``: the sum of its values and how many they are (at least one);
        ``rollouts``: from how many rollouts they come."""
        self._numerators[cluster] += total
        self._denominators[cluster] += count
        squares, mixed, counts = self._products
        self._products = squares + total * total, mixed + total * count, counts + count * count
        self._rollouts += rollouts
        self.num_tasks += 1

    @property
    def value(self) -> float:
        """The average over the tasks added; there must be one at least."""
        return self._scale * math.fsum(self._numerators) / math.fsum(self._denominators)

    def chance(self) -> float:
        """`sign_flip` of the averaged values, which are differences; those of a cluster flip together."""
        return sign_flip(self._numerators)

    def confidence(self) -> dict[str, Any]:
        """``num_tasks``; for two tasks or more also ``low``, ``high`` and ``method`` of the 95% interval."""
        if self.num_tasks < 2:
            return {"num_tasks": self.num_tasks}
        if self._binary:
            method, (low, high) = "wilson", self._wilson()
        else:
            method = "bootstrap"
            low, high = self._clusters.interval(self._numerators, self._denominators)
        low, high = self._scale * low, self._scale * high
        return {"num_tasks": self.num_tasks, "low": low, "high": high, "method": method}

    def _wilson(self) -> tuple[float, float]:
        count = math.fsum(self._denominators)
        share = min(max(math.fsum(self._numerators) / count, 0.0), 1.0)
        if share in (0.0, 1.0):
            return wilson(share, self.num_tasks)
        squares, mixed, counts = self._products
        spread = squares - 2 * share * mixed + share * share * counts  # of the tasks, around the average
        agreeing = share * (1 - share) * count * count
        alike = spread * self._rollouts <= agreeing
        return wilson(share, self._rollouts if alike else agreeing / spread)

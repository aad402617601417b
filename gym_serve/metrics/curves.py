"""Scores of one task as functions of k, the number of rollouts that one may use.

Every curve is a list whose item ``k - 1`` is the value at k. Values are fractions; the
percentages appear where tasks are averaged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from functools import lru_cache
from itertools import accumulate

__all__ = ["average_curve", "majority_curve", "pass_at_k", "pass_curve", "spread_curve"]


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
    """Score of the most common answer among the first k rollouts, 0 where none answered.

    Args:
        votes: each rollout's answer (None: no answer) and score. A vote is the pair: the same
            answer scored in two ways counts as two candidates, and ties are averaged.
        max_k: length of the curve; past the last rollout it stays level.
    """
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

"""pass@k, averages, majority@k and their spread, over the tasks of an environment.

Who counts where, as in NeMo Gym: pass@k averages the tasks with k rollouts or more (fewer
cannot estimate it), pass@1[avg-of-k] every task that has a score, majority@k every task,
with 0 for one without an answer. As these sets differ, each figure carries its own number
of tasks. `per_sample_aggregate` is the average of the i-th rollouts ("run" i) alone, and
the standard deviation across runs is taken over these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from gym_serve.metrics.bootstrap import Clusters, Figure
from gym_serve.metrics.curves import average_curve, majority_curve, pass_curve, spread_curve
from gym_serve.metrics.describe import stdev
from gym_serve.metrics.records import RolloutRecord
from gym_serve.metrics.spec import MetricSpec

__all__ = ["ScoreMetrics", "ScoreShape"]


class ScoreShape:
    """The names of the scores and the largest k of a set of tasks: what must be known first."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.max_k = 0

    def see(self, rollouts: Sequence[RolloutRecord]) -> None:
        """Take one task's rollouts into account."""
        self.max_k = max(self.max_k, len(rollouts))
        for rollout in rollouts:
            self.names.update(rollout.scores)


class ScoreMetrics:
    """Accumulates tasks one by one, and holds nothing of them.

    Args:
        shape: made from the same tasks beforehand.
        clusters: clusters of the tasks, for the confidence intervals.
        spec: whether there is an answer to vote on, and whether to add ``avg_sample_std_dev``.
    """

    def __init__(self, shape: ScoreShape, clusters: Clusters, spec: MetricSpec) -> None:
        self._max_k = shape.max_k
        self._names = sorted(shape.names)
        self._spec = spec

        def curves(scale: float = 100.0) -> dict[str, list[Figure]]:
            return {name: [Figure(clusters, scale) for _ in range(self._max_k)] for name in self._names}

        self._pass, self._average, self._majority, self._runs = curves(), curves(), curves(), curves()
        self._spread = curves(1.0)

    def add(self, cluster: int, rollouts: Sequence[RolloutRecord]) -> None:
        """Add one task's rollouts, in the order that defines "the first k"."""
        for name in self._names:
            scores = [rollout.scores.get(name) for rollout in rollouts]
            present = [score for score in scores if score is not None]
            _add_curve(self._pass[name], cluster, pass_curve(present))
            _add_curve(self._average[name], cluster, average_curve(scores, self._max_k))
            _add_curve(self._runs[name], cluster, scores)
            if self._spec.answer is not None:
                votes = [(rollout.answer, score) for rollout, score in zip(rollouts, scores, strict=True)]
                _add_curve(self._majority[name], cluster, majority_curve(votes, self._max_k))
            if self._spec.sample_std_dev:
                _add_curve(self._spread[name], cluster, spread_curve(scores, self._max_k))

    def metrics(self) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
        """The metrics by key, and under the same keys the confidence of each."""
        figures: dict[str, Figure] = {}
        runs: dict[str, list[float]] = {}
        for name in self._names:
            for k in range(1, self._max_k + 1):
                figures[f"pass@{k}/{name}"] = self._pass[name][k - 1]
                figures[f"pass@1[avg-of-{k}]/{name}"] = self._average[name][k - 1]
                figures[f"majority@{k}/{name}"] = self._majority[name][k - 1]
                figures[f"pass@1[avg-of-{k}]/{name}/avg_sample_std_dev"] = self._spread[name][k - 1]
            if values := [run.value for run in self._runs[name] if run.num_tasks]:
                runs[name] = values
        figures = {key: figure for key, figure in figures.items() if figure.num_tasks}
        metrics: dict[str, Any] = {key: figure.value for key, figure in figures.items()}
        confidence = {key: figure.confidence() for key, figure in figures.items()}
        metrics["per_sample_aggregate"] = runs
        for name, values in runs.items():
            tasks: dict[str, float] = {"num_tasks": self._average[name][-1].num_tasks}
            for k in range(2, self._max_k + 1):
                if len(first := values[:k]) > 1:
                    key = f"pass@1[avg-of-{k}]/{name}"
                    deviation = stdev(first)
                    metrics[f"{key}/std_dev_across_runs"] = deviation
                    metrics[f"{key}/std_err_across_runs"] = deviation / math.sqrt(len(first))
                    for kind in ("std_dev", "std_err"):
                        confidence[f"{key}/{kind}_across_runs"] = tasks
        return metrics, confidence


def _add_curve(figures: Sequence[Figure], cluster: int, curve: Iterable[float | None]) -> None:
    for figure, value in zip(figures, curve, strict=False):
        if value is not None:
            figure.add(cluster, value)

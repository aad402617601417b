"""The metrics of groups: `group_metrics` of each task, `overall_metrics` of all tasks, and the headline
metrics.

Groups are read one at a time, several times over, so that the caller may rebuild them from a compact store
instead of holding them.

Which tasks count is as in NeMo Gym. pass@k averages the tasks with at least k rollouts (fewer cannot
estimate it), pass@1[avg-of-k] every task that has a score, majority@k every task, with 0 for a task without
an answer. These sets differ, so each figure carries its own number of tasks. ``per_sample_aggregate`` is the
average of the i-th rollouts ("run" i) alone; the standard deviation across runs is taken over these
averages.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from gym_serve.metrics.estimators import (
    Clusters,
    Figure,
    average_curve,
    describe,
    majority_curve,
    pass_curve,
    spread_curve,
    stdev,
)
from gym_serve.metrics.records import ROLLOUT_INDEX, TASK_INDEX, Group, MetricSpec, RolloutRecord


class ScoreShape:
    """The names of the scores and the largest k of a set of tasks: what must be known first."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.partial: set[str] = set()
        """The scores that have other values than 0 and 1."""
        self.max_k = 0

    def see(self, rollouts: Sequence[RolloutRecord]) -> None:
        self.max_k = max(self.max_k, len(rollouts))
        for rollout in rollouts:
            self.names.update(rollout.scores)
            self.partial.update(name for name, score in rollout.scores.items() if score not in (0, 1))


class ScoreMetrics:
    """Accumulates tasks one by one, and holds nothing of them. ``spec``: whether there is an answer to vote
    on, and whether to add ``avg_sample_std_dev``."""

    def __init__(self, shape: ScoreShape, clusters: Clusters, spec: MetricSpec) -> None:
        self._max_k = shape.max_k
        self._names = sorted(shape.names)
        self._spec = spec

        def curves(scale: float = 100.0, *, shares: bool = True) -> dict[str, list[Figure]]:
            return {
                name: [
                    Figure(clusters, scale, binary=shares and name not in shape.partial)
                    for _ in range(self._max_k)
                ]
                for name in self._names
            }

        self._pass, self._average, self._majority, self._runs = curves(), curves(), curves(), curves()
        self._spread = curves(1.0, shares=False)

    def add(self, cluster: int, rollouts: Sequence[RolloutRecord]) -> None:
        """Add one task's rollouts, in the order that defines "the first k"."""
        for name in self._names:
            scores = [rollout.scores.get(name) for rollout in rollouts]
            present = [score for score in scores if score is not None]
            _add_curve(self._pass[name], cluster, pass_curve(present), len(present))
            _add_curve(self._average[name], cluster, average_curve(scores, self._max_k), len(present))
            _add_curve(self._runs[name], cluster, scores, len(present))
            if self._spec.answer is not None:
                votes = [(rollout.answer, score) for rollout, score in zip(rollouts, scores, strict=True)]
                _add_curve(self._majority[name], cluster, majority_curve(votes, self._max_k), len(present))
            if self._spec.sample_std_dev:
                _add_curve(self._spread[name], cluster, spread_curve(scores, self._max_k), len(present))

    def metrics(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
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


def _add_curve(figures: Sequence[Figure], cluster: int, curve: Iterable[float | None], rollouts: int) -> None:
    for figure, value in zip(figures, curve, strict=False):
        if value is not None:
            figure.add(cluster, value, rollouts=rollouts)


Metrics = dict[str, Any]
Confidence = dict[str, dict[str, Any]]


class Groups(Protocol):
    """A sized collection of groups that gives the same ones in the same order on each iteration."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Group]: ...


def group_metrics(group: Group) -> Metrics:
    """One entry of ``group_level_metrics``: a task's statistics, and its rollouts in index order."""
    num_rollouts = len(group.rollouts)
    return {
        TASK_INDEX: group.task_index,
        **describe(field_columns(group.rollouts), num_rollouts),
        "sample": {"agent_ref": {"name": "agent"}},  # as in NeMo Gym
        "num_rollouts": num_rollouts,
        "expected_num_rollouts": group.expected,
        "missing_num_rollouts": group.expected - num_rollouts,
        "reward_profile_completion_pct": 100.0 * num_rollouts / group.expected if group.expected else 100.0,
        "rollout_infos": [
            {
                "rollout_id": f"{group.task_index}:{rollout.index}",
                TASK_INDEX: group.task_index,
                ROLLOUT_INDEX: rollout.index,
                **rollout.fields,
            }
            for rollout in sorted(group.rollouts, key=lambda rollout: rollout.index)
        ],
    }


def overall_metrics(groups: Groups, spec: MetricSpec) -> dict[str, Metrics]:
    """``agent_metrics``, ``key_metrics`` and ``confidence`` of all tasks together. ``groups``: each with a
    rollout at least (a task whose rollouts all failed has no score, rather than a score of 0)."""
    clusters = Clusters(len(groups))
    agent_metrics, confidence = _field_metrics(groups, spec, clusters)
    if spec.scores or spec.answer is not None:
        metrics, confidence_of_scores = score_metrics(groups, spec, clusters)
        agent_metrics.update(metrics)
        confidence.update(confidence_of_scores)
    return {
        "agent_metrics": agent_metrics,
        "key_metrics": select_key_metrics(agent_metrics, spec.key_metrics),
        "confidence": confidence,
    }


def score_metrics(groups: Groups, spec: MetricSpec, clusters: Clusters) -> tuple[Metrics, Confidence]:
    """The metrics of the spec's scores, over all tasks and for each subset of them."""
    shapes: defaultdict[str | None, ScoreShape] = defaultdict(ScoreShape)
    for group in groups:
        for subset in _subsets(group):
            shapes[subset].see(group.rollouts)
    # As in NeMo Gym, avg_sample_std_dev and per_sample_aggregate are for all tasks together only.
    subset_spec = replace(spec, sample_std_dev=False)
    accumulators = {
        subset: ScoreMetrics(shape, clusters, spec if subset is None else subset_spec)
        for subset, shape in shapes.items()
    }
    for position, group in enumerate(groups):
        for subset in _subsets(group):
            accumulators[subset].add(clusters.of(position), group.rollouts)

    metrics, confidence = accumulators.pop(None).metrics() if accumulators else ({}, {})
    for subset, accumulator in accumulators.items():
        of_subset, confidence_of_subset = accumulator.metrics()
        del of_subset["per_sample_aggregate"]
        metrics.update((f"{subset}/{key}", value) for key, value in of_subset.items())
        confidence.update((f"{subset}/{key}", value) for key, value in confidence_of_subset.items())
    return metrics, confidence


def field_columns(rollouts: Iterable[RolloutRecord]) -> dict[str, array[float]]:
    """Each numeric field's values, over the rollouts that have it."""
    columns: dict[str, array[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.fields.items():
            columns.setdefault(name, array("d")).append(value)
    return columns


def _subsets(group: Group) -> tuple[str | None, ...]:
    subset = group.rollouts[0].labels[0] if group.rollouts else None
    return (None,) if subset is None else (None, subset)


def _field_metrics(groups: Groups, spec: MetricSpec, clusters: Clusters) -> tuple[Metrics, Confidence]:
    columns = field_columns(rollout for group in groups for rollout in group.rollouts)
    binary = {name: all(value in (0.0, 1.0) for value in values) for name, values in columns.items()}
    means = {name: Figure(clusters, binary=binary[name]) for name in columns}
    breakdowns: defaultdict[str, Figure] = defaultdict(
        lambda: Figure(clusters, binary=binary.get("reward", False))
    )
    for position, group in enumerate(groups):
        for name, values in field_columns(group.rollouts).items():
            means[name].add(clusters.of(position), math.fsum(values), len(values), len(values))
        for key, rewards in _rewards_by_label(group, spec).items():
            breakdowns[f"mean/reward_{key}"].add(
                clusters.of(position), math.fsum(rewards), len(rewards), len(rewards)
            )

    metrics: Metrics = describe(columns, sum(len(group.rollouts) for group in groups))
    confidence: Confidence = {}
    for key in metrics:
        statistic, name = key.split("/", 1)
        mean = means[name]
        confidence[key] = mean.confidence() if statistic == "mean" else {"num_tasks": mean.num_tasks}
    metrics.update((key, figure.value) for key, figure in breakdowns.items())
    confidence.update((key, figure.confidence()) for key, figure in breakdowns.items())
    return metrics, confidence


def _rewards_by_label(group: Group, spec: MetricSpec) -> dict[str, list[float]]:
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in group.rollouts:
        reward = rollout.fields.get("reward")
        for breakdown, label in zip(spec.breakdowns, rollout.labels[1:], strict=True):
            if label is not None and reward is not None:
                rewards[breakdown.prefix + label].append(reward)
    return rewards


_SPREAD_SUFFIXES = ("std_dev_across_runs", "std_err_across_runs", "avg_sample_std_dev")


def select_key_metrics(agent_metrics: Mapping[str, Any], patterns: Iterable[str]) -> dict[str, Any]:
    """The metrics whose keys match a pattern, in the order of the patterns.

    Args:
        patterns: keys in which ``*`` stands for any text and ``{k}`` for a number. Of the keys
            that match a pattern with ``{k}``, those with the highest k count: for each subset by
            itself where the pattern starts with ``*/``. Such a pattern never takes the spread of
            a figure, so ``pass@1[avg-of-{k}]/*`` is one figure for each score.
    """
    selected: dict[str, Any] = {}
    for pattern in patterns:
        expression = _compiled(pattern)
        matches = [match for key in agent_metrics if (match := expression.fullmatch(key))]
        if "{k}" in pattern:
            matches = _highest_k(match for match in matches if not match.string.endswith(_SPREAD_SUFFIXES))
        selected.update((match.string, agent_metrics[match.string]) for match in matches)
    return selected


def _compiled(pattern: str) -> re.Pattern[str]:
    expression = re.escape(pattern).replace(r"\{k\}", r"(?P<k>\d{1,9})")
    if expression.startswith(r"\*/"):
        expression = expression.replace(r"\*", r"(?P<subset>.+)", 1)
    return re.compile(expression.replace(r"\*", ".+"), re.DOTALL)


def _highest_k(matches: Iterable[re.Match[str]]) -> list[re.Match[str]]:
    highest: dict[str | None, list[re.Match[str]]] = {}
    for match in matches:
        best = highest.setdefault(match.groupdict().get("subset"), [])
        if best and int(match["k"]) > int(best[0]["k"]):
            best.clear()
        if not best or int(match["k"]) == int(best[0]["k"]):
            best.append(match)
    return [match for best in highest.values() for match in best]

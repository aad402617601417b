"""The metrics of a set of groups: `group_metrics` of each task, `overall_metrics` of all.

Groups are read one at a time, several times over, so that the caller may rebuild them
from a compact store instead of holding them.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Protocol

from gym_serve.metrics.bootstrap import Clusters, Figure
from gym_serve.metrics.describe import describe
from gym_serve.metrics.headlines import select_key_metrics
from gym_serve.metrics.records import ROLLOUT_INDEX, TASK_INDEX, Group, RolloutRecord
from gym_serve.metrics.scoring import ScoreMetrics, ScoreShape
from gym_serve.metrics.spec import MetricSpec

__all__ = ["Groups", "field_columns", "group_metrics", "overall_metrics", "score_metrics"]

Metrics = dict[str, Any]
Confidence = dict[str, dict[str, float]]


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
        "sample": dict(group.row),
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
    """``agent_metrics``, ``key_metrics`` and ``confidence`` of all tasks together.

    Args:
        groups: each with a rollout at least (a task whose rollouts all failed has no score,
            rather than a score of 0).
        spec: the environment's metrics.
    """
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
    means: defaultdict[str, Figure] = defaultdict(lambda: Figure(clusters))
    breakdowns: defaultdict[str, Figure] = defaultdict(lambda: Figure(clusters))
    for position, group in enumerate(groups):
        for name, values in field_columns(group.rollouts).items():
            means[name].add(clusters.of(position), math.fsum(values), len(values))
        for key, rewards in _rewards_by_label(group, spec).items():
            breakdowns[f"mean/reward_{key}"].add(clusters.of(position), math.fsum(rewards), len(rewards))

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

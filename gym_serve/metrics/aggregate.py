"""Metrics of rollouts that are at hand: `aggregate_metrics` and `pass_majority_metrics`.

These keep the order in which they are given the rollouts of a task, as NeMo Gym does; it
defines which are the first k. `Aggregator` is for a stream, and orders them itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gym_serve.metrics.bootstrap import Clusters
from gym_serve.metrics.records import (
    ROLLOUT_INDEX,
    TASK_INDEX,
    Group,
    failure_class,
    read_record,
    read_stamp,
)
from gym_serve.metrics.report import group_metrics, overall_metrics, score_metrics
from gym_serve.metrics.spec import STATISTICS_ONLY, MetricSpec
from gym_serve.types.errors import InvalidRequest

__all__ = ["aggregate_metrics", "pass_majority_metrics"]


def aggregate_metrics(
    verify_responses: Iterable[Mapping[str, Any]],
    spec: MetricSpec = STATISTICS_ONLY,
) -> dict[str, Any]:
    """The answer of ``POST /aggregate_metrics``.

    Args:
        verify_responses: rollouts; ``_ng_task_index`` defaults to 0 and ``_ng_rollout_index`` to
            the rollout's place among those of its task.
        spec: the environment's metrics.

    Returns:
        ``group_level_metrics``, ``agent_metrics`` and ``key_metrics`` as in NeMo Gym. gym_serve
        adds ``confidence`` (for each key of ``agent_metrics``, the number of tasks behind it,
        and the 95% interval of an average) and ``failures`` (rollouts left out, by class).

    Raises:
        InvalidRequest: a rollout is no object, an index is no integer, or two rollouts have the same indices.
    """
    groups: dict[int, Group] = {}
    seen: defaultdict[int, set[int]] = defaultdict(set)
    failures: Counter[str] = Counter()
    for rollout in verify_responses:
        if not isinstance(rollout, Mapping):
            raise InvalidRequest(f"a rollout must be a JSON object, not a {type(rollout).__name__}")
        task = read_stamp(rollout, TASK_INDEX, default=0)
        index = read_stamp(rollout, ROLLOUT_INDEX, default=len(seen[task]))
        if index in seen[task]:
            raise InvalidRequest(f"rollout {index} of task {task} is given twice")
        seen[task].add(index)
        group = groups.setdefault(task, Group(task, [], expected=0))
        group.expected += 1
        failure = failure_class(rollout)
        if failure is not None:
            failures[failure] += 1
        else:
            group.rollouts.append(read_record(rollout, index, spec))
    ordered = [groups[task] for task in sorted(groups)]
    return {
        "group_level_metrics": [group_metrics(group) for group in ordered],
        **overall_metrics([group for group in ordered if group.rollouts], spec),
        "failures": dict(sorted(failures.items())),
    }


def pass_majority_metrics(tasks: Sequence[Sequence[Mapping[str, Any]]], spec: MetricSpec) -> dict[str, Any]:
    """pass@k, pass@1[avg-of-k], majority@k and their spread alone, for rollouts grouped by task.

    Args:
        tasks: the scored rollouts of each task. A task without any counts as one without an
            answer in majority@k, so leave out failed rollouts together with their empty task.
        spec: the scores, and the field of the answer.

    Returns:
        Percentages by key, with ``per_sample_aggregate``; empty for no tasks.
    """
    groups = [
        Group(
            task,
            [read_record(rollout, index, spec) for index, rollout in enumerate(rollouts)],
            expected=len(rollouts),
        )
        for task, rollouts in enumerate(tasks)
    ]
    return score_metrics(groups, spec, Clusters(len(groups)))[0]

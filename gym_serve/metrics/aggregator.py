"""The metrics of rollouts: `Aggregator` for a stream, `aggregate_metrics` for a list.

`Aggregator` keeps a few numbers of each rollout. Its result does not depend on the order in which rollouts
arrive. A rollout that is added twice (a journal replayed after a crash) counts once, as last added. A failed
rollout counts as failed and missing, never as a score.

`aggregate_metrics` and `pass_majority_metrics` keep the order in which the rollouts of a task are given, as
NeMo Gym does: it defines which are the first k. `Aggregator` orders them by rollout index.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from gym_serve.metrics.estimators import Clusters
from gym_serve.metrics.records import (
    ROLLOUT_INDEX,
    STATISTICS_ONLY,
    TASK_INDEX,
    Group,
    MetricSpec,
    RecordStore,
    failure_class,
    read_index,
    read_record,
)
from gym_serve.metrics.report import Groups, group_metrics, overall_metrics, score_metrics
from gym_serve.types.errors import InvalidRequest


class Aggregator:
    """Accumulates rollouts of one agent or environment; `result` may be asked for at any time.

    Args:
        spec: the environment's metrics.
    """

    def __init__(self, spec: MetricSpec = STATISTICS_ONLY) -> None:
        self.spec = spec
        self.failures: Counter[str] = Counter()
        """How many attempts failed, by class; an attempt that a later one made good included."""
        self._store = RecordStore()
        self._failed: defaultdict[int, set[int]] = defaultdict(set)

    def add(self, rollout: Mapping[str, Any]) -> None:
        """Add one rollout, scored or failed; no reference to it is kept.

        Args:
            rollout: a line of the output JSONL, with its task and rollout index.

        Raises:
            InvalidRequest: an index is missing or not an integer.
        """
        task, index = read_index(rollout, TASK_INDEX), read_index(rollout, ROLLOUT_INDEX)
        failure = failure_class(rollout)
        if failure is not None:
            self.failures[failure] += 1
            self._failed[task].add(index)
        else:
            self._store.append(task, read_record(rollout, index, self.spec))

    def groups(self) -> Groups:
        """The tasks that have a scored rollout, as they are now; rebuilt one by one on iteration."""
        return _StoredGroups(self._store, self._failed)

    def iter_group_metrics(self) -> Iterator[dict[str, Any]]:
        """The entries of ``group_level_metrics`` in task order, for writing them out one by one.

        A task whose rollouts all failed has an entry too, without statistics.
        """
        only_failed = sorted(self._failed.keys() - set(self._store.tasks))
        empty = (Group(task, [], expected=len(self._failed[task])) for task in only_failed)
        for group in heapq.merge(self.groups(), empty, key=lambda group: group.task_index):
            yield group_metrics(group)

    def overall(self) -> dict[str, Any]:
        """`result` without the entries of the tasks, which are most of its size."""
        return {**overall_metrics(self.groups(), self.spec), "failures": dict(sorted(self.failures.items()))}

    def result(self) -> dict[str, Any]:
        """The whole answer of ``POST /aggregate_metrics``, gym_serve's keys included."""
        return {"group_level_metrics": list(self.iter_group_metrics()), **self.overall()}


class _StoredGroups:
    """A view of the store by task, made for one snapshot of it."""

    def __init__(self, store: RecordStore, failed: Mapping[int, set[int]]) -> None:
        self._store = store
        self._failed = failed
        order = sorted(range(len(store)), key=store.indices.__getitem__)
        order.sort(key=store.tasks.__getitem__)  # stable: by task, rollout index, arrival
        self._order = order
        self._len = len(set(store.tasks))

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Group]:
        for task, positions in groupby(self._order, key=self._store.tasks.__getitem__):
            latest = {self._store.indices[position]: position for position in positions}
            failed = self._failed.get(task, set())
            yield Group(
                task,
                [self._store[position] for position in latest.values()],
                expected=len(latest.keys() | failed),
            )


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
        InvalidRequest: a rollout is not an object, an index is not an integer, or two rollouts have the same
            indices.
    """
    groups: dict[int, Group] = {}
    seen: defaultdict[int, set[int]] = defaultdict(set)
    failures: Counter[str] = Counter()
    for rollout in verify_responses:
        if not isinstance(rollout, Mapping):
            raise InvalidRequest(f"a rollout must be a JSON object, got {str(rollout)[:50]!r}")
        task = read_index(rollout, TASK_INDEX, default=0)
        index = read_index(rollout, ROLLOUT_INDEX, default=len(seen[task]))
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

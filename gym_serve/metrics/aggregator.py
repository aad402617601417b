"""Metrics of a stream of rollouts, in the memory of a few numbers for each.

Invariants: the result does not depend on the order in which rollouts arrive; a rollout
added twice (a journal replayed after a crash) counts once, as last added; a failed rollout
counts among the failures and the missing ones, never as a score.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from gym_serve.metrics.records import (
    ROLLOUT_INDEX,
    TASK_INDEX,
    Group,
    failure_class,
    read_record,
    read_stamp,
)
from gym_serve.metrics.report import Groups, group_metrics, overall_metrics
from gym_serve.metrics.spec import STATISTICS_ONLY, MetricSpec
from gym_serve.metrics.store import RecordStore

__all__ = ["Aggregator"]


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
        """Take one rollout, scored or failed, into account; nothing of it is held on to.

        Args:
            rollout: a line of the output JSONL, with its task and rollout index.

        Raises:
            InvalidRequest: an index is missing or is no integer.
        """
        task, index = read_stamp(rollout, TASK_INDEX), read_stamp(rollout, ROLLOUT_INDEX)
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

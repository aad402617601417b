"""The metrics of rollouts: `Aggregator` for a stream, `aggregate_metrics` for a list.

`Aggregator` keeps a few numbers of each rollout. Its result does not depend on the order in which rollouts
arrive. A rollout that is added twice (a journal replayed after a crash) counts once, as last added. A failed
rollout counts as failed and missing, never as a score.

`aggregate_metrics` and `pass_majority_metrics` keep the order in which the rollouts of a task are given, as
NeMo Gym does: it defines which are the first k. `Aggregator` orders them by rollout index.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

from gym_serve.metrics.estimators import Clusters
from gym_serve.metrics.records import (
    ROLLOUT_INDEX,
    STATISTICS_ONLY,
    TASK_INDEX,
    Group,
    MetricSpec,
    RecordStore,
    read_index,
    read_record,
    unscored_record,
)
from gym_serve.metrics.report import Groups, group_metrics, overall_metrics, score_metrics
from gym_serve.types.endings import failure_class
from gym_serve.types.errors import InvalidRequest

Failures = Literal["mask", "zero"]
"""What a failed rollout counts as in a score: nothing, or a reward of 0 (a masked one is never counted)."""


class Coverage(NamedTuple):
    """What stands beside a score."""

    scored: int
    """Rollouts with a score."""
    asked: int
    """Rollouts that were asked for."""

    def __str__(self) -> str:
        return f"{self.scored:,} of {self.asked:,}"


class Aggregator:
    """Accumulates rollouts of one agent or environment; `result` may be asked for at any time."""

    def __init__(self, spec: MetricSpec = STATISTICS_ONLY) -> None:
        self.spec = spec
        self.failures: Counter[str] = Counter()
        """How many attempts have no score, by class; an attempt that a later one made good included."""
        self._store = RecordStore()

    def add(self, rollout: Mapping[str, Any]) -> None:
        """Add one rollout, scored or failed; no reference to it is kept. Raises InvalidRequest: an index is
        missing or not an integer."""
        task, index = read_index(rollout, TASK_INDEX), read_index(rollout, ROLLOUT_INDEX)
        failure = failure_class(rollout)
        if failure is not None:
            self.failures[failure] += 1
            self._store.append(task, unscored_record(rollout, index, self.spec, failure))
        else:
            self._store.append(task, read_record(rollout, index, self.spec))

    def groups(self, failures: Failures = "mask") -> Groups:
        """The tasks that have a score, as they are now; rebuilt one by one on iteration. ``failures``:
        ``zero`` counts each failed rollout as a reward of 0."""
        return _StoredGroups(self._store, zero=failures == "zero")

    def coverage(self) -> Coverage:
        """How many rollouts are scored, of how many that were asked for."""
        scored = asked = 0
        for of_task, asked_of_task in self._groups().sizes():
            scored, asked = scored + of_task, asked + asked_of_task
        return Coverage(scored, asked)

    def iter_group_metrics(self) -> Iterator[dict[str, Any]]:
        """The entries of ``group_level_metrics`` in task order, for writing them out one by one.

        A task whose rollouts all failed has an entry too, without statistics.
        """
        return map(group_metrics, self._groups())

    def overall(self) -> dict[str, Any]:
        """`result` without the entries of the tasks, which are most of its size."""
        return {**overall_metrics(self.groups(), self.spec), "failures": dict(sorted(self.failures.items()))}

    def result(self) -> dict[str, Any]:
        """The whole answer of ``POST /aggregate_metrics``, gym_serve's keys included."""
        return {"group_level_metrics": list(self.iter_group_metrics()), **self.overall()}

    def _groups(self) -> _StoredGroups:
        return _StoredGroups(self._store, zero=False, empty=True)


class _StoredGroups:
    """A view of the store by task, made for one snapshot of it."""

    def __init__(self, store: RecordStore, *, zero: bool, empty: bool = False) -> None:
        self._store = store
        self._zero = zero
        self._empty = empty
        order = sorted(range(len(store)), key=store.indices.__getitem__)
        order.sort(key=store.tasks.__getitem__)  # stable: by task, rollout index, arrival
        self._order = order

    def __len__(self) -> int:
        return sum(1 for _ in self._tasks())

    def __iter__(self) -> Iterator[Group]:
        for task, taken, asked in self._tasks():
            yield Group(task, [self._store[position] for position in taken], expected=asked)

    def sizes(self) -> Iterator[tuple[int, int]]:
        """How many rollouts are taken of each task, and how many were asked for."""
        return ((len(taken), asked) for _, taken, asked in self._tasks())

    def _tasks(self) -> Iterator[tuple[int, list[int], int]]:
        """Each task, the positions of its rollouts in order, and how many rollouts were asked for."""
        store, scored = self._store, self._store.scored
        for task, positions in groupby(self._order, key=store.tasks.__getitem__):
            latest: dict[int, int] = {}
            for position in positions:
                latest_position = latest.setdefault(store.indices[position], position)
                if scored[position] or not scored[latest_position]:  # an attempt that made the failure good
                    latest[store.indices[position]] = position
            taken = [p for p in latest.values() if scored[p] or (self._zero and store.has_fields(p))]
            if taken or self._empty:
                yield task, taken, len(latest)


def aggregate_metrics(
    verify_responses: Iterable[Mapping[str, Any]],
    spec: MetricSpec = STATISTICS_ONLY,
) -> dict[str, Any]:
    """The answer of ``POST /aggregate_metrics``.

    Args:
        verify_responses: rollouts; ``_ng_task_index`` defaults to 0 and ``_ng_rollout_index`` to
            the rollout's place among those of its task.

    Returns:
        ``group_level_metrics``, ``agent_metrics`` and ``key_metrics`` as in NeMo Gym. gym_serve
        adds ``confidence`` (for each key of ``agent_metrics``, the number of tasks behind it,
        and the 95% interval of an average) and ``failures`` (rollouts left out, by class).

    Raises:
        InvalidRequest: a rollout is not an object, an index is not an integer, or two rollouts have the same
            indices.
    """
    groups: dict[int, Group] = {}
    attempts: defaultdict[int, set[int]] = defaultdict(set)
    failures: Counter[str] = Counter()
    for rollout in verify_responses:
        if not isinstance(rollout, Mapping):
            raise InvalidRequest(f"a rollout must be a JSON object, got {str(rollout)[:50]!r}")
        task = read_index(rollout, TASK_INDEX, default=0)
        index = read_index(rollout, ROLLOUT_INDEX, default=len(attempts[task]))
        if index in attempts[task]:
            raise InvalidRequest(f"rollout {index} of task {task} is given twice")
        attempts[task].add(index)
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


def scored_rollouts(body: Any) -> list[dict[str, Any]]:
    """The rollouts with a score in a body of ``POST /aggregate_metrics``: all that an environment's own
    aggregation gets, which knows nothing of failures. Raises InvalidRequest: the body has no list of
    rollouts."""
    rollouts = body.get("verify_responses") if isinstance(body, Mapping) else None
    if not isinstance(rollouts, list):
        raise InvalidRequest("`verify_responses` must be a list of verified rollouts")
    return [one for one in rollouts if isinstance(one, dict) and failure_class(one) is None]


def pass_majority_metrics(tasks: Sequence[Sequence[Mapping[str, Any]]], spec: MetricSpec) -> dict[str, Any]:
    """pass@k, pass@1[avg-of-k], majority@k and their spread alone, in percent, for rollouts grouped by task.

    A task without any rollout counts as one without an answer in majority@k, so leave out failed rollouts
    together with their empty task."""
    groups = [
        Group(
            task,
            [read_record(rollout, index, spec) for index, rollout in enumerate(rollouts)],
            expected=len(rollouts),
        )
        for task, rollouts in enumerate(tasks)
    ]
    return score_metrics(groups, spec, Clusters(len(groups)))[0]

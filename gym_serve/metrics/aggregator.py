"""The metrics of rollouts: `Aggregator` for a stream, `aggregate_metrics` for a list.

`Aggregator` keeps a few numbers of each rollout. Its result does not depend on the order in which rollouts
arrive. A rollout that is added twice (a journal replayed after a crash) counts once, as last added. A failed
rollout counts as failed and missing, never as a score.

`aggregate_metrics` and `pass_majority_metrics` keep the order in which the rollouts of a task are given, as
NeMo Gym does: it defines which are the first k. `Aggregator` orders them by rollout index.

The table that ends a run: one row for each environment or agent.

Its mean reward is gym_serve's own, the same in every table and on every page: the mean of each task's
rollouts, and of these the mean over tasks, so that every task has the same weight however many rollouts it
has. NeMo Gym's ``mean/reward`` is the mean over rollouts.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median_low
from typing import Any, Literal, NamedTuple

from gym_serve.metrics.estimators import Clusters, Figure, pass_at_k
from gym_serve.metrics.records import (
    LATENCY_FIELD,
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


SUMMARY_COLUMNS = (
    *("name", "scored", "mean reward", "95% interval", "pass@k %", "tokens in/out", "seconds"),
)
"""Headings of `SummaryRow.cells`."""

INTERVALS = {
    "wilson": "Wilson's where all values are 0 or 1",
    "bootstrap": "bootstrap over tasks for other values",
}
"""What stands below a table, by the ``method`` of its intervals."""


@dataclass(frozen=True)
class SummaryRow:
    """Figures of one environment or agent; None where no rollout gives them."""

    name: str
    scored: int
    """Scored rollouts."""
    asked: int
    """Rollouts that were asked for."""
    mean_reward: float | None
    """Mean over tasks of the mean of each."""
    interval: Mapping[str, Any]
    """``num_tasks``; for two tasks or more also ``low``, ``high`` and ``method`` of the 95% interval."""
    pass_at_k: float | None
    """Percent, over the tasks with ``k`` rollouts or more; None if there are other rewards than 0 and 1, of
    which only the means are known, and no chance to pass. With ``k`` of 1 it is the mean reward."""
    k: int
    """The size that at least half of the groups reach; 0 without rollouts."""
    input_tokens: float | None
    """Mean tokens of a rollout, over all its model calls; likewise ``output_tokens``."""
    output_tokens: float | None
    seconds: float | None
    """Mean duration of a rollout's episode."""
    failures: int
    """Attempts without a score."""

    def cells(self) -> tuple[str, ...]:
        pass_at_k = "-" if self.pass_at_k is None else f"{self.pass_at_k:.1f} (k={self.k})"
        return (
            self.name,
            f"{self.scored}/{self.asked}",
            _text(self.mean_reward, 3),
            interval_text(self.interval, 3),
            pass_at_k,
            f"{_text(self.input_tokens, 0)}/{_text(self.output_tokens, 0)}",
            _text(self.seconds, 2),
        )


def interval_text(interval: Any, digits: int = 4) -> str:
    """``low to high``; empty where there is no interval."""
    if not isinstance(interval, Mapping) or "low" not in interval or "high" not in interval:
        return ""
    return f"{interval['low']:.{digits}g} to {interval['high']:.{digits}g}"


def summarize(
    aggregators: Mapping[str, Aggregator],
    asked: Mapping[str, int] | None = None,
    failures: Failures = "mask",
) -> list[SummaryRow]:
    """One row for each aggregator, in the mapping's order. ``asked``: how many rollouts were asked for, where
    that is known; else those that have ended count."""
    asked_counts = asked or {}
    return [_summarize(name, one, asked_counts.get(name, 0), failures) for name, one in aggregators.items()]


def _summarize(name: str, aggregator: Aggregator, asked: int, failures: Failures) -> SummaryRow:
    columns = {field: array("d") for field in ("input_tokens", "output_tokens", LATENCY_FIELD)}
    rewards: list[list[float]] = []
    for group in aggregator.groups(failures):
        rewards.append([r.fields["reward"] for r in group.rollouts if "reward" in r.fields])
        for field, column in columns.items():
            column.extend(r.fields[field] for r in group.rollouts if field in r.fields)
    rewards = [of_task for of_task in rewards if of_task]
    binary = all(reward in (0, 1) for of_task in rewards for reward in of_task)
    k = median_low(map(len, rewards)) if rewards else 0
    means = {field: math.fsum(column) / len(column) for field, column in columns.items() if column}
    mean = mean_over_tasks(rewards, binary=binary)
    coverage = aggregator.coverage()
    return SummaryRow(
        name=name,
        scored=coverage.scored,
        asked=max(asked, coverage.asked),
        mean_reward=mean.value if rewards else None,
        interval=mean.confidence(),
        pass_at_k=_mean_pass_at(rewards, k) if binary else None,
        k=k,
        input_tokens=means.get("input_tokens"),
        output_tokens=means.get("output_tokens"),
        seconds=means.get(LATENCY_FIELD),
        failures=aggregator.failures.total(),
    )


def mean_of(rows: Sequence[SummaryRow]) -> float | None:
    """The mean reward over the tasks of several rows, which share none; None without any."""
    sizes = {row.name: row.interval["num_tasks"] for row in rows}
    total = sum(sizes.values())
    sums = (row.mean_reward * sizes[row.name] for row in rows if row.mean_reward is not None)
    return math.fsum(sums) / total if total else None


def mean_over_tasks(values: list[list[float]], *, binary: bool, scale: float = 1.0) -> Figure:
    """The mean over tasks of the mean of each. ``binary``: whether all values are 0 or 1; ``scale``: see
    `Figure`."""
    clusters = Clusters(len(values))
    figure = Figure(clusters, scale, binary=binary)
    for position, of_task in enumerate(values):
        figure.add(clusters.of(position), math.fsum(of_task) / len(of_task), rollouts=len(of_task))
    return figure


def _mean_pass_at(rewards: list[list[float]], k: int) -> float | None:
    values = [value for scores in rewards if (value := pass_at_k(scores, k)) is not None]
    return 100.0 * math.fsum(values) / len(values) if values else None


def _text(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"

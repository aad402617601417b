"""`RunComparison`: two runs over the same tasks, paired task by task.

Every task has the same weight, however many rollouts it has, and only tasks with a scored rollout in both
runs count: the difficulty of a task is then the same on both sides, and only the difference is due to
chance. The 95% interval of the difference is a bootstrap over tasks. A task is *solved* by a run if more
than half of its rollouts are, and *flips* if one run solves it and the other does not.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from gym_serve.metrics import Aggregator, MetricSpec
from gym_serve.metrics.estimators import Clusters, Figure
from gym_serve.metrics.records import Group
from gym_serve.rollouts.analysis.reading import agent_of
from gym_serve.rollouts.rows import task_index
from gym_serve.rollouts.tables import IntTable, digest
from gym_serve.types.requests import JSON

_AGENT = "_agent"


class Side(NamedTuple):
    """One run's scored rollouts of a task."""

    rollouts: int
    solved: int
    mean: float
    """Mean reward."""

    @property
    def pass_rate(self) -> float:
        return self.solved / self.rollouts

    @property
    def is_solved(self) -> bool:
        """Whether more than half of them are solved."""
        return 2 * self.solved > self.rollouts


class TaskDifference(NamedTuple):
    """A task that both runs have scored."""

    task_index: int
    agent: str
    """The agent of the first run."""
    a: Side
    b: Side

    @property
    def flip(self) -> str | None:
        """``fixed`` or ``broken`` by the second run, if it flips."""
        if self.a.is_solved == self.b.is_solved:
            return None
        return "fixed" if self.b.is_solved else "broken"


@dataclass(frozen=True)
class Estimate:
    """An average over paired tasks in both runs; ``low`` and ``high`` bound the difference."""

    metric: str
    agent: str | None
    """None for all agents together."""
    tasks: int
    a: float
    b: float
    difference: float
    low: float | None
    """None for a single task."""
    high: float | None

    @property
    def verdict(self) -> str:
        """``better``, ``worse``, or ``no clear difference`` if the interval contains 0 (or there is none)."""
        if self.low is None or self.high is None or self.low <= 0.0 <= self.high:
            return "no clear difference"
        return "better" if self.low > 0.0 else "worse"


class ComparisonSummary(NamedTuple):
    """The figures of all paired tasks together."""

    estimates: list[Estimate]
    """Mean reward and pass rate (percent); of all tasks first, then by agent if there are several."""
    paired_tasks: int
    only_a: int
    """Tasks that the first run alone has scored."""
    only_b: int
    different_prompts: int
    """Paired tasks whose ``input`` differs between the runs."""
    fixed: int
    broken: int
    flips: list[TaskDifference]
    """The first of the flipped tasks, the largest change of the mean reward first."""


class RunComparison:
    """Accumulates the rollouts of two runs; keeps only their numbers.

    Args:
        solved_at: the reward from which on a rollout counts as solved.
    """

    def __init__(self, solved_at: float = 1.0) -> None:
        self.solved_at = solved_at
        spec = MetricSpec(subset=_AGENT)
        self._a, self._b = Aggregator(spec), Aggregator(spec)
        self._prompts = IntTable()
        self._changed: set[int] = set()

    def add_a(self, rollouts: Iterable[JSON]) -> None:
        """Add the first run, before the second one.

        Raises:
            InvalidRequest: a rollout has no task or rollout index.
        """
        for rollout in rollouts:
            self._a.add({**rollout, _AGENT: agent_of(rollout)})
            self._prompts[task_index(rollout)] = _prompt_digest(rollout)

    def add_b(self, rollouts: Iterable[JSON]) -> None:
        """Add the second run.

        Raises:
            InvalidRequest: a rollout has no task or rollout index.
        """
        for rollout in rollouts:
            self._b.add({**rollout, _AGENT: agent_of(rollout)})
            task = task_index(rollout)
            if self._prompts.get(task) not in (None, _prompt_digest(rollout)):
                self._changed.add(task)

    def tasks(self) -> Iterator[TaskDifference]:
        """The paired tasks by index; made one by one."""
        others = iter(self._b.groups())
        other = next(others, None)
        for group in self._a.groups():
            while other is not None and other.task_index < group.task_index:
                other = next(others, None)
            if other is not None and other.task_index == group.task_index:
                agent = group.rollouts[0].labels[0] or "-"
                yield TaskDifference(group.task_index, agent, self._side(group), self._side(other))

    def summary(self, top: int) -> ComparisonSummary:
        """All paired tasks together.

        Args:
            top: how many flipped tasks to name at most.
        """
        paired: dict[str, int] = {}
        flips = {"fixed": 0, "broken": 0}
        changed = 0
        for task in self.tasks():
            paired[task.agent] = paired.get(task.agent, 0) + 1
            changed += task.task_index in self._changed
            if task.flip is not None:
                flips[task.flip] += 1
        total = sum(paired.values())
        return ComparisonSummary(
            estimates=self._estimates(paired, total),
            paired_tasks=total,
            only_a=len(self._a.groups()) - total,
            only_b=len(self._b.groups()) - total,
            different_prompts=changed,
            **flips,
            flips=heapq.nsmallest(
                top,
                (task for task in self.tasks() if task.flip),
                key=lambda task: (-abs(task.b.mean - task.a.mean), task.task_index),
            ),
        )

    def _estimates(self, paired: dict[str, int], total: int) -> list[Estimate]:
        sizes: dict[str | None, int] = {None: total} if total else {}
        if len(paired) > 1:
            sizes |= dict(sorted(paired.items()))
        pairs = {agent: _Pairs(size) for agent, size in sizes.items()}
        for task in self.tasks():
            pairs[None].add(task)
            if len(paired) > 1:
                pairs[task.agent].add(task)
        return [estimate for agent, those in pairs.items() for estimate in those.estimates(agent)]

    def _side(self, group: Group) -> Side:
        rewards = [rollout.fields["reward"] for rollout in group.rollouts]
        solved = sum(1 for reward in rewards if reward >= self.solved_at)
        return Side(len(rewards), solved, math.fsum(rewards) / len(rewards))


class _Pairs:
    """Averages over a known number of paired tasks."""

    def __init__(self, size: int) -> None:
        self._clusters = Clusters(size)
        self._figures = {
            metric: [Figure(self._clusters, scale) for _ in range(3)]
            for metric, scale in (("mean reward", 1.0), ("pass rate %", 100.0))
        }
        self._size = 0

    def add(self, task: TaskDifference) -> None:
        cluster = self._clusters.of(self._size)
        self._size += 1
        values = {
            "mean reward": (task.a.mean, task.b.mean),
            "pass rate %": (task.a.pass_rate, task.b.pass_rate),
        }
        for metric, (a, b) in values.items():
            for figure, value in zip(self._figures[metric], (a, b, b - a), strict=True):
                figure.add(cluster, value)

    def estimates(self, agent: str | None) -> Iterator[Estimate]:
        for metric, (a, b, difference) in self._figures.items():
            interval = difference.confidence()
            yield Estimate(
                metric,
                agent,
                self._size,
                a.value,
                b.value,
                difference.value,
                interval.get("low"),
                interval.get("high"),
            )


def _prompt_digest(rollout: JSON) -> int:
    params = rollout.get("responses_create_params")
    return digest(params.get("input") if isinstance(params, dict) else None) & 0xFFFF_FFFF

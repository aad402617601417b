"""`Comparison`: two runs over the same tasks, paired task by task, for ``diff`` and for the viewer.

Every task has the same weight, and only tasks with a score in both runs count. Tasks with one number and
different prompts are of different data sets: they are left out, unless the caller says by what tasks are
identified. The 95% interval is the paired bootstrap: whole tasks are resampled. It is too narrow for a few
tasks (two that got worse alike have no width), so a sign-flip test has to agree. A task is *solved* by a run
if more than half of its rollouts are, and *flips* if one run alone solves it.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from gym_serve.metrics import Aggregator, Coverage, Failures, MetricSpec
from gym_serve.metrics.estimators import Clusters, Figure
from gym_serve.rollouts.analysis.reading import agent_of
from gym_serve.rollouts.rows import task_index
from gym_serve.rollouts.tables import IntTable, digest
from gym_serve.types.requests import JSON

_AGENT = "_agent"


class Side(NamedTuple):
    """One run's rollouts of a task."""

    rollouts: int  # those with a score
    solved: int
    mean: float  # mean reward

    @property
    def pass_rate(self) -> float:
        return self.solved / self.rollouts

    @property
    def is_solved(self) -> bool:
        return 2 * self.solved > self.rollouts


class Scores(NamedTuple):
    """What a comparison knows of a task in one run."""

    task: int | str
    agent: str
    prompt: int | None  # see `prompt_digest`
    side: Side


class TaskDifference(NamedTuple):
    """A task that both runs have scored."""

    task_index: int | str
    agent: str  # the agent of the first run
    a: Side
    b: Side
    same_prompt: bool

    @property
    def difference(self) -> float:
        return self.b.mean - self.a.mean

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
    agent: str | None  # None for all agents together
    tasks: int
    a: float
    b: float
    difference: float
    low: float | None  # None for a single task
    high: float | None
    method: str | None  # how the interval is made
    p: float  # of the sign-flip test, see `sign_flip`

    @property
    def verdict(self) -> str:
        """``better``, ``worse``, or ``no clear difference`` if the interval contains 0 (or there is none), or
        ``p`` is 0.05 or more.
        """
        if self.low is None or self.high is None or self.low <= 0.0 <= self.high or self.p >= 0.05:
            return "no clear difference"
        return "better" if self.low > 0.0 else "worse"


class ComparisonSummary(NamedTuple):
    """The figures of all paired tasks together."""

    estimates: list[Estimate]
    """Mean reward and pass rate (percent); of all tasks first, then by agent if there are several."""
    paired_tasks: int
    only_a: int  # tasks that the first run alone has scored
    only_b: int
    different_prompts: int
    """Tasks of both runs whose prompts differ: they are left out, unless tasks are identified otherwise."""
    fixed: int
    broken: int
    flips: list[TaskDifference]  # the first of the flipped tasks, the largest change of the mean reward first


class Comparison:
    """The tasks of two runs, paired.

    Args:
        a, b: give the scores of each run's tasks, each task once: first numbers, then texts, in order.
        by_prompt: leave out tasks whose prompts differ.
    """

    def __init__(
        self, a: Callable[[], Iterable[Scores]], b: Callable[[], Iterable[Scores]], *, by_prompt: bool = True
    ) -> None:
        self._a, self._b = a, b
        self._by_prompt = by_prompt

    def tasks(self) -> Iterator[TaskDifference]:
        """The paired tasks in order; made one by one."""
        return (task for task in self._both() if task.same_prompt or not self._by_prompt)

    def summary(self, top: int) -> ComparisonSummary:
        """All paired tasks together; names ``top`` flipped tasks at most."""
        both = different = 0
        agents: Counter[str] = Counter()
        flips = {"fixed": 0, "broken": 0}
        for task in self._both():
            both += 1
            different += not task.same_prompt
            if task.same_prompt or not self._by_prompt:
                agents[task.agent] += 1
                if task.flip is not None:
                    flips[task.flip] += 1
        return ComparisonSummary(
            estimates=self._estimates(agents),
            paired_tasks=agents.total(),
            only_a=sum(1 for _ in self._a()) - both,
            only_b=sum(1 for _ in self._b()) - both,
            different_prompts=different,
            **flips,
            flips=self.first(top, flipped=True),
        )

    def first(self, top: int, *, flipped: bool = False) -> list[TaskDifference]:
        """The first tasks, by the change of the mean reward: flipped ones alone, or before the others."""
        chosen = (task for task in self.tasks() if task.flip or not flipped)
        return heapq.nsmallest(
            top, chosen, key=lambda task: (task.flip is None, -abs(task.difference), _order(task.task_index))
        )

    def _both(self) -> Iterator[TaskDifference]:
        others = iter(self._b())
        other = next(others, None)
        for one in self._a():
            while other is not None and _order(other.task) < _order(one.task):
                other = next(others, None)
            if other is not None and other.task == one.task:
                same = None in (one.prompt, other.prompt) or one.prompt == other.prompt
                yield TaskDifference(one.task, one.agent, one.side, other.side, same)

    def _estimates(self, agents: Counter[str]) -> list[Estimate]:
        sizes: dict[str | None, int] = {None: agents.total()} if agents else {}
        if len(agents) > 1:
            sizes |= dict(sorted(agents.items()))
        pairs = {agent: _Pairs(size) for agent, size in sizes.items()}
        for task in self.tasks():
            pairs[None].add(task)
            if len(agents) > 1:
                pairs[task.agent].add(task)
        return [estimate for agent, those in pairs.items() for estimate in those.estimates(agent)]


class RunScores:
    """Accumulates the rollouts of a run for a `Comparison`; keeps only their numbers."""

    def __init__(self, solved_at: float = 1.0, failures: Failures = "mask") -> None:
        self._solved_at = solved_at
        self._failures: Failures = failures
        self._rollouts = Aggregator(MetricSpec(subset=_AGENT))
        self._prompts = IntTable()

    def add(self, rollouts: Iterable[JSON]) -> None:
        """Add rollouts. Raises `InvalidRequest`: a rollout has no task or rollout index."""
        for rollout in rollouts:
            self._rollouts.add({**rollout, _AGENT: agent_of(rollout)})
            params = rollout.get("responses_create_params")
            if isinstance(params, dict) and (prompt := prompt_digest(params.get("input"))) is not None:
                self._prompts[task_index(rollout)] = prompt

    def coverage(self) -> Coverage:
        return self._rollouts.coverage()

    def __call__(self) -> Iterator[Scores]:
        for group in self._rollouts.groups(self._failures):
            rewards = [rollout.fields["reward"] for rollout in group.rollouts]
            solved = sum(1 for reward in rewards if reward >= self._solved_at)
            yield Scores(
                group.task_index,
                group.rollouts[0].labels[0] or "-",
                self._prompts.get(group.task_index),
                Side(len(rewards), solved, math.fsum(rewards) / len(rewards)),
            )


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
                "paired bootstrap" if "low" in interval else None,
                difference.chance(),
            )


def prompt_digest(prompt: Any) -> int | None:
    """32 bits of the ``input`` of a row, by which tasks of different data sets are told apart; None if it is
    nested too deeply."""
    try:
        return digest(prompt) & 0xFFFF_FFFF
    except TypeError:
        return None


def _order(task: int | str) -> tuple[bool, int | str]:
    return isinstance(task, str), task

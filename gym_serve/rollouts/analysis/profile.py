"""`RewardProfile`: how the policy performs on each task, and which tasks to train on next.

A task whose rollouts all get the same reward teaches nothing: every advantage of its group is zero. So the
tasks to train on next are those whose rewards differ; the larger the standard deviation, the earlier. Failed
rollouts have no reward and count only as failures, unless the caller counts them as zeros.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gym_serve.metrics import Aggregator, Coverage, Failures, SummaryRow, failure_class, summarize
from gym_serve.metrics.estimators import Clusters, Figure, stdev
from gym_serve.metrics.records import Group
from gym_serve.rollouts.analysis.reading import agent_of
from gym_serve.rollouts.rows import task_index
from gym_serve.types.requests import JSON

BUCKETS = ("never", "hard", "medium", "easy", "always")
"""Difficulty by pass rate p: 0, below 0.25, from 0.25 to 0.75, above 0.75, 1."""

BINS = 10  # bars of a histogram


@dataclass(frozen=True)
class TaskProfile:
    """The rollouts of one task that count."""

    task_index: int
    agent: str
    rollouts: int
    missing: int  # rollouts without a score
    solved: int  # rollouts that count as solved
    mean: float  # mean reward
    std: float  # sample standard deviation of the reward; 0 for one rollout
    min: float
    max: float
    histogram: tuple[int, ...]
    """Rollouts by reward, in `BINS` equal steps between the edges of the whole profile."""

    @property
    def pass_rate(self) -> float:
        return self.solved / self.rollouts

    @property
    def bucket(self) -> str:
        never, hard, medium, easy, always = BUCKETS
        if self.solved in (0, self.rollouts):
            return always if self.solved else never
        if self.pass_rate < 0.25:
            return hard
        return medium if self.pass_rate <= 0.75 else easy

    @property
    def trainable(self) -> bool:
        return self.min < self.max


class PoorRollout(NamedTuple):
    """A rollout that is not solved, and why."""

    reward: float
    task_index: int
    rollout_id: str
    agent: str
    reason: str  # the verdict's ``reason``; empty if it gives none


class ProfileSummary(NamedTuple):
    """The figures of all tasks together."""

    tasks: int  # tasks with a score
    rollouts: int  # rollouts that count
    coverage: Coverage  # rollouts with a score, of those asked for
    unscored_tasks: int  # tasks whose rollouts all failed or are masked
    failed_attempts: int
    mean_reward: JSON
    """``value`` over tasks, ``num_tasks``, and the 95% interval ``low`` to ``high`` of two tasks or more."""
    pass_rate: JSON  # the same, in percent
    buckets: dict[str, int]  # tasks by difficulty
    pass_rate_histogram: tuple[int, ...]  # tasks by pass rate, in `BINS` equal steps from 0 to 1
    trainable_tasks: int
    train_next: list[TaskProfile]  # the first of them, largest standard deviation first
    worst: list[PoorRollout]  # the unsolved rollouts with the lowest rewards


class RewardProfile:
    """Accumulates rollouts; keeps only their numbers."""

    def __init__(self, solved_at: float = 1.0, failures: Failures = "mask", worst: int = 20) -> None:
        self.solved_at = solved_at
        self.failures: Failures = failures
        self._aggregators: dict[str, Aggregator] = {}
        self._low, self._high = 0.0, 1.0
        self._binary = True
        self._unscored: set[int] = set()
        self._worst = _Lowest(worst)

    def add(self, rollout: JSON) -> None:
        """Add a rollout, scored or failed. Raises `InvalidRequest` if it has no task or rollout index."""
        agent = agent_of(rollout)
        self._aggregators.setdefault(agent, Aggregator()).add(rollout)
        if failure_class(rollout) is not None:
            self._unscored.add(task_index(rollout))
            return
        reward = float(rollout["reward"])
        self._low, self._high = min(self._low, reward), max(self._high, reward)
        self._binary &= reward in (0.0, 1.0)
        if reward < self.solved_at:
            id_, reason = rollout.get("_ng_rollout_id"), rollout.get("reason")
            self._worst.add(
                PoorRollout(
                    reward,
                    task_index(rollout),
                    str(id_ or ""),
                    agent,
                    reason if isinstance(reason, str) else "",
                )
            )

    @property
    def bin_edges(self) -> tuple[float, ...]:
        """The edges of the bins of rewards: from 0 to 1, or farther if rewards are outside of it."""
        return tuple(self._low + (self._high - self._low) * step / BINS for step in range(BINS + 1))

    def agents(self, asked: Mapping[str, int]) -> list[SummaryRow]:
        return summarize(dict(sorted(self._aggregators.items())), asked, self.failures)

    def tasks(self) -> Iterator[TaskProfile]:
        """The profile of each task, by agent and task index; made one by one."""
        for agent, aggregator in sorted(self._aggregators.items()):
            for group in aggregator.groups(self.failures):
                yield self._task(agent, group)

    def summary(self, top: int, asked: Mapping[str, int] | None = None) -> ProfileSummary:
        buckets = dict.fromkeys(BUCKETS, 0)
        rates = [0] * BINS
        clusters = Clusters(sum(1 for _ in self.tasks()))
        reward = Figure(clusters, binary=self._binary)
        passed = Figure(clusters, scale=100.0, binary=True)
        rollouts = trainable = 0
        unscored = set(self._unscored)
        for position, task in enumerate(self.tasks()):
            unscored.discard(task.task_index)
            buckets[task.bucket] += 1
            rates[_bin(task.pass_rate, 0.0, 1.0)] += 1
            reward.add(clusters.of(position), task.mean, rollouts=task.rollouts)
            passed.add(clusters.of(position), task.pass_rate, rollouts=task.rollouts)
            rollouts += task.rollouts
            trainable += task.trainable
        rows = self.agents(asked or {})
        train_next = (task for task in self.tasks() if task.trainable)
        return ProfileSummary(
            tasks=reward.num_tasks,
            rollouts=rollouts,
            coverage=Coverage(sum(row.scored for row in rows), sum(row.asked for row in rows)),
            unscored_tasks=len(unscored),
            failed_attempts=sum(a.failures.total() for a in self._aggregators.values()),
            mean_reward=_figure(reward),
            pass_rate=_figure(passed),
            buckets=buckets,
            pass_rate_histogram=tuple(rates),
            trainable_tasks=trainable,
            train_next=heapq.nsmallest(top, train_next, key=lambda task: (-task.std, task.task_index)),
            worst=self._worst.take(),
        )

    def trainable_tasks(self) -> Iterator[int]:
        return (task.task_index for task in self.tasks() if task.trainable)

    def _task(self, agent: str, group: Group) -> TaskProfile:
        rewards = [float(rollout.fields["reward"]) for rollout in group.rollouts]
        histogram = [0] * BINS
        for reward in rewards:
            histogram[_bin(reward, self._low, self._high)] += 1
        return TaskProfile(
            task_index=group.task_index,
            agent=agent,
            rollouts=len(rewards),
            missing=group.expected - sum(rollout.scored for rollout in group.rollouts),
            solved=sum(1 for reward in rewards if reward >= self.solved_at),
            mean=math.fsum(rewards) / len(rewards),
            std=stdev(rewards) if len(rewards) > 1 else 0.0,
            min=min(rewards),
            max=max(rewards),
            histogram=tuple(histogram),
        )


class _Lowest:
    """The lowest of many rollouts, in few."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._kept: list[PoorRollout] = []

    def add(self, rollout: PoorRollout) -> None:
        self._kept.append(rollout)
        if len(self._kept) > 2 * self._count + 100:
            self._kept = self.take()

    def take(self) -> list[PoorRollout]:
        return heapq.nsmallest(self._count, self._kept)


def _bin(value: float, low: float, high: float) -> int:
    return min(int((value - low) / (high - low) * BINS), BINS - 1)


def _figure(figure: Figure) -> JSON:
    if not figure.num_tasks:
        return {"value": None, "num_tasks": 0}
    return {"value": figure.value, **figure.confidence()}

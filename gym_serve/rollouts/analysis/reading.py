"""Reading stored rollouts, the failures beside them, and the rows of their tasks
(``out_materialized_inputs.jsonl``).

A line that is not a rollout is a problem to report, not the end. Two runs number their tasks alike only if
they read the same rows in the same order, so a task may be identified by a field of the rows instead
(`TaskKey`).

`RewardProfile`: how the policy performs on each task, and which tasks to train on next.

A task whose rollouts all get the same reward teaches nothing: every advantage of its group is zero. So the
tasks to train on next are those whose rewards differ; the larger the standard deviation, the earlier. Failed
rollouts have no reward and count only as failures, unless the caller counts them as zeros.
"""

from __future__ import annotations

import copy
import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from gym_serve.metrics import Aggregator, Coverage, Failures, SummaryRow, summarize
from gym_serve.metrics.estimators import Clusters, Figure, stdev
from gym_serve.metrics.records import TASK_INDEX, Group
from gym_serve.rollouts.journal import Header, Outputs
from gym_serve.rollouts.rows import (
    METADATA_KEYS,
    Problems,
    ignore_problem,
    raise_problem,
    read_rows,
    rollout_key,
    task_index,
)
from gym_serve.rollouts.tables import IntTable, digest
from gym_serve.types.endings import failure_class
from gym_serve.types.errors import GymError, InvalidRequest
from gym_serve.types.requests import JSON
from gym_serve.types.rows import agent_name, check_reward


class TaskKey:
    """Identifies tasks: by the task index of their run, or by a field of the rows.

    One object numbers the tasks of all files that are read with it. Rollouts without any metadata, as NeMo
    Gym records them for its data sets, are told apart by what the model was asked, and counted as they come.
    """

    def __init__(self, field: str = TASK_INDEX) -> None:
        self.field = field
        self._numbers = IntTable()
        self._seen = IntTable()

    def apply(self, rollout: JSON, run: int = 0) -> JSON:
        """The rollout with the metadata of the task that it belongs to by this key; `InvalidRequest` without.

        ``run`` numbers the run that it is of: the first rollouts of a task in two runs are two rollouts.
        """
        is_bare = "response" in rollout and rollout.keys().isdisjoint(METADATA_KEYS)
        index = 0 if is_bare else rollout_key(rollout)
        if run and not is_bare:
            index = digest([run, index])
        if self.field == TASK_INDEX and not is_bare:
            return {**rollout, "_ng_rollout_index": index} if run else rollout
        value = rollout.get("responses_create_params" if self.field == TASK_INDEX else self.field)
        if value is None:
            raise InvalidRequest(f"`{self.field}`, the field that identifies the task, is missing")
        number = self._number(digest(value))
        if is_bare:
            index = self._seen[number] = (self._seen.get(number) or 0) + 1
        # The row's own index keeps the rollouts apart of two rows with the same key.
        return {**rollout, TASK_INDEX: number, "_ng_rollout_index": index}

    def _number(self, key: int) -> int:
        number = self._numbers.get(key)
        if number is None:
            self._numbers[key] = number = len(self._numbers)
        return number


def read_rollouts(paths: Iterable[Path], key: TaskKey, problems: Problems) -> Iterator[JSON]:
    """The rollouts of runs, scored and failed, one at a time. Raises `InvalidRequest`: a file cannot be
    opened."""
    for run, path in enumerate(paths):
        failures = Outputs.of(path).failures
        for file in [path, *([failures] if failures.exists() else [])]:
            for where, line, problem in read_rows(file):
                try:
                    if line is None:
                        raise InvalidRequest(str(problem))
                    yield _checked(key.apply(line, run))
                except GymError as error:
                    problems.add(f"{where}: {error.message}")


class Asked(NamedTuple):
    """What runs asked for, read from the rows beside their files; nothing of a run without those."""

    rollouts: Counter[str]  # how many rollouts, by agent
    rows: int  # how many rows of the data set they are of, in the run with most
    tasks: int  # how many tasks these are

    @property
    def notes(self) -> list[str]:
        if self.rows <= self.tasks:
            return []
        return [
            f"{self.rows:,} rows are {self.tasks:,} tasks: rows that are equal, or have the same key, are "
            "attempts at one task, and the mean reward is over tasks"
        ]


def read_asked(paths: Iterable[Path], key: TaskKey | None = None) -> Asked:
    """What runs asked for."""
    key = key or TaskKey()
    rollouts: Counter[str] = Counter()
    most, tasks = 0.0, IntTable()
    for outputs in map(Outputs.of, paths):
        if not outputs.inputs.exists():
            continue
        rows = 0.0
        header = Header.read(outputs.header)
        repeats = header.expansion.get("repeats") if header is not None else None
        for _, row, _ in read_rows(outputs.inputs):
            agent = agent_of(row or {})
            rollouts[agent] += 1
            of_agent = repeats.get(agent, repeats.get("_default")) if isinstance(repeats, dict) else repeats
            with suppress(InvalidRequest):  # a row that lacks its metadata, or the key
                if row is not None and of_agent:
                    rows += 1 / of_agent
                    tasks[task_index(key.apply(row))] = 1
        most = max(most, rows)
    return Asked(rollouts, round(most), len(tasks))


def agent_of(rollout: JSON) -> str:
    """Name of the agent that made a rollout; ``-`` if it does not say."""
    return agent_name(rollout) or "-"


def _checked(rollout: JSON) -> JSON:
    if failure_class(rollout) is None:
        check_reward(rollout.get("reward"))
    return rollout


def rows_of_tasks(path: Path, tasks: Iterable[int]) -> Iterator[JSON]:
    """One row of each of some tasks, as a data set for another run: without metadata and the run's seeds.

    Raises `InvalidRequest`: the run's inputs are not beside its main file, ``path``.
    """
    outputs = Outputs.of(path)
    if not outputs.inputs.exists():
        raise InvalidRequest(f"{outputs.inputs}, which has the rows of {path.name}, does not exist")
    header = Header.read(outputs.header)
    seeded = header is not None and header.expansion.get("seed") is not None
    for _, materialized in _first_rows(outputs.inputs, set(tasks), raise_problem):
        row = {key: value for key, value in materialized.items() if key not in METADATA_KEYS}
        yield _unseeded(row) if seeded else row


def prompts_of_tasks(path: Path, tasks: Iterable[int]) -> dict[int, str]:
    """The `prompt_text` of each of some tasks, of the run's inputs or, without those, its main file
    ``path``."""
    inputs = Outputs.of(path).inputs
    source = inputs if inputs.exists() else path
    return {task: prompt_text(row) for task, row in _first_rows(source, set(tasks), ignore_problem)}


def prompt_text(row: JSON) -> str:
    """The last user message of a row, in one line; empty if there is none."""
    params = row.get("responses_create_params")
    prompt: Any = params.get("input") if isinstance(params, dict) else None
    if isinstance(prompt, list):
        users = [item for item in prompt if isinstance(item, dict) and item.get("role") == "user"]
        prompt = users[-1].get("content") if users else None
    if isinstance(prompt, list):
        prompt = " ".join(str(part["text"]) for part in prompt if isinstance(part, dict) and "text" in part)
    return " ".join(prompt.split()) if isinstance(prompt, str) else ""


def _first_rows(inputs: Path, left: set[int], problem: Callable[[str], None]) -> Iterator[tuple[int, JSON]]:
    for where, row, reason in read_rows(inputs):
        if not left:
            return
        try:
            if row is None:
                raise InvalidRequest(str(reason))
            task = task_index(row)
        except InvalidRequest as error:
            problem(f"{where}: {error.message}")
            continue
        if task in left:
            left.remove(task)
            yield task, row


def _unseeded(row: JSON) -> JSON:
    """The row without a rollout's sampling seed, with which all rollouts of the next run would be equal."""
    row = copy.deepcopy(row)
    metadata = row["responses_create_params"].get("metadata")
    if isinstance(row.get("extra_body"), dict):
        row["extra_body"].pop("seed", None)
    if isinstance(metadata, dict) and isinstance(metadata.get("extra_body"), str):
        with suppress(ValueError, AttributeError):
            extra = orjson.loads(metadata["extra_body"])
            extra.pop("seed", None)
            metadata["extra_body"] = orjson.dumps(extra).decode()
    return row


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

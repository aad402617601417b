"""Which attempt starts when. Pure: no clock, no task, no client; the caller says what time it is.

Invariants: at most ``concurrency`` attempts run, and fewer while the graph is overloaded; a job that was
added earlier starts before a later one, and so does its retry, so that the groups of rollouts finish one
after the other instead of all being half done; a job has one current attempt, and whatever another one
reports is late and counts for nothing. An attempt that an overloaded graph pushed back is made again and
counts as none, until the job's ``patience`` is over.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Literal

from gym_serve.rollouts.backoff import Backoff
from gym_serve.rollouts.outage import Outage
from gym_serve.rollouts.pacing import Pace
from gym_serve.types.requests import JSON

__all__ = ["Failure", "Job", "Scheduler"]


@dataclass
class Job:
    """One rollout to be made.

    Attributes:
        number: its place among all jobs; the earliest come first.
        group: number of the row that it is a rollout of.
        row: its stamped row.
        attempt: how many attempts have failed so far, which is the number of the next one.
        forgiven: how many of them do not count any more.
    """

    number: int
    group: int
    row: JSON
    attempt: int = 0
    forgiven: int = 0


@dataclass
class _Pushed:
    """How long a job may be pushed back, and how often it was."""

    until: float
    times: int = 0


@dataclass(frozen=True)
class Failure:
    """What the scheduler has to know of a failed attempt.

    Attributes:
        retryable: whether another attempt may fare better.
        unavailable: whether it found the graph, or a server of it, away.
        overloaded: whether it was pushed back, as the graph, or a server of it, has too much to do.
        retry_after: seconds that an overloaded server asked for.
    """

    retryable: bool
    unavailable: bool = False
    overloaded: bool = False
    retry_after: float = 0.0


class Scheduler:
    """The state of all jobs that are not finished.

    Args:
        concurrency: attempts that may run at the same time.
        attempts: how often a job may be tried; with one attempt, an outage holds nothing back.
        backoff: how long a retry waits.
        patience: seconds that a job may be pushed back for nothing, from its first start.
    """

    def __init__(self, concurrency: int, attempts: int, backoff: Backoff, patience: float = math.inf) -> None:
        self._attempts = attempts
        self._backoff = backoff
        self._patience = patience
        self._outage = Outage(concurrency, backoff)
        self._pace = Pace(concurrency)
        self._now = 0.0
        self._jobs: dict[int, Job] = {}
        self._ready: list[int] = []  # heap of numbers; those of dropped jobs are skipped when popped
        self._waiting: list[tuple[float, int]] = []  # heap of retries by their time, likewise
        self._running: dict[int, float] = {}  # when each attempt started
        self._pushed: dict[int, _Pushed] = {}

    @property
    def open(self) -> int:
        """How many jobs are not finished."""
        return len(self._jobs)

    @property
    def running(self) -> int:
        """How many attempts run."""
        return len(self._running)

    @property
    def hungry(self) -> bool:
        """Whether an attempt could have started at the last `start`, if only there were another job."""
        return len(self._running) < self._places(self._now) and not self._ready

    @property
    def places(self) -> int:
        """How many attempts may run at the moment."""
        return self._places(self._now)

    def add(self, job: Job) -> None:
        """Take on a job."""
        self._jobs[job.number] = job
        heapq.heappush(self._ready, job.number)

    def start(self, now: float) -> Job | None:
        """The job whose next attempt starts now, if one may."""
        self._now = now
        while self._waiting and self._waiting[0][0] <= now:
            heapq.heappush(self._ready, heapq.heappop(self._waiting)[1])
        while self._ready and len(self._running) < self._places(now):
            number = heapq.heappop(self._ready)
            if number in self._jobs:
                self._running[number] = now
                return self._jobs[number]
        return None

    def finish(
        self, number: int, attempt: int, now: float, failure: Failure | None = None
    ) -> Literal["done", "retry", "again", "late"]:
        """Record the result of an attempt.

        Args:
            number: the job.
            attempt: the attempt.
            now: the time.
            failure: what is known of its failure; None if it was scored.

        Returns:
            ``done``: it is the job's result. ``retry``: the job gets another attempt. ``again``: it gets
            the same one again, as the graph was away or overloaded. ``late``: the attempt is not the job's
            current one. The last two are not to be recorded.
        """
        job = self._jobs.get(number)
        if job is None or number not in self._running or attempt != job.attempt:
            return "late"
        started = self._running.pop(number)
        if failure is not None and failure.overloaded:
            self._pace.overloaded(started, now)
            if self._push_back(number, started, now, failure.retry_after):
                return "again"
        else:
            self._pace.answered()
        if failure is None or not failure.unavailable or self._attempts == 1:
            self._outage.answered()
        elif self._outage.unavailable(started, now):
            heapq.heappush(self._ready, number)
            return "again"
        if failure is not None and failure.retryable and attempt + 1 - job.forgiven < self._attempts:
            job.attempt += 1
            heapq.heappush(self._waiting, (now + self._backoff.seconds(job.attempt), number))
            return "retry"
        del self._jobs[number]
        self._pushed.pop(number, None)
        return "done"

    def drop(self, number: int) -> bool:
        """Give a job up.

        Returns:
            whether an attempt of it is running, and has to be cancelled.
        """
        self._jobs.pop(number, None)
        self._pushed.pop(number, None)
        return self._running.pop(number, None) is not None

    def drop_idle(self) -> list[Job]:
        """Give up every job that does not run at the moment; those jobs."""
        idle = [job for number, job in self._jobs.items() if number not in self._running]
        for job in idle:
            self.drop(job.number)
        return idle

    def next_due(self) -> float:
        """When an attempt may start that could not at the last `start`, for another reason than a full
        house: a retry is due, or a pause ends. Infinity for never."""
        while self._waiting and self._waiting[0][1] not in self._jobs:
            heapq.heappop(self._waiting)
        due = self._waiting[0][0] if self._waiting else math.inf
        pause = self._outage.until
        return min(due, pause) if pause is not None and pause > self._now else due

    def _places(self, now: float) -> int:
        return min(self._outage.places(now), self._pace.places)

    def _push_back(self, number: int, started: float, now: float, retry_after: float) -> bool:
        """Let a job wait as if it had not been tried, if its patience is not over."""
        pushed = self._pushed.setdefault(number, _Pushed(started + self._patience))
        if now >= pushed.until:
            return False
        pushed.times += 1
        due = now + max(retry_after, self._backoff.seconds(pushed.times))
        heapq.heappush(self._waiting, (min(due, pushed.until), number))
        return True

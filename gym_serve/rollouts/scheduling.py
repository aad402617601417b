"""Which attempt starts when, when a run stops, and in which order its results leave.

Everything here is pure: the caller says what time it is.

`Scheduler` guarantees: at most ``concurrency`` attempts run. Earlier jobs start before later ones, and so do
their retries, so that groups finish one after the other. A job has one current attempt; the result of any
other one is late and is ignored. An attempt that an overloaded graph rejects is repeated without being
counted. A job that would have to wait for longer than its ``patience`` is left open. Four policies bound it:

- `Outage` pauses a run while the whole graph is away: when only "unavailable" has come back for a while, one
  attempt at a time probes the graph, at no cost to its rollout. The number of probes is limited.
- `Pace` slows a run down while the graph is overloaded, by additive increase and multiplicative decrease, as
  in TCP; one burst of refusals halves the number once.
- `OperatorErrors` ends a run that only its operator can help, at no cost to its rollouts: a refused key at
  once, as more calls can lock the account, and anything else when several come in a row.
- `RepeatedFailures` ends a run whose rollouts all fail alike: what is wrong is then not one row.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from gym_serve.types.endings import Ending
from gym_serve.types.errors import EndpointAccessDenied, OperatorError, RepeatedFailure, Unauthorized
from gym_serve.types.requests import JSON


@dataclass(frozen=True)
class Backoff:
    """Delays that double, in seconds, with random jitter so that not all retries come at once."""

    first: float = 1.0
    largest: float = 60.0
    spread: Callable[[], float] = random.random
    """Returns a number from 0 to 1; the delay is between half of its full length and all of it."""

    def seconds(self, failed: int) -> float:
        """The delay after failure number ``failed``, counted from 1."""
        full = min(self.largest, self.first * 2.0 ** min(failed - 1, 60))
        return full * (0.5 + 0.5 * self.spread())


_FEWEST = 4
"""How many attempts in a row must find a graph unavailable that has answered, at least: two of each of two
rollouts. One that has never answered is away as soon as all attempts say so, be it a single one."""

MAX_PROBES = 8  # how many probes may fail; the default back-off reaches it in two to three minutes


class Outage:
    """Whether the graph as a whole is unavailable.

    Args:
        concurrency: attempts that run at the same time. As many in a row must fail, or as there are jobs.
    """

    def __init__(self, concurrency: int, backoff: Backoff) -> None:
        self._concurrency = concurrency
        self._backoff = backoff
        self._streak = 0
        self._probes = 0
        self._fewest = 1
        self._until: float | None = None

    @property
    def until(self) -> float | None:
        """When the pause ends, or has ended; None while the graph is available."""
        return self._until

    def places(self, now: float) -> int:
        if self._until is None or self._probes > MAX_PROBES:
            return self._concurrency
        return 0 if now < self._until else 1

    def answered(self) -> None:
        self._fewest = _FEWEST
        self._streak = self._probes = 0
        self._until = None

    def unavailable(self, started: float, now: float, jobs: int) -> Literal["attempt", "probe", "away"]:
        """An attempt found the graph unavailable. Returns ``attempt``: it counts as an attempt at its
        rollout. ``probe``: it does not. ``away``: the graph has been away for too long."""
        if self._probes > MAX_PROBES:
            return "away"
        self._streak += 1
        tripped = self._until is None and self._streak >= max(self._fewest, min(self._concurrency, jobs))
        probed = self._until is not None and started >= self._until
        if tripped or probed:
            self._probes += 1
            self._until = now + self._backoff.seconds(self._probes)
        return "probe" if probed else "attempt"


_DECREASE = 0.5
_ROUNDS = 20  # from 1 to the ceiling


class Pace:
    """Bounds the attempts that run at the same time."""

    def __init__(self, ceiling: int) -> None:
        self._ceiling = ceiling
        self._step = max(1.0, ceiling / _ROUNDS)
        self._places = float(ceiling)
        self._decreased: float | None = None

    @property
    def places(self) -> int:
        """How many attempts may run: 1 to the ceiling."""
        return int(self._places)

    def answered(self) -> None:
        self._places = min(self._ceiling, self._places + self._step / self._places)

    def overloaded(self, started: float, now: float) -> None:
        """An attempt that started at ``started`` was rejected by an overloaded graph."""
        if self._decreased is None or started >= self._decreased:
            self._places = max(1.0, self._places * _DECREASE)
            self._decreased = now


@dataclass
class Job:
    """One rollout to make."""

    number: int  # position among all jobs; earlier jobs come first
    group: int
    row: JSON
    attempt: int = 0  # how many attempts have failed so far, which is the number of the next one
    forgiven: int = 0


@dataclass
class _Pushed:
    """Until when a job may be pushed back, and how often it was."""

    until: float
    times: int = 0


@dataclass(frozen=True)
class Failure:
    """What the scheduler needs to know of a failed attempt.

    Attributes:
        retryable: whether another attempt may succeed.
        unavailable: whether the graph, or one of its servers, was unavailable.
        overloaded: whether the graph, or one of its servers, rejected it because of overload, or for a time.
        retry_after: that time in seconds, if the server named it.
    """

    retryable: bool
    unavailable: bool = False
    overloaded: bool = False
    retry_after: float = 0.0


class Scheduler:
    """The state of all jobs that are not finished.

    Args:
        attempts: how often a job may be tried; with one attempt, an outage pauses nothing.
        patience: seconds, from its first start, for which a job waits that is rejected.
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
        return len(self._jobs)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def hungry(self) -> bool:
        """Whether an attempt could have started at the last `start`, had there been another job."""
        return len(self._running) < self._places(self._now) and not self._ready

    @property
    def places(self) -> int:
        return self._places(self._now)

    def add(self, job: Job) -> None:
        self._jobs[job.number] = job
        heapq.heappush(self._ready, job.number)

    def start(self, now: float) -> Job | None:
        self._now = now
        while self._waiting and self._waiting[0][0] <= now:
            heapq.heappush(self._ready, heapq.heappop(self._waiting)[1])
        while self._ready and len(self._running) < self._places(now):
            number = heapq.heappop(self._ready)
            if number in self._jobs and number not in self._running:
                self._running[number] = now
                return self._jobs[number]
        return None

    def finish(
        self, number: int, attempt: int, now: float, failure: Failure | None = None
    ) -> Literal["done", "retry", "again", "open", "late"]:
        """Record the result of an attempt.

        Args:
            failure: its failure; None if it was scored.

        Returns:
            ``done``: this is the job's result. ``retry``: the job gets another attempt. ``again``: the job
            repeats this attempt, because the graph was unavailable or overloaded. ``open``: the job ends
            without a result, because it would have to wait for too long. ``late``: this attempt is not the
            job's current one. Results of the last three are not recorded.
        """
        job = self._jobs.get(number)
        if job is None or number not in self._running or attempt != job.attempt:
            return "late"
        started = self._running.pop(number)
        if failure is not None and failure.overloaded:
            self._pace.overloaded(started, now)
            if self._push_back(number, started, now, failure.retry_after):
                return "again"
            self.drop(number)
            return "open"
        self._pace.answered()
        if failure is None or not failure.unavailable or self._attempts == 1:
            self._outage.answered()
        elif (step := self._outage.unavailable(started, now, len(self._jobs))) == "probe":
            heapq.heappush(self._ready, number)
            return "again"
        elif step == "away":
            self.drop(number)
            return "open"
        if failure is not None and failure.retryable and attempt + 1 - job.forgiven < self._attempts:
            job.attempt += 1
            heapq.heappush(self._waiting, (now + self._backoff.seconds(job.attempt), number))
            return "retry"
        del self._jobs[number]
        self._pushed.pop(number, None)
        return "done"

    def drop(self, number: int) -> bool:
        """Drop a job; returns whether an attempt at it is running, which the caller must cancel."""
        self._jobs.pop(number, None)
        self._pushed.pop(number, None)
        return self._running.pop(number, None) is not None

    def restart(self, job: Job) -> bool:
        """Begin a job anew: its attempts so far no longer count. One that waits to start goes on waiting.
        Returns whether an attempt at it is running, which the caller must cancel."""
        running = job.number in self._running
        if running or job.number not in self._jobs:
            self.drop(job.number)
            job.attempt += 1
            job.forgiven = job.attempt
            self.add(job)
        return running

    def drop_idle(self) -> list[Job]:
        """Drop every job that is not running; returns those jobs."""
        idle = [job for number, job in self._jobs.items() if number not in self._running]
        for job in idle:
            self.drop(job.number)
        return idle

    def next_due(self) -> float:
        """When a retry is due or a pause ends; infinity for never.

        An attempt may start then that could not at the last `start`.
        """
        while self._waiting and self._waiting[0][1] not in self._jobs:
            heapq.heappop(self._waiting)
        due = self._waiting[0][0] if self._waiting else math.inf
        pause = self._outage.until
        return min(due, pause) if pause is not None and pause > self._now else due

    def waits_until(self, now: float) -> float | None:
        """Until when no attempt runs, though there are jobs; None while one runs or may start."""
        if self._running or not self._jobs:
            return None
        pause = self._outage.until
        until = pause if pause is not None and pause > now else self.next_due()
        return until if now < until < math.inf else None

    def _places(self, now: float) -> int:
        return min(self._outage.places(now), self._pace.places)

    def _push_back(self, number: int, started: float, now: float, retry_after: float) -> bool:
        """Let a job wait without counting the attempt, unless its patience ends before that."""
        pushed = self._pushed.setdefault(number, _Pushed(started + self._patience))
        if now >= pushed.until or now + retry_after > pushed.until:
            return False
        pushed.times += 1
        due = now + max(retry_after, self._backoff.seconds(pushed.times))
        heapq.heappush(self._waiting, (min(due, pushed.until), number))
        return True


MAX_FAILURES = 5  # operator errors in a row that end a run, by default

_FATAL_AT_ONCE = (Unauthorized, EndpointAccessDenied, RepeatedFailure)


class OperatorErrors:
    """Counts operator errors."""

    def __init__(self, limit: int = MAX_FAILURES) -> None:
        self.last: OperatorError | None = None  # the last one; None if there was none
        self.fatal: OperatorError | None = None  # the one that ends the run; None while it goes on
        self._limit = limit
        self._in_a_row = 0

    def add(self, error: OperatorError) -> None:
        self.last = error
        self._in_a_row += 1
        if self.fatal is not None or self._in_a_row >= self._limit or isinstance(error, _FATAL_AT_ONCE):
            self.fatal = error

    def scored(self) -> None:
        self._in_a_row = 0


T = TypeVar("T")


class RepeatedFailures(Generic[T]):
    """Counts failures that are alike and that no retry mends, and holds their results back meanwhile.

    Twenty in a row, of more than one row, with no score and no other such failure in between, are the fault
    of the data, the environment or the agent: they end the run, and their rows stay open.
    """

    def __init__(self) -> None:
        self.fatal: RepeatedFailure | None = None  # the error that ends the run; None while it goes on
        self._alike: tuple[str, ...] | None = None
        self._held: list[T] = []
        self._groups: set[int] = set()

    def passed(self, result: T, group: int, alike: tuple[str, ...] | None, ending: Ending) -> list[T]:
        """The results that count after another one.

        Args:
            alike: what equal failures have in common; None if the result can be none of them.
        """
        if alike is None:
            return [result] if ending.failed else [*self.released(), result]
        before = [] if alike == self._alike else self.released()
        self._alike = alike
        self._held.append(result)
        self._groups.add(group)
        enough = ending.stops_after is not None and len(self._held) >= ending.stops_after
        if enough and len(self._groups) > 1 and self.fatal is None:
            kind, stage, server, detail = alike
            self.fatal = RepeatedFailure(
                f"{len(self._held)} rollouts in a row failed alike, with {kind} in the {stage} stage of "
                f"{server}: {detail}"
            )
        return before

    def released(self) -> list[T]:
        """The results that were held back; none where they end the run."""
        if self.fatal is not None:
            return []
        held, self._held, self._alike, self._groups = self._held, [], None, set()
        return held

    @property
    def left_open(self) -> int:
        """How many results do not count, as the run ended with them."""
        return len(self._held) if self.fatal is not None else 0


Order = Literal["completion", "row", "group"]
"""``completion``: as rollouts complete. ``row``: in the order of the rows, each with its repeats. ``group``:
the rollouts of one row together, in the order of their repeats, as groups complete."""


class Ordering(Generic[T]):
    """Puts results in order."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._sizes: dict[int, int] = {}
        self._results: dict[int, dict[int, T]] = {}
        self.held = 0  # how many results wait for their turn

    def expect(self, group: int, size: int) -> None:
        if self._order != "completion":
            self._sizes[group] = size
            self._results[group] = {}

    def push(self, group: int, number: int, result: T) -> Iterator[T]:
        if self._order == "completion":
            yield result
            return
        self._results[group][number] = result
        self.held += 1
        if self._order == "row":
            yield from self._heads()
        elif len(self._results[group]) == self._sizes[group]:
            yield from self._released(group)

    def _heads(self) -> Iterator[T]:
        while self._sizes:
            group, size = next(iter(self._sizes.items()))
            if len(self._results[group]) < size:
                return
            yield from self._released(group)

    def _released(self, group: int) -> Iterator[T]:
        results = self._results.pop(group)
        del self._sizes[group]
        self.held -= len(results)
        for number in sorted(results):
            yield results[number]

"""`RolloutRunner`, which every way of collecting rollouts shares: it draws jobs, runs attempts and retries.

It is the thin asyncio shell around `Scheduler`. Rows are drawn only when an attempt can start, and none
starts while the consumer is busy with a result, so memory stays flat. The failure of a rollout is a value;
only what breaks the whole run is raised.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Generic, NamedTuple, TypeVar

from gym_serve.metrics import LATENCY_FIELD
from gym_serve.observe.logs import admits
from gym_serve.observe.tracing import OFF, Span, span
from gym_serve.rollouts.progress import Waiting, clock_time
from gym_serve.rollouts.rows import METADATA_KEYS, row_of_attempt
from gym_serve.rollouts.scheduling import (
    MAX_FAILURES,
    MAX_PROBES,
    Backoff,
    Failure,
    Job,
    OperatorErrors,
    Order,
    Ordering,
    RepeatedFailures,
    Scheduler,
)
from gym_serve.servers.context import CallContext, time_limit, use, wait_until, with_verdict
from gym_serve.types.endings import ending_of, is_failure
from gym_serve.types.errors import (
    LONGEST_WAIT,
    DeadlineExceeded,
    GymError,
    InvalidRequest,
    Overloaded,
    Unavailable,
    WaitTooLong,
)
from gym_serve.types.model_endpoint import public_row
from gym_serve.types.requests import JSON
from gym_serve.types.rows import check_reward, failed_rollout, operator_error, unmarked

K = TypeVar("K")
R = TypeVar("R")


class TaskPool(Generic[K, R]):
    """Tasks by key. Use it in one event loop, and `close` it."""

    def __init__(self) -> None:
        self._tasks: dict[K, asyncio.Task[R]] = {}
        self._cancelled: set[asyncio.Task[R]] = set()
        self._done: list[tuple[K, asyncio.Task[R]]] = []
        self._wake = asyncio.Event()

    def spawn(self, key: K, work: Coroutine[Any, Any, R]) -> None:
        """Run ``work`` as a task, by a key that is not in use."""
        task = asyncio.ensure_future(work)
        self._tasks[key] = task

        def done(task: asyncio.Task[R]) -> None:
            if task in self._cancelled:
                self._cancelled.remove(task)
                if not task.cancelled():
                    task.exception()  # retrieved, so that asyncio does not warn
                return
            del self._tasks[key]
            self._done.append((key, task))
            self._wake.set()

        task.add_done_callback(done)

    def cancel(self, key: K) -> None:
        """Cancel a task. One that is done already is still returned by `wait`."""
        if (task := self._tasks.get(key)) and not task.done():
            del self._tasks[key]
            self._cancelled.add(task)
            task.cancel()

    async def wait(self, timeout: float | None) -> list[tuple[K, asyncio.Task[R]]]:
        """The tasks that completed since the last call; waits for at least one.

        Args:
            timeout: seconds after which an empty list is returned; None for no limit.
        """
        if not self._done:
            self._wake.clear()
            await wait_until(self._wake, timeout)
        done, self._done = self._done, []
        return done

    async def close(self) -> None:
        for key in list(self._tasks):
            self.cancel(key)
        await asyncio.gather(*self._cancelled, *self._tasks.values(), return_exceptions=True)


logger = logging.getLogger("gym_serve")

Run = Callable[[JSON], Awaitable[JSON]]  # runs one episode of a row; cancelling it cancels the episode

_PATIENCE = 3600.0  # seconds, without a `timeout`: the default of an agent for an episode
_COMPARED = 300  # characters of a failure's message
_OPEN_PER_PLACE = 4  # open jobs per running one: jobs that wait for a retry or their turn block no other


@dataclass(frozen=True)
class RunnerOptions:
    """How attempts are run.

    Attributes:
        concurrency: how many run at the same time at most; an overloaded graph lowers that for a while.
        timeout: seconds for one attempt until it is verified; None for the servers' own limits alone. A
            rollout waits for as long (an hour with None) for an overloaded graph; it is then left open.
        max_failures: how many rollouts that meet an `OperatorError` (a wrong model or address, too long a
            wait), with no scored one in between, end the run. A refused key ends it at once.
        follow: called with the result of every attempt that counts, also of a failed one.

    Raises:
        InvalidRequest: a number is out of its range.
    """

    concurrency: int = 128
    attempts: int = 1  # how often a rollout is tried; only retryable failures are tried again
    timeout: float | None = None
    backoff: Backoff = field(default_factory=Backoff)
    max_failures: int = MAX_FAILURES
    tracing: float | None = None  # share of the rollouts whose trace is recorded, 0 to 1; None for no tracing
    follow: Callable[[JSON], None] = lambda rollout: None

    def __post_init__(self) -> None:
        for name in ("concurrency", "attempts", "max_failures"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"`{name}` must be at least 1, got {getattr(self, name)}")

    @property
    def patience(self) -> float:
        """Seconds for which an attempt may be rejected, or that the comparison of a group may take."""
        return _PATIENCE if self.timeout is None else self.timeout


class Attempt(NamedTuple):
    """Identifies one attempt at a job."""

    number: int
    attempt: int


@dataclass(frozen=True, eq=False)
class _Background:
    """Identifies one piece of background work."""

    then: Callable[[Any], None]


def jobs_of(
    groups: Iterable[list[JSON]], failed: Callable[[JSON], tuple[int, int]] = lambda row: (0, 0)
) -> Iterator[list[Job]]:
    """Jobs of materialized rows, a list for each group; ``failed`` gives `Job.attempt` and `Job.forgiven`."""
    number = count()
    for group, rows in enumerate(groups):
        yield [Job(next(number), group, row, *failed(row)) for row in rows]


async def stream(
    jobs: Iterator[list[Job]], run: Run, options: RunnerOptions, order: Order = "completion"
) -> AsyncGenerator[tuple[JSON, JSON], None]:
    """Run every job; yield ``(row, rollout)`` in the given order. Closing it cancels running rollouts.

    Raises `OperatorError` where `RunnerOptions.max_failures` is reached.
    """
    ordering: Ordering[tuple[JSON, JSON]] = Ordering(order)
    runner = RolloutRunner(
        jobs, run, options, on_draw=lambda group: ordering.expect(group[0].group, len(group))
    )
    try:
        while runner.advance(ordering.held):
            for job, rollout in await runner.results():
                for pair in ordering.push(job.group, job.number, (public_row(job.row), rollout)):
                    yield pair
            runner.check()
    finally:
        await runner.close()


class RolloutRunner:
    """Runs jobs. Call `advance` and `results` in turn, and `close` in the end.

    ``jobs`` are groups of jobs; an empty one says that no other is there yet.
    ``on_result`` gets the row and the result of every attempt that counts; an exception in it ends the run.
    """

    def __init__(
        self,
        jobs: Iterator[list[Job]],
        run: Run,
        options: RunnerOptions,
        *,
        on_draw: Callable[[list[Job]], None] = lambda group: None,
        on_start: Callable[[Job, float], None] = lambda job, now: None,
        on_result: Callable[[JSON, JSON], None] = lambda row, rollout: None,
        on_drop: Callable[[Job], None] = lambda job: None,
    ) -> None:
        self.operator_errors = OperatorErrors(options.max_failures)
        self._repeats: RepeatedFailures[tuple[JSON, JSON]] = RepeatedFailures()
        self.scheduler = Scheduler(options.concurrency, options.attempts, options.backoff, options.patience)
        self._jobs = jobs
        self._run = run
        self._options = options
        self._on_draw = on_draw
        self._on_start = on_start
        self._on_result = on_result
        self._on_drop = on_drop
        self._pool: TaskPool[Attempt | _Background, Any] = TaskPool()
        self._running: dict[Attempt, Job] = {}
        self._spans: dict[int, Span] = {}  # of jobs that have started
        self._refused = _Told()  # the failure that was met last
        self._exhausted = False
        self._draining = False

    def advance(self, held: int = 0) -> bool:
        """Start every attempt that can start; returns whether there is anything to wait for."""
        if self._draining:
            for idle in self.scheduler.drop_idle():
                self._on_drop(idle)
            return self._goes_on()
        now = time.monotonic()
        while True:
            while job := self.scheduler.start(now):
                self._on_start(job, now)
                attempt = Attempt(job.number, job.attempt)
                self._running[attempt] = job
                self._pool.spawn(attempt, self._attempt(job))
            room = _OPEN_PER_PLACE * self._options.concurrency - held - self.scheduler.open
            if self._exhausted or not self.scheduler.hungry or room <= 0:
                return self._goes_on()
            if (group := next(self._jobs, None)) is None:
                self._exhausted = True
                continue
            if not group:
                return True
            self._on_draw(group)
            for job in group:
                self.scheduler.add(job)

    def _goes_on(self) -> bool:
        if not self.scheduler.open:
            self._record_held()
        return self.scheduler.open > 0

    def _record_held(self) -> None:
        for pair in self._repeats.released():
            self._on_result(*pair)

    async def results(self, until: float = math.inf) -> list[tuple[Job, JSON]]:
        """The jobs that ended since the last call; waits for at least one.

        A job that met an operator error ended without a result that counts (`operator_error`). Once such
        errors end the run, no further attempt starts.
        """
        until = min(until, self.scheduler.next_due())
        timeout = None if until == math.inf else max(0.0, until - time.monotonic())
        ended = []
        for key, task in await self._pool.wait(timeout):
            if isinstance(key, _Background):
                key.then(task.result())
                continue
            job = self._running.pop(key, None)
            if job is None:
                continue  # dropped or restarted when it had just ended
            if task.cancelled():  # from outside: the event loop of its calls has stopped
                rollout = failed_rollout(_row_of(job), Unavailable("the call was cancelled"))
            else:
                rollout = task.result()
            failure = _failure(rollout)
            verdict = self.scheduler.finish(*key, time.monotonic(), failure)
            if failure is not None and verdict == "open":
                patience = self._options.patience if failure.overloaded else None
                rollout = failed_rollout(rollout, too_long(*_told(rollout), failure.retry_after, patience))
            elif verdict in ("again", "retry"):
                self._refused = _told(rollout)
            error = operator_error(rollout)
            if error is not None and verdict != "late":
                self.operator_errors.add(error)
            elif verdict in ("done", "retry"):
                self._record(job, rollout)
                self._options.follow(rollout)
            if verdict in ("done", "open"):
                self._end_span(job, rollout)
                ended.append((job, rollout))
                if not is_failure(rollout):
                    self.operator_errors.scored()
        if (repeated := self._repeats.fatal) is not None and self.operator_errors.fatal is None:
            self.operator_errors.add(repeated)
        if self.operator_errors.fatal is not None:
            self.drain()
        return ended

    @property
    def waiting(self) -> Waiting | None:
        """What the run waits for; None while an attempt runs or may start."""
        now = time.monotonic()
        until = self.scheduler.waits_until(now)
        return None if until is None else Waiting.of(self._refused.server, self._refused.detail, until - now)

    @property
    def left_open(self) -> int:
        """How many rollouts have ended, and stay open because the run ended with them."""
        return self._repeats.left_open

    def _record(self, job: Job, rollout: JSON) -> None:
        """Hand a result over, unless it may be one of many failures that end the run."""
        ending = ending_of(rollout)
        alike = None if ending.stops_after is None else _alike(rollout)
        for pair in self._repeats.passed((job.row, rollout), job.group, alike, ending):
            self._on_result(*pair)

    def check(self) -> None:
        """Raise the `OperatorError` that ends the run, if there is one."""
        if self.operator_errors.fatal is not None:
            raise self.operator_errors.fatal

    def drop(self, job: Job) -> None:
        """Drop a job; a running attempt is cancelled, down to the model's request."""
        self._end_span(job)
        if self.scheduler.drop(job.number):
            self._cancel(Attempt(job.number, job.attempt))

    def restart(self, job: Job) -> bool:
        """Begin a job anew, see `Scheduler.restart`; returns whether a running attempt was cancelled."""
        attempt = Attempt(job.number, job.attempt)
        if running := self.scheduler.restart(job):
            self._cancel(attempt)
        return running

    def drain(self) -> None:
        self._draining = True

    def run_in_background(self, work: Coroutine[Any, Any, Any], then: Callable[[Any], None]) -> None:
        """Run ``work`` beside the attempts; `results` calls ``then`` with its result."""
        self._pool.spawn(_Background(then), work)

    async def close(self) -> None:
        await self._pool.close()
        self._record_held()
        while self._spans:
            self._spans.popitem()[1].end()

    def _cancel(self, attempt: Attempt) -> None:
        del self._running[attempt]
        self._pool.cancel(attempt)

    async def _attempt(self, job: Job) -> JSON:
        row = _row_of(job)
        started = time.monotonic()
        # The agent ends the episode in time by itself, and then verifies it.
        limit = None if self._options.timeout is None else with_verdict(self._options.timeout)
        with (
            span("attempt", self._span(job).traceparent, "client") as attempt_span,
            use(CallContext("", traceparent=attempt_span.traceparent).within(limit)),
        ):
            try:
                with time_limit(limit):
                    rollout = _checked(await self._run(row))
            except GymError as error:
                rollout = failed_rollout(row, error)
            except (asyncio.TimeoutError, TimeoutError):
                limit_text = "its deadline" if limit is None else f"{limit:g} s (timeout, and time to verify)"
                rollout = failed_rollout(
                    row, DeadlineExceeded(f"the rollout did not end within {limit_text}")
                )
            except Exception as error:
                kind = type(error).__name__
                if (more := admits("rollout", kind)) is not None:
                    message = "rollout %s failed with an unexpected error%s"
                    logger.exception(message, row["_ng_rollout_id"], more)
                rollout = failed_rollout(row, GymError(f"{kind}: {error}"))
            if attempt_span.recording:
                _describe(attempt_span, row, rollout)
        metadata = {key: row[key] for key in (*METADATA_KEYS, "agent_ref") if key in row}
        # Last: an agent elsewhere may have sent the row back as it got it.
        return public_row({**row, **rollout, **metadata, LATENCY_FIELD: time.monotonic() - started})

    def _span(self, job: Job) -> Span:
        if self._options.tracing is None:
            return OFF
        if (own_span := self._spans.get(job.number)) is None:
            own_span = self._spans[job.number] = span("rollout", None, sampling=self._options.tracing)
        return own_span

    def _end_span(self, job: Job, rollout: JSON | None = None) -> None:
        if (ended := self._spans.pop(job.number, None)) is not None:
            if rollout is not None:
                ended.set({"gym_serve.attempts": job.attempt + 1})
                _describe(ended, job.row, rollout)
            ended.end()


def _describe(attempt_span: Span, row: JSON, rollout: JSON) -> None:
    attempt_span.set({"gym_serve.rollout": row.get("_ng_rollout_id")})
    if is_failure(rollout):
        attempt_span.fail(str(rollout.get("_ng_failure_class")), str(rollout.get("error")))
    else:
        attempt_span.set({"gym_serve.reward": rollout.get("reward")})


def _checked(rollout: Any) -> JSON:
    if not isinstance(rollout, dict):
        raise Unavailable(f"the agent's answer must be a rollout, got {str(rollout)[:200]}")
    if not is_failure(rollout):
        try:
            check_reward(rollout.get("reward"))
        except InvalidRequest as error:
            raise Unavailable(f"the agent's rollout must have a reward: {error.message}") from None
    return rollout


def _failure(rollout: JSON) -> Failure | None:
    ending = ending_of(rollout)
    if not ending.failed:
        return None
    kind = rollout.get("_ng_failure_class")
    record = rollout.get("failure")
    wait = record.get("retry_after") if isinstance(record, dict) else None
    retry_after = min(wait, LONGEST_WAIT) if isinstance(wait, int | float) and wait > 0 else 0.0
    overloaded = kind == Overloaded.code or (ending.retried and retry_after > 0)
    return Failure(ending.retried, kind == Unavailable.code, overloaded, retry_after)


def too_long(
    server: str | None, stage: str | None, detail: str, wait: float, patience: float | None
) -> WaitTooLong:
    """The error of what would have to wait for too long: ``wait`` seconds that the server asked for, 0 if it
    did not say; ``patience`` seconds for which a run waits, None where it asks for a number of times."""
    until = f"until {clock_time(wait)}" if wait else "and does not say until when"
    longest = f"asks {MAX_PROBES} more times" if patience is None else f"waits {patience:g} s"
    setting = "" if patience is None else " (timeout)"
    message = f"{server or 'a server'} takes no calls {until}, and a run {longest} at most{setting}: {detail}"
    return WaitTooLong(message, server=server, stage=stage, retry_after=wait or None)


class _Told(NamedTuple):
    """What a failure says, whoever wrote it."""

    server: str | None = None
    stage: str | None = None
    detail: str = ""


def _told(rollout: JSON) -> _Told:
    record = rollout.get("failure")
    fields: JSON = record if isinstance(record, dict) else {}
    server, stage = (str(fields[key]) if fields.get(key) else None for key in ("server", "stage"))
    return _Told(server, stage, str(fields.get("detail") or rollout.get("error")))


_OWN_VALUE = re.compile(r"\d+|(?<!\w)(['\"`]).*?\1(?!\w)", re.DOTALL)


def _alike(rollout: JSON) -> tuple[str, ...]:
    """What equal failures have in common: numbers and quoted values, such as those of rows, are left out."""
    server, stage, message = _told(rollout)
    detail = _OWN_VALUE.sub("#", message[: 10 * _COMPARED])[:_COMPARED]
    return str(rollout.get("_ng_failure_class")), str(stage), str(server), detail


def _row_of(job: Job) -> JSON:
    return row_of_attempt(unmarked(job.row), job.attempt)

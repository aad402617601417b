"""`CallContext`: what travels with a call besides its body; `time_limit`: how its deadline is kept.

A transport sends the number of seconds left, because the clocks of two machines differ. There are fifteen
limits per rollout, hardly one of which ever expires, and a task (`asyncio.wait_for`) or a timer for each is
dear: limits of `_COARSE_SECONDS` or more that end within the same second share a timer, and may be up to a
second late.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from gym_serve.types.model_endpoint import ModelEndpoint

T = TypeVar("T")

_VERDICT_SECONDS = 330.0
_EARLY_SECONDS = 0.02


def patience(limit: float) -> float:
    """Seconds that a caller waits longer than the server, whose own word on why time ran out comes first."""
    return min(3.0, max(0.5, limit / 4))


def with_verdict(seconds: float) -> float:
    """The seconds of an episode and of its verification, which begins when the episode's are over."""
    return seconds + min(seconds, _VERDICT_SECONDS)


def without_verdict(seconds: float) -> float:
    """The inverse of `with_verdict`: how long an episode may act whose caller waits for ``seconds``."""
    return seconds - min(seconds / 2, _VERDICT_SECONDS)


CALLER: ContextVar[str] = ContextVar("caller", default="")  # process that sent this call; empty within one


class CallContext(msgspec.Struct, frozen=True):
    """The context of one call. (A frozen dataclass takes ten times as long to make: fifteen per rollout.)

    Attributes:
        request_id: names the call in logs and errors on every server it passes.
        deadline: `time.monotonic()` moment after which nobody waits for the answer, or None.
        notes: what the server tells about this call with its reply (`Reply.notes`); whoever answers the call
            adds to it.
        traceparent: the span that this call is a part of (`gym_serve.observe.tracing`), or None.
    """

    request_id: str = msgspec.field(default_factory=lambda: secrets.token_hex(16))
    session: str | None = None
    affinity: str | None = None  # key of the episode; calls with one key go to one model replica or endpoint
    deadline: float | None = None
    endpoint: ModelEndpoint | None = None  # where the policy of the rollout answers; None for the graph's own
    notes: dict[str, Any] = msgspec.field(default_factory=dict)
    traceparent: str | None = None

    def timeout(self, at_most: float | None = None) -> float | None:
        """Seconds left (0.0 when past the deadline), capped by ``at_most``; None for no limit."""
        if self.deadline is None:
            return at_most
        left = max(0.0, self.deadline - time.monotonic())
        return left if at_most is None else min(left, at_most)

    def is_over(self) -> bool:
        """Whether its deadline has passed, or is about to.

        uvloop's timers are some milliseconds early, since they count from when the loop last woke.
        """
        return self.deadline is not None and self.deadline - time.monotonic() < _EARLY_SECONDS

    def within(self, seconds: float | None) -> CallContext:
        """This context with its deadline brought forward to ``seconds`` from now."""
        if seconds is None:
            return self
        moment = time.monotonic() + seconds
        if self.deadline is not None and self.deadline <= moment:
            return self
        return CallContext(
            self.request_id, self.session, self.affinity, moment, self.endpoint, self.notes, self.traceparent
        )


_CURRENT: ContextVar[CallContext | None] = ContextVar("gym_serve_call", default=None)


def current() -> CallContext:
    """The context of the call being served; a fresh one outside of any call."""
    return _CURRENT.get() or CallContext()


def log_fields() -> dict[str, str | None]:
    """What the call being served belongs to, for its log: its rollout, session and request."""
    if (context := _CURRENT.get()) is None:
        return {}
    return {"rollout": context.affinity, "session": context.session, "request": context.request_id}


class use:
    """Makes a context the current one for a ``with`` block. (A generator would cost four times as much.)"""

    __slots__ = ("_context", "_token")

    def __init__(self, context: CallContext) -> None:
        self._context = context

    def __enter__(self) -> CallContext:
        self._token = _CURRENT.set(self._context)
        return self._context

    def __exit__(self, *exc_info: object) -> None:
        _CURRENT.reset(self._token)


@asynccontextmanager
async def closing(items: AsyncIterator[T]) -> AsyncGenerator[AsyncIterator[T], None]:
    """Close an async iterator at the end of the block, so that leaving a stream early ends its work at
    once."""
    try:
        yield items
    finally:
        if (close := getattr(items, "aclose", None)) is not None:
            await close()


async def stream_in(context: CallContext, items: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """The items of an async iterator, each of which is produced in a context and by its deadline.

    The reader keeps its own context: a generator would leave the one that it sets behind at every ``yield``.
    """
    async with closing(items):
        while True:
            token = _CURRENT.set(context)  # without `use` and, mostly, without a limit: this runs per token
            try:
                if context.deadline is None:
                    item = await anext(items)
                else:
                    with time_limit(context.timeout()):
                        item = await anext(items)
            except StopAsyncIteration:
                return
            finally:
                _CURRENT.reset(token)
            yield item


async def wait_until(event: asyncio.Event, timeout: float | None) -> bool:
    """Wait for an event, which is set after ``timeout`` seconds at the latest; returns whether it was before.

    `asyncio.wait_for` loses a cancellation that comes together with the event, before Python 3.12.
    """
    if timeout is None:
        return await event.wait()
    late = False

    def give_up() -> None:
        nonlocal late
        late = not event.is_set()
        event.set()

    timer = asyncio.get_running_loop().call_later(timeout, give_up)
    try:
        await event.wait()
    finally:
        timer.cancel()
    return not late


_COARSE_SECONDS = 5.0

_Task = asyncio.Task[Any]
_cancelling: Callable[[_Task], int]
_cancel: Callable[[_Task], object]
_uncancel: Callable[[_Task], int]
if sys.version_info >= (3, 11):
    _cancelling, _cancel, _uncancel = asyncio.Task.cancelling, asyncio.Task.cancel, asyncio.Task.uncancel
else:  # a task does not know there how often it was cancelled, so at least our own times are counted
    _ends: Counter[_Task] = Counter()
    _cancelling = _ends.__getitem__

    def _cancel(task: _Task) -> None:
        _ends[task] += 1
        task.cancel()

    def _uncancel(task: _Task) -> int:
        left = _ends.pop(task) - 1
        if left:
            _ends[task] = left
        return left


class time_limit:
    """Ends a ``with`` block of a coroutine after ``seconds``, on exit with `asyncio.TimeoutError`."""

    __slots__ = ("_before", "_over", "_second", "_seconds", "_task", "_timer")

    def __init__(self, seconds: float | None) -> None:
        self._seconds = math.inf if seconds is None else seconds
        self._over = False
        self._timer: asyncio.TimerHandle | None = None
        self._second: set[time_limit] | None = None

    def __enter__(self) -> None:
        if self._seconds == math.inf:
            return
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._before = _cancelling(task)  # by others
        if self._seconds < _COARSE_SECONDS:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._end)
        else:
            self._second = _second_in(self._seconds)
            self._second.add(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        elif self._second is not None:
            self._second.discard(self)
        if self._over and _uncancel(self._task) <= self._before and isinstance(error, asyncio.CancelledError):
            raise asyncio.TimeoutError from error

    def _end(self) -> None:
        self._over = True
        _cancel(self._task)


class interruptible:
    """A ``with`` block of a coroutine that another one can end: what follows the block then runs."""

    __slots__ = ("_before", "_over", "_task")

    def __enter__(self) -> interruptible:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._before = _cancelling(task)  # by others
        self._over = False
        return self

    def interrupt(self) -> None:
        if not self._over:
            self._over = True
            _cancel(self._task)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        own = self._over and _uncancel(self._task) <= self._before
        return own and isinstance(error, asyncio.CancelledError)


class _Seconds(threading.local):
    """The limits that end at each second of the monotonic clock, in the loop that runs in this thread."""

    loop: asyncio.AbstractEventLoop | None = None
    ending: dict[int, set[time_limit]]


_seconds = _Seconds()


def _second_in(seconds: float) -> set[time_limit]:
    """What ends at the first full second after so many from now."""
    loop = asyncio.get_running_loop()
    if _seconds.loop is not loop:
        _seconds.loop, _seconds.ending = loop, {}
    now = time.monotonic()
    second = int(now + seconds) + 1
    ending = _seconds.ending
    if (limits := ending.get(second)) is None:
        limits = ending[second] = set()
        loop.call_later(second - now, _end_all, ending, second)
    return limits


def _end_all(ending: dict[int, set[time_limit]], second: int) -> None:
    for limit in ending.pop(second):
        limit._end()

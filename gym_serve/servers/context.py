"""What travels with a call besides its body: request id, session, affinity and time left.

A deadline is a moment on this process's monotonic clock; what crosses a transport is the number of
seconds left, because clocks of two machines differ.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import TypeVar

import msgspec

from gym_serve.servers.deadline import time_limit

__all__ = ["CallContext", "closing", "current", "stream_in", "use"]

T = TypeVar("T")


class CallContext(msgspec.Struct, frozen=True):
    """The context of one call. (A frozen dataclass takes ten times as long to make: fifteen per rollout.)

    Attributes:
        request_id: names the call in logs and errors on every server it passes.
        session: session id that the caller sent, if any.
        affinity: key of the episode; calls with one key go to one model replica or endpoint.
        deadline: `time.monotonic()` moment after which nobody waits for the answer, or None.
    """

    request_id: str = msgspec.field(default_factory=lambda: secrets.token_hex(16))
    session: str | None = None
    affinity: str | None = None
    deadline: float | None = None

    def timeout(self, at_most: float | None = None) -> float | None:
        """Seconds left (0.0 when past the deadline), capped by ``at_most``; None for no limit."""
        if self.deadline is None:
            return at_most
        left = max(0.0, self.deadline - time.monotonic())
        return left if at_most is None else min(left, at_most)

    def within(self, seconds: float | None) -> CallContext:
        """This context with its deadline brought forward to ``seconds`` from now."""
        if seconds is None:
            return self
        moment = time.monotonic() + seconds
        if self.deadline is not None and self.deadline <= moment:
            return self
        return CallContext(self.request_id, self.session, self.affinity, moment)


_CURRENT: ContextVar[CallContext | None] = ContextVar("gym_serve_call", default=None)


def current() -> CallContext:
    """The context of the call being served; a fresh one outside of any call."""
    return _CURRENT.get() or CallContext()


class use:
    """Makes a context the current one for the body of a ``with`` statement.

    A class, as a generator's context manager costs four times as much, and there are ten per rollout.
    """

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
    """Close an async iterator at the end of the block, so that leaving a stream early ends its work at once.

    As `contextlib.aclosing`, but also for iterators that have nothing to close.
    """
    try:
        yield items
    finally:
        if (close := getattr(items, "aclose", None)) is not None:
            await close()


async def stream_in(context: CallContext, items: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """The items of an async iterator, each of which is produced in a context and by its deadline.

    The reader keeps its own context: a generator would leave the one that it sets behind at every ``yield``.

    Raises:
        asyncio.TimeoutError: an item was not there by the deadline.
    """
    async with closing(items):
        while True:
            with use(context), time_limit(context.timeout()):
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    return
            yield item

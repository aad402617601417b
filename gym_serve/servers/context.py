"""What travels with a call besides its body: request id, session, affinity and time left.

A deadline is a moment on this process's monotonic clock; what crosses a transport is the number of
seconds left, because clocks of two machines differ.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar

import msgspec

__all__ = ["CallContext", "Emit", "current", "use"]

Emit = Callable[[bytes], Awaitable[None]]
"""Takes a part of an answer that is being made; waits while whoever reads it is behind."""


class CallContext(msgspec.Struct, frozen=True):
    """The context of one call. (A frozen dataclass takes ten times as long to make: fifteen per rollout.)

    Attributes:
        request_id: names the call in logs and errors on every server it passes.
        session: session id that the caller sent, if any.
        affinity: key of the episode; calls with one key go to one model replica or endpoint.
        deadline: `time.monotonic()` moment after which nobody waits for the answer, or None.
        emit: takes the answer in parts, for a caller that wants a stream; it is not passed on to further
            calls. The reply follows the parts, and is the same as without them.
    """

    request_id: str = msgspec.field(default_factory=lambda: secrets.token_hex(16))
    session: str | None = None
    affinity: str | None = None
    deadline: float | None = None
    emit: Emit | None = None

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
        return CallContext(self.request_id, self.session, self.affinity, moment, self.emit)


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

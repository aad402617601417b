"""`CallObserver`: the one interceptor around the calls of a server.

It gives a call its context and its span, and says of it, once it has ended, what metrics, timeline, access
log and traces have to know.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from gym_serve.observe.catalogue import TIME_TO_FIRST_TOKEN, TokenMeter
from gym_serve.observe.cpu import MEASURED, CallMeter
from gym_serve.observe.logs import ACCESS
from gym_serve.observe.timeline import QUEUED, REPLICA, TTFT, USAGE, microseconds
from gym_serve.observe.tracing import Span, span
from gym_serve.servers.base import Server
from gym_serve.servers.clients import describe_reply
from gym_serve.servers.context import CallContext, use
from gym_serve.servers.transport import Call, Reply

T = TypeVar("T")


class CallObserver:
    """Observes the calls of a server, in a replica or without Ray.

    ``tracing`` is the share of the calls without a trace that begin one; None for none.
    """

    def __init__(
        self, server: Server, known: Callable[[str], str], replica: str | None, tracing: float | None
    ) -> None:
        self.server = server
        self.known = known
        self.logs_calls = ACCESS.isEnabledFor(logging.INFO)
        self.tokens = TokenMeter(server.name) if server.kind == "model" else None
        self._tracing = tracing
        self._meters: dict[str, CallMeter] = {}
        has_place = replica is not None and server.kind != "resources"
        self._notes: dict[str, Any] = {REPLICA: replica} if has_place else {}

    def begin(self, call: Call) -> ObservedCall:
        meter = self._meters.get(call.op)
        if meter is None:
            is_operation = self.known(call.op)  # or what clients make up would fill the memory
            meter = self._meters.setdefault(is_operation, CallMeter(self.server.name, is_operation))
        parent = call.traceparent
        if parent is None and self._tracing is not None and call.session is not None:
            parent = self.server.traceparent(call.session)
        notes = self._notes.copy()
        if call.waited:
            notes[QUEUED] = microseconds(call.waited)
        return ObservedCall(self, call, meter, span(call.op, parent, "server", sampling=self._tracing), notes)


class ObservedCall:
    """A call that runs."""

    __slots__ = ("_call", "_meter", "_observer", "_span", "begun", "context")

    def __init__(
        self, observer: CallObserver, call: Call, meter: CallMeter, span: Span, notes: dict[str, Any]
    ) -> None:
        self.begun = time.monotonic()  # `time.monotonic` moment
        self._observer = observer
        self._call = call
        self._meter = meter
        self._span = span
        self.context = CallContext(
            call.request_id or secrets.token_hex(16),
            call.session,
            call.affinity,
            None if call.timeout is None else self.begun + call.timeout,
            call.endpoint,
            notes,
            span.traceparent,
        )

    def measured(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """The work of the call, with its CPU time counted if it is one of those that are measured."""
        self._meter.left -= 1
        return self._meter.measured(work) if MEASURED or not self._meter.left else work

    def end(self, status: int, reply: Reply | None = None, error: BaseException | None = None) -> None:
        observer, notes = self._observer, self.context.notes
        seconds = time.monotonic() - self.begun
        self._meter.record(status, seconds)
        if observer.logs_calls:
            with use(self.context):  # its records name what the call belongs to
                op, server = observer.known(self._call.op), observer.server.name
                ACCESS.info("%s %s %.4f s", op, status, seconds, extra={"server": server})
        if observer.tokens is not None and TTFT in notes:
            TIME_TO_FIRST_TOKEN.observe(observer.server.name, value=notes[TTFT] / 1e6)
        if self._span.recording and reply is not None:
            self._describe(reply)
        self._span.end(error)

    def streamed(self) -> None:
        """The call has ended as a stream, whose usage only its notes have."""
        if self._observer.tokens is not None:
            self._observer.tokens.record(self.context.notes.get(USAGE))
        self.end(200, Reply(200, b"", self._call.session))

    def _describe(self, reply: Reply) -> None:
        self._span.name(self._observer.known(self._call.op))
        request = self._call.request_id or None
        self._span.set({"gym_serve.request": request, "gym_serve.rollout": self._call.affinity})
        describe_reply(self._span, self._observer.server.name, reply)

"""`ServerRunner` runs one server: it turns a `Call` into a `Reply`, and owns the server's life.

This is the one place where foreign exceptions become typed failures. A Serve replica, an inline transport and
a unit test hold the same `ServerRunner`, which is why they behave alike.

`PULSE` knows when this process was stopped: frozen by a signal, a debugger or the machine below it.

A limit that ends while a process stands still says nothing about what the process ran. A thread that wants to
wake four times a second tells the two apart by the gaps between its turns. It is no task, since a method that
blocks the event loop stops every task, but no thread.
"""

from __future__ import annotations

import asyncio
import difflib
import gc
import logging
import resource
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

from gym_serve.observe.catalogue import BOXES, SESSIONS
from gym_serve.observe.logs import admits, fault
from gym_serve.observe.timeline import OCCUPIED, QUEUED
from gym_serve.servers.base import Operation, Server
from gym_serve.servers.containment import contained
from gym_serve.servers.context import CallContext, closing, stream_in, time_limit, use
from gym_serve.servers.observing import CallObserver
from gym_serve.servers.protocols import PROTOCOLS, finished_stream, without_stream
from gym_serve.servers.sessions import RESTORE
from gym_serve.servers.transport import CALLER_LEFT, Call, Reply
from gym_serve.types.errors import (
    AuthorError,
    BadRequest,
    DeadlineExceeded,
    GymError,
    NotFound,
    Overloaded,
    PolicyDeadline,
    Rejected,
    SessionNotFound,
    Unavailable,
)
from gym_serve.types.exact import exact_json

_EVERY = 0.25  # seconds
_LEAST = 1.0  # seconds; a busy machine lets a thread wait for less
_KEPT = 256  # gaps


class Pulse:
    """Notices the gaps in the life of a process."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._gaps: deque[tuple[float, float]] = deque(maxlen=_KEPT)  # from when to when

    def start(self) -> None:
        """Begin to watch; does nothing the second time."""
        if self._last is None:
            self._last = time.monotonic()
            threading.Thread(target=self._watch, name="gym_serve-pulse", daemon=True).start()

    def stopped_since(self, moment: float) -> float:
        """Seconds since a `time.monotonic` moment in which this process stood still."""
        now = time.monotonic()
        gaps = [*self._gaps]
        if self._last is not None and now - self._last >= _LEAST:  # it has just woken, this thread first
            gaps.append((self._last, now))
        return sum(max(0.0, end - max(begin, moment)) for begin, end in gaps)

    def _watch(self) -> None:
        while True:
            time.sleep(_EVERY)
            last, now = self._last, time.monotonic()
            if last is not None and now - last >= _LEAST:
                self._gaps.append((last, now))
            self._last = now


PULSE = Pulse()  # that of this process


DESCRIBE = "operations.json"  # the operation that every server has

EACH = "each/"  # begins operations of one replica, for the process that runs the graph; not over HTTP
GETS = frozenset({"reverify_mode", "v1/models", DESCRIBE})  # the operations whose HTTP method is GET

_IDLE = 0.1  # share of its time that a tool may wait or stand still, and still have had its chance to end
_OPEN_FILES = 1 << 20

logger = logging.getLogger("gym_serve")


class ServerRunner:
    """Runs ``server``; ``tracing`` is the share of the calls without a trace that begin one, None for
    none."""

    def __init__(self, server: Server, replica: str | None = None, *, tracing: float | None = None) -> None:
        self.server = server
        self._observer = CallObserver(server, self._known, replica, tracing)
        self.operations = server.operations()

    async def start(self) -> None:
        PULSE.start()
        await self.server.start()
        describe = Operation(self.describe, "The operations of this server", None, {"type": "object"}, "GET")
        self.operations = {**self.server.operations(), DESCRIBE: describe}

    async def stop(self) -> None:
        await self.server.stop()

    def observe(self) -> None:
        sessions = self.server.live_sessions
        if sessions or self.server.kind == "resources":
            SESSIONS.set(self.server.name, value=sessions)
        else:  # a model has some only while a harness is recorded
            SESSIONS.remove(self.server.name)
        for state, count in (self.server.boxes or {}).items():
            BOXES.set(self.server.name, state, value=count)
        self.server.observe()

    async def dispatch(self, call: Call) -> Reply:
        """Run a call within its time limit. Failures are in the reply; only cancellation is raised."""
        observed = self._observer.begin(call)
        context = observed.context
        with use(context):  # also for the log: its records name what the call belongs to
            try:
                with time_limit(call.timeout):
                    reply = await observed.measured(self._answer(call))
            except (asyncio.TimeoutError, TimeoutError):
                reply = Reply.failed(self._too_late(call, observed.begun, context), call.session)
            except BaseException as error:
                observed.end(CALLER_LEFT, error=error)
                raise
        observed.end(reply.status, reply)
        if context.notes and reply.notes is not context.notes:
            # Not `_replace`, which costs a microsecond more.
            return Reply(reply.status, reply.body, reply.session, reply.state, context.notes)
        return reply

    async def stream(self, call: Call) -> AsyncGenerator[bytes, None]:
        """Run a call and yield its answer as server-sent events; see `Transport.stream`.

        An operation without a stream answers whole, in one chunk.
        """
        observed = self._observer.begin(call)
        try:
            async with closing(stream_in(observed.context, self._events(call))) as events:
                async for chunk in events:
                    yield chunk
        except GymError as error:
            failure = error
        except (asyncio.TimeoutError, TimeoutError):
            with use(observed.context):
                failure = self._too_late(call, observed.begun, observed.context)
        except BaseException as error:
            observed.end(CALLER_LEFT, error=error)
            raise
        else:
            observed.streamed()
            return
        observed.end(failure.status, error=failure)
        raise failure

    async def describe(self, body: Any) -> Any:
        return {
            op: {key: getattr(operation, key) for key in ("summary", "method", "request", "response")}
            for op, operation in self.operations.items()
            if op not in (DESCRIBE, RESTORE) and not op.startswith(EACH)
        }

    async def _answer(self, call: Call) -> Reply:
        try:
            if call.endpoint is not None:
                self.server.check_endpoint(call.endpoint)
            result = await contained(self._operation(call.op).handler(_body_of(call)))
            if self._observer.tokens is not None and isinstance(result, dict) and "usage" in result:
                self._observer.tokens.record(result["usage"])
            return result if isinstance(result, Reply) else Reply.of(result, call.session)
        except Exception as error:
            return Reply.failed(self._failure(call, error), call.session)

    async def _events(self, call: Call) -> AsyncGenerator[bytes, None]:
        try:
            if call.endpoint is not None:
                self.server.check_endpoint(call.endpoint)
            operation, body = self._operation(call.op), _body_of(call)
            if operation.stream is not None:
                async with closing(operation.stream(body)) as events:
                    async for event in events:
                        yield event
            elif call.op in PROTOCOLS:
                yield finished_stream(call.op, body, await operation.handler(without_stream(body)))
            else:
                raise BadRequest(f"{call.op} of {self.server.name} has no stream")
        except Exception as error:
            if (failure := self._failure(call, error)) is error:
                raise
            raise failure from error

    def _known(self, op: str) -> str:
        """An operation; ``unknown`` where the server has none of that name, which a client made up."""
        if op in self.operations:
            return op
        return "tools/unknown" if op.startswith("tools/") else "unknown"

    def _operation(self, op: str) -> Operation:
        operation = self.operations.get(op) or self.server.operation(op)
        if operation is None:
            raise NotFound(self._unknown(op))
        return operation

    def _failure(self, call: Call, error: Exception) -> GymError:
        if isinstance(error, GymError):
            error.server = error.server or self.server.name
            self._log(call, error)
            return error
        if (failure := self.server.failure(call.op, error)) is not None:
            return failure
        name, kind = self.server.name, type(error).__name__
        if (more := admits(name, self._known(call.op), kind)) is not None:
            logger.error("%s of %s failed%s", call.op, name, more, exc_info=error, extra={"server": name})
        message = f"{call.op} failed in {name}: {kind}: {error}"
        return Unavailable(message, server=self.server.name)

    def _too_late(self, call: Call, begun: float, context: CallContext) -> GymError:
        """The failure of a call whose time is over: the policy's, if its tool ran nearly all that time here.

        A tool that waited for a thread, or stood still with this process, had no chance to end. A verifier
        that waits for a tool of its own session does so because of what the policy called.
        """
        limit = call.timeout or 0.0
        message = f"{call.op} of {self.server.name} took longer than {limit:.3g} s"
        stopped = PULSE.stopped_since(begun)
        waited = context.notes.get(QUEUED, 0) / 1e6 - call.waited
        failure: GymError
        is_tool = call.op == "step" or call.op.startswith("tools/")
        if is_tool and stopped + waited <= limit * _IDLE:
            message += "; it was still running"
            failure = PolicyDeadline(message, server=self.server.name, stage="tool")
        elif call.op == "verify" and context.notes.pop(OCCUPIED, 0.0) - stopped >= limit * (1 - _IDLE):
            message += ", in which a tool that the policy called still ran in the session"
            failure = PolicyDeadline(message, server=self.server.name, stage="verify")
        else:
            failure = DeadlineExceeded(message, server=self.server.name)
        self._log(call, failure)
        return failure

    def _log(self, call: Call, error: GymError) -> None:
        """Log a failure, unless the caller or the policy caused it, or an author, who is logged already."""
        silent = isinstance(error, Rejected | AuthorError | PolicyDeadline)
        if silent and not isinstance(error, SessionNotFound):
            return
        level = logging.INFO if isinstance(error, Overloaded) else logging.WARNING
        op = self._known(call.op)
        fault(self.server.name, f"{op} {error.code}", f"{op} failed: {error.code}: {error.message}", level)

    def _unknown(self, op: str) -> str:
        prefix = "tools/" if op.startswith("tools/") else ""
        names = [o.removeprefix(prefix) for o in self.operations if o.startswith("tools/") == bool(prefix)]
        shown = op.removeprefix(prefix)[:100]
        near = difflib.get_close_matches(shown, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(sorted(names)) or 'none'}"
        return f"{self.server.name} has no {'tool' if prefix else 'operation'} {shown!r}{hint}"


def tune_process() -> None:
    """Prepare a process of gym_serve's own (a replica, the command line) for thousands of rollouts in flight.

    The garbage collector runs less often, and never on what is loaded now: it took an eighth of an agent's
    CPU time. And files may be open up to the hard limit, since each model call is a connection.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _body_of(call: Call) -> Any:
    try:
        return exact_json(call.body) if call.body else {}
    except ValueError as error:
        raise BadRequest(f"the body of {call.op} must be JSON: {error}") from None

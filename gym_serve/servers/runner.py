"""`ServerRunner` runs one server: it turns a `Call` into a `Reply`, and owns the server's life.

This is the one place where foreign exceptions become typed failures. A Serve replica, an inline
transport and a unit test hold the same `ServerRunner`, which is why they behave alike.
"""

from __future__ import annotations

import asyncio
import difflib
import gc
import logging
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

from gym_serve.observe.catalogue import record_call
from gym_serve.servers.base import Operation, Server
from gym_serve.servers.context import CallContext, closing, current, stream_in, time_limit, use
from gym_serve.servers.protocols import PROTOCOLS, finished_stream, without_stream
from gym_serve.servers.sessions import RESTORE
from gym_serve.servers.transport import Call, Reply
from gym_serve.types.errors import BadRequest, DeadlineExceeded, GymError, NotFound, Unavailable
from gym_serve.types.exact import any_json, exact_json

__all__ = ["DESCRIBE", "GETS", "ServerRunner", "relax_garbage_collection"]

DESCRIBE = "operations.json"
"""The operation that every server has."""

GETS = frozenset({"reverify_mode", "v1/models", DESCRIBE})
"""The operations of docs/formats.md whose HTTP method is GET; that of any other is POST."""

logger = logging.getLogger("gym_serve")


class ServerRunner:
    """Runs ``server``.

    Args:
        server: the server; the runner starts and stops it.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.operations = server.operations()

    async def start(self) -> None:
        """Start the server; its operations may change by that."""
        await self.server.start()
        self.operations = self._operations()

    async def stop(self) -> None:
        """Stop the server."""
        await self.server.stop()

    async def dispatch(self, call: Call) -> Reply:
        """Run a call within its time limit. Failures are in the reply; only cancellation is raised."""
        begun = time.monotonic()
        try:
            with use(_context_of(call)), time_limit(call.timeout):
                reply = await self._answer(call)
        except (asyncio.TimeoutError, TimeoutError):
            reply = Reply.failed(self._too_late(call), call.session)
        self._record(call, reply.status, begun)
        return reply

    async def stream(self, call: Call) -> AsyncGenerator[bytes, None]:
        """Run a call and yield its answer as server-sent events; see `Transport.stream`.

        An operation without a stream answers whole, in one chunk.

        Raises:
            GymError: the call failed, possibly after the first event.
        """
        begun = time.monotonic()
        failure: GymError
        try:
            async with closing(stream_in(_context_of(call), self._events(call))) as events:
                async for chunk in events:
                    yield chunk
            self._record(call, 200, begun)
            return
        except (asyncio.TimeoutError, TimeoutError):
            failure = self._too_late(call)
        except GymError as error:
            failure = error
        self._record(call, failure.status, begun)
        raise failure

    async def describe(self, body: Any) -> Any:
        """The operations with their schemas, for the API documentation."""
        return {
            op: {
                "summary": operation.summary,
                "method": operation.method,
                "request": operation.request,
                "response": operation.response,
            }
            for op, operation in self.operations.items()
            if op not in (DESCRIBE, RESTORE)
        }

    def _operations(self) -> dict[str, Operation]:
        describe = Operation(self.describe, "The operations of this server", None, {"type": "object"}, "GET")
        return {**self.server.operations(), DESCRIBE: describe}

    async def _answer(self, call: Call) -> Reply:
        try:
            result = await self._operation(call.op).handler(_body_of(call))
            return result if isinstance(result, Reply) else Reply.of(result, call.session)
        except Exception as error:
            return Reply.failed(self._failure(call, error), call.session)

    async def _events(self, call: Call) -> AsyncGenerator[bytes, None]:
        try:
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

    def _record(self, call: Call, status: int, begun: float) -> None:
        op = call.op if call.op in self.operations else "unknown"
        record_call(self.server.name, op, status, time.monotonic() - begun)

    def _operation(self, op: str) -> Operation:
        operation = self.operations.get(op) or self.server.operation(op)
        if operation is None:
            raise NotFound(self._unknown(op))
        return operation

    def _failure(self, call: Call, error: Exception) -> GymError:
        if isinstance(error, GymError):
            error.server = error.server or self.server.name
            return error
        logger.error("%s of %s failed [%s]", call.op, self.server.name, current().request_id, exc_info=error)
        message = f"{call.op} failed in {self.server.name}: {type(error).__name__}: {error}"
        return Unavailable(message, server=self.server.name)

    def _too_late(self, call: Call) -> DeadlineExceeded:
        message = f"{call.op} of {self.server.name} took longer than {call.timeout:.3g} s"
        return DeadlineExceeded(message, server=self.server.name)

    def _unknown(self, op: str) -> str:
        prefix = "tools/" if op.startswith("tools/") else ""
        names = [o.removeprefix(prefix) for o in self.operations if o.startswith("tools/") == bool(prefix)]
        shown = op.removeprefix(prefix)[:100]
        near = difflib.get_close_matches(shown, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(sorted(names)) or 'none'}"
        return f"{self.server.name} has no {'tool' if prefix else 'operation'} {shown!r}{hint}"


def relax_garbage_collection() -> None:
    """Run the garbage collector less often, and never on what is loaded now, such as modules.

    With Python's default thresholds, (700, 10, 10), it scans the objects of all rollouts in flight again and
    again, which took an eighth of an agent's CPU time. Only for processes of gym_serve's own (replicas, the
    command line): in a trainer's process, the trainer decides.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def _context_of(call: Call) -> CallContext:
    return CallContext(
        request_id=call.request_id or secrets.token_hex(16),
        session=call.session,
        affinity=call.affinity,
        deadline=None if call.timeout is None else time.monotonic() + call.timeout,
    )


def _body_of(call: Call) -> Any:
    read = exact_json if call.op.startswith("tools/") else any_json
    try:
        return read(call.body) if call.body else {}
    except ValueError as error:
        raise BadRequest(f"the body of {call.op} must be JSON: {error}") from None

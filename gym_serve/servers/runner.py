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
from typing import Any

from gym_serve.observe.catalogue import record_call
from gym_serve.servers.base import Operation, Server
from gym_serve.servers.context import CallContext, current, use
from gym_serve.servers.deadline import time_limit
from gym_serve.servers.snapshots import RESTORE
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
        server: the server; the host starts and stops it.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.operations = server.operations()

    async def start(self) -> None:
        """Start the server; its operations may depend on what it found."""
        await self.server.start()
        self.operations = self._operations()

    async def stop(self) -> None:
        """Stop the server."""
        await self.server.stop()

    async def dispatch(self, call: Call) -> Reply:
        """Run a call within its time. Failures are in the reply: only cancellation is raised."""
        context = CallContext(
            request_id=call.request_id or secrets.token_hex(16),
            session=call.session,
            affinity=call.affinity,
            deadline=None if call.timeout is None else time.monotonic() + call.timeout,
            emit=call.emit,
        )
        begun = time.monotonic()
        try:
            with use(context), time_limit(call.timeout):
                reply = await self._answer(call)
        except (asyncio.TimeoutError, TimeoutError):
            message = f"{call.op} of {self.server.name} took over {call.timeout:.3g} s"
            reply = Reply.failed(DeadlineExceeded(message, server=self.server.name), call.session)
        op = call.op if call.op in self.operations else "unknown"
        record_call(self.server.name, op, reply.status, time.monotonic() - begun)
        return reply

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
            operation = self.operations.get(call.op) or self.server.operation(call.op)
            if operation is None:
                raise NotFound(self._unknown(call.op))
            result = await operation.handler(_body_of(call))
            return result if isinstance(result, Reply) else Reply.of(result, call.session)
        except GymError as error:
            error.server = error.server or self.server.name
            return Reply.failed(error, call.session)
        except Exception as error:
            logger.exception("%s of %s failed [%s]", call.op, self.server.name, current().request_id)
            message = f"{call.op} failed in {self.server.name}: {type(error).__name__}: {error}"
            return Reply.failed(Unavailable(message, server=self.server.name), call.session)

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


def _body_of(call: Call) -> Any:
    read = exact_json if call.op.startswith("tools/") else any_json
    try:
        return read(call.body) if call.body else {}
    except ValueError as error:
        raise BadRequest(f"the body of {call.op} is no JSON: {error}") from None

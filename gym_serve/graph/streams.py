"""A call whose answer goes to an HTTP client while it is made.

The first part decides: a call that fails before it has an answer like any other, with its status. One that
fails later ends in the error event of its protocol. A client that goes away cancels the call, down to the
backend.
At most `_BEHIND` parts wait for a slow client; then the model's stream waits as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gym_serve.graph.wire import STREAM_HEADERS
from gym_serve.servers.transport import Call, Reply, Transport
from gym_serve.types.errors import GymError
from gym_serve.types.protocols import chat_sse, error_message, responses_sse

__all__ = ["open_stream"]

_BEHIND = 64


async def open_stream(transport: Transport, call: Call) -> StreamingResponse | Reply:
    """The answer of a call, or its reply where no part came before that.

    Raises:
        GymError: the transport could not deliver the call.
    """
    parts: asyncio.Queue[bytes | Reply | GymError] = asyncio.Queue(_BEHIND)
    task = asyncio.create_task(_run(transport, call._replace(emit=parts.put), parts))
    try:
        first = await parts.get()
    except BaseException:
        task.cancel()
        raise
    if isinstance(first, GymError):
        raise first
    return first if isinstance(first, Reply) else _Stream(call.op, first, parts, task)


async def _run(transport: Transport, call: Call, parts: asyncio.Queue[bytes | Reply | GymError]) -> None:
    try:
        end: Reply | GymError = await transport.call(call)
    except GymError as error:
        end = error
    except Exception as error:
        end = GymError(f"the stream of {call.op} failed: {type(error).__name__}: {error}")
    await parts.put(end)


class _Stream(StreamingResponse):
    def __init__(
        self, op: str, first: bytes, parts: asyncio.Queue[bytes | Reply | GymError], task: asyncio.Task[None]
    ) -> None:
        super().__init__(self._events(), media_type="text/event-stream", headers=STREAM_HEADERS)
        self._op = op
        self._first = first
        self._parts = parts
        self._task = task

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._task.cancel()

    async def _events(self) -> AsyncIterator[bytes]:
        item: bytes | Reply | GymError = self._first
        while isinstance(item, bytes):
            ready = [item]  # what came while the client read the last ones leaves together
            while not self._parts.empty() and isinstance(item := self._parts.get_nowait(), bytes):
                ready.append(item)
            yield b"".join(ready)
            if isinstance(item, bytes):
                item = await self._parts.get()
        error = _error_of(item)
        if error is not None:
            yield _failed(self._op, error)


def _error_of(end: Reply | GymError) -> GymError | None:
    if isinstance(end, GymError):
        return end
    if end.status < 400:
        return None
    try:
        end.json()
    except GymError as error:
        return error
    return None


def _failed(op: str, error: GymError) -> bytes:
    """The event that ends a stream in a failure, as the protocol of ``op`` has it."""
    body = error.to_body()
    if op.endswith("v1/messages"):
        return b"".join(responses_sse([error_message(error.status, body["error"])]))
    if op.endswith("v1/responses"):
        event = {"type": "error", "code": error.code, "message": error.message, "param": None}
        return b"".join(responses_sse([event]))
    return next(chat_sse([body]))

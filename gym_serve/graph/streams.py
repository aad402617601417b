"""A call whose answer an HTTP client reads while the server produces it.

The first event decides: a call that fails before it is answered like any other, with its status. One that
fails later ends in the error event of its protocol. A client that goes away cancels the call, down to the
model's backend, and one that reads slowly makes the model wait.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gym_serve.graph.wire import STREAM_HEADERS
from gym_serve.servers.protocols import error_event
from gym_serve.servers.transport import Call, Transport
from gym_serve.types.errors import GymError

__all__ = ["open_stream"]


async def open_stream(transport: Transport, call: Call) -> StreamingResponse:
    """The answer of a call as a stream of server-sent events.

    Raises:
        GymError: the call failed before its first event.
    """
    events = transport.stream(call)
    try:
        first = await anext(events, b"")
    except BaseException:
        await events.aclose()
        raise
    return _Stream(call.op, first, events)


class _Stream(StreamingResponse):
    def __init__(self, op: str, first: bytes, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(self._chunks(), media_type="text/event-stream", headers=STREAM_HEADERS)
        self._op = op
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        yield self._first
        try:
            async for chunk in self._events:
                yield chunk
        except GymError as error:
            yield error_event(self._op, error)
        except Exception as error:
            failure = GymError(f"the stream of {self._op} failed: {type(error).__name__}: {error}")
            yield error_event(self._op, failure)

"""`InProcess`: calls of an ASGI application in this process, without a socket.

A cancelled call is to the application what a client is that hung up: vLLM then stops generating. (httpx's
ASGI transport only drops the call, which vLLM's own task does not notice.)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson

from gym_serve.deployments.chat_streams import Whole, is_event_stream, read_events
from gym_serve.deployments.upstream import without_limit
from gym_serve.servers.context import closing
from gym_serve.servers.transport import encode
from gym_serve.types.errors import Unavailable
from gym_serve.types.protocols import refusal, says_full


class InProcess:
    """A client of an application."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._running: set[asyncio.Task[None]] = set()

    async def post(self, path: str, body: Any) -> Any:
        """The decoded answer of a path; None if the prompt does not fit the context. Raises GymError: its
        failure.
        """
        async with self._exchange(path, body) as exchange:
            content = b"".join([chunk async for chunk in exchange.body()])
        answer = _answer(path, exchange, content)
        if answer is None and (unlimited := without_limit(body)) is not None:
            return await self.post(path, unlimited)
        return answer

    async def stream(self, path: str, body: Any) -> AsyncGenerator[Any, None]:
        """The decoded events of the answer; one `Whole` if it is no stream. Raises as `post`."""
        content: bytes | None = None
        async with self._exchange(path, body) as exchange:
            if is_event_stream(exchange.headers):
                async with closing(read_events(path, exchange.body())) as events:
                    async for event in events:
                        if not says_full(f"vLLM's {path}", event):
                            yield event
                            continue
                        yield Whole(None)
                        return
            else:
                content = b"".join([chunk async for chunk in exchange.body()])
        if content is None:
            return
        answer = _answer(path, exchange, content)
        if answer is None and (unlimited := without_limit(body)) is not None:
            async with closing(self.stream(path, unlimited)) as events:
                async for event in events:
                    yield event
        else:
            yield Whole(answer)

    @asynccontextmanager
    async def _exchange(self, path: str, body: Any) -> AsyncGenerator[_Exchange, None]:
        exchange = _Exchange(encode(body))
        task = asyncio.create_task(self._app(_scope(path), exchange.receive, exchange.send))
        self._running.add(task)  # the loop itself holds no reference
        task.add_done_callback(self._ended)
        task.add_done_callback(exchange.ended)
        try:
            await exchange.begun.wait()
            yield exchange
        finally:
            exchange.gone.set()
        if error := task.exception():
            raise Unavailable(f"the engine failed: {type(error).__name__}: {error}") from error

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # of a cancelled call: nobody else asks for it


class _Exchange:
    """One request and its answer. What waits here to be read is one answer at most."""

    def __init__(self, body: bytes) -> None:
        self._request: bytes | None = body
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.begun, self.gone = asyncio.Event(), asyncio.Event()
        self.status = 500
        self.headers: dict[str, str] = {}

    async def receive(self) -> dict[str, Any]:
        body, self._request = self._request, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            pairs = message.get("headers", ())
            self.headers = {name.decode("latin-1").title(): value.decode("latin-1") for name, value in pairs}
            self.begun.set()
        elif message["type"] == "http.response.body":
            self._chunks.put_nowait(message.get("body", b""))

    def ended(self, task: asyncio.Task[None]) -> None:
        self._chunks.put_nowait(None)
        self.begun.set()

    async def body(self) -> AsyncIterator[bytes]:
        while (chunk := await self._chunks.get()) is not None:
            yield chunk


def _answer(path: str, exchange: _Exchange, content: bytes) -> Any:
    """What was answered; None if the prompt does not fit. Errors are read as those of a vLLM elsewhere."""
    if exchange.status < 400:
        body = _decoded(content)
        return None if says_full(f"vLLM's {path}", body) else body
    refused = refusal(f"vLLM's {path}", exchange.status, exchange.headers, content.decode("utf-8", "replace"))
    if refused is not None:
        raise refused
    return None


def _scope(path: str) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"in-process"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 0),
        "server": ("in-process", None),
    }


def _decoded(content: bytes) -> Any:
    try:
        return orjson.loads(content) if content else None
    except orjson.JSONDecodeError:
        return content.decode("utf-8", "replace")

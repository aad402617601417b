"""`McpConnection`: a connection to an MCP server and its process; `McpSession`: that of one episode.

The MCP client must be closed by the task that opened it, so a task of the connection does both. A lost
connection stays lost. The client refuses a whole list of tools for one invalid entry, so such entries are
taken out of the messages before it reads them (`usable_tools`).
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx2
from mcp import Client, MCPError
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT, CallToolResult, Tool
from pydantic import ValidationError

from gym_serve.types.errors import ToolFailed, Unavailable
from gym_serve.types.requests import JSON, problems_of

OpenClient = Callable[[], AbstractAsyncContextManager[Client]]
"""Connects to a server, and ends that when its block ends."""

_CONNECT_SECONDS, _READ_SECONDS = 30.0, 300.0
_MAX_PAGES = 100

logger = logging.getLogger(__name__)


def by_process(server: StdioServerParameters) -> OpenClient:
    """A connection with a process of its own, which ends with it."""
    # The library's default is the stderr that was there when it was imported, which may be closed by now.
    return lambda: Client(_checked(stdio_client(server, errlog=sys.stderr)))


def by_http(url: str, headers: dict[str, str]) -> OpenClient:
    """A connection to a URL (streamable HTTP)."""

    @asynccontextmanager
    async def open_client() -> AsyncIterator[Client]:
        timeout = httpx2.Timeout(_CONNECT_SECONDS, read=_READ_SECONDS)
        async with (
            httpx2.AsyncClient(headers=headers, timeout=timeout) as http,
            Client(_checked(streamable_http_client(url, http_client=http))) as client,
        ):
            yield client

    return open_client


def usable_tools(tools: list[Any]) -> list[Any]:
    """The entries of a ``tools/list`` that are valid, with their valid schemas of results; the others are
    left out, with a warning.
    """
    usable = []
    for entry in tools:
        tool = dict(entry) if isinstance(entry, dict) else {}
        output = tool.get("outputSchema")
        if "outputSchema" in tool and not (isinstance(output, dict) and output.get("type") == "object"):
            del tool["outputSchema"]
        schema = tool.get("inputSchema")
        try:
            if not isinstance(schema, dict) or schema.get("type") != "object":
                raise ValueError("its inputSchema has to have the type 'object'")
            if not isinstance(schema.get("properties"), dict | None):
                raise ValueError("the properties of its inputSchema have to be an object")
            Tool.model_validate(tool)
        except ValueError as error:
            if isinstance(error, ValidationError):
                error = ValueError("; ".join(problems_of(error, "tool")[:3]))
            logger.warning("the tool %.100r of an MCP server is left out: %s", tool.get("name"), error)
        else:
            usable.append(tool)
    return usable


class _CheckedStream:
    """The messages of a server, without the tools that are invalid, and with the content of every result."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def __aenter__(self) -> _CheckedStream:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> Any:
        return await self._stream.__aexit__(*error)

    def __aiter__(self) -> _CheckedStream:
        return self

    async def __anext__(self) -> Any:
        return _usable(await self._stream.__anext__())

    async def receive(self) -> Any:
        return _usable(await self._stream.receive())


def _usable(item: Any) -> Any:
    result = getattr(getattr(item, "message", None), "result", None)
    if isinstance(result, dict) and isinstance(result.get("tools"), list):
        result["tools"] = usable_tools(result["tools"])
    if isinstance(result, dict) and "structuredContent" in result:
        result.setdefault("content", [])
    return item


@asynccontextmanager
async def _checked(transport: AbstractAsyncContextManager[Any]) -> AsyncIterator[Any]:
    async with transport as (messages, *others):
        yield _CheckedStream(messages), *others


class McpConnection:
    """A connection to ``server``, from `start` to `stop`."""

    def __init__(self, open_client: OpenClient, server: str) -> None:
        self._open_client = open_client
        self._server = server
        self._end = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._client: Client | None = None
        self.lost = False

    async def start(self, timeout: float) -> None:
        """Connect, and agree on a version of the protocol. Raises Unavailable: no MCP server answers within
        ``timeout`` seconds.
        """
        ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live(ready))
        try:
            self._client = await asyncio.wait_for(ready, timeout)
        except BaseException as error:
            self._task.cancel()
            await asyncio.wait([self._task])
            if isinstance(error, asyncio.TimeoutError):
                raise Unavailable(f"{self._server} did not answer within {timeout:.3g} s") from None
            raise

    async def stop(self) -> None:
        self._end.set()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def tools(self) -> list[Tool]:
        assert self._client is not None  # started
        tools: list[Tool] = []
        cursor: str | None = None
        try:
            for _ in range(_MAX_PAGES):
                page = await self._client.list_tools(cursor=cursor)
                tools += page.tools
                cursor = page.next_cursor
                if cursor is None:
                    return tools
        except (MCPError, ValueError, RuntimeError) as error:
            raise Unavailable(f"{self._server} did not list its tools: {error}") from error
        raise Unavailable(f"{self._server} lists more than {_MAX_PAGES} pages of tools")

    async def call(self, name: str, arguments: JSON, timeout: float) -> CallToolResult:
        """The result of a tool, an error of the tool's own included. Raises ToolFailed: the server refuses
        the call, does not answer within ``timeout`` seconds, or is gone.
        """
        if self._client is None or self.lost:
            raise ToolFailed(f"the connection to {self._server} is lost")
        try:
            return await self._client.call_tool(name, arguments, read_timeout_seconds=timeout)
        except MCPError as error:
            if error.code == REQUEST_TIMEOUT:
                raise ToolFailed(f"{name} took over {timeout:.3g} s") from None
            if error.code == CONNECTION_CLOSED:
                self.lost = True
                message = f"{self._server} ended; the next call starts a new one, without the old one's state"
                raise ToolFailed(message) from None
            raise ToolFailed(f"{name}: {error.message}") from None
        except (ValueError, RuntimeError) as error:  # not what the protocol or the schema says
            raise ToolFailed(f"{name} gave an invalid answer: {error}") from error

    async def _live(self, ready: asyncio.Future[Client]) -> None:
        try:
            async with self._open_client() as client:
                if not ready.done():
                    ready.set_result(client)
                await self._end.wait()
        except Exception as error:  # of the server's start, or of its end
            cause = _first(error)
            what = f"{type(cause).__name__}: {cause}"
            if ready.done():
                logger.warning("the connection to %s ended: %s", self._server, what)
            else:
                ready.set_exception(Unavailable(f"cannot connect to {self._server}: {what}"))
        finally:
            self.lost = True
            ready.cancel()


def _first(error: BaseException) -> BaseException:
    while inner := getattr(error, "exceptions", None):
        error = inner[0]
    return error


class McpSession:
    """A connection that is opened when needed; a subclass may hold more state."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._connection: McpConnection | None = None

    async def connected(self, connect: Callable[[], McpConnection], timeout: float) -> McpConnection:
        """The open connection, else one by ``connect``. Raises Unavailable: the server cannot be started or
        reached.
        """
        async with self._lock:
            if self._connection is not None and self._connection.lost:
                await self._close()
            if self._connection is None:
                connection = connect()
                await connection.start(timeout)
                self._connection = connection
            return self._connection

    async def close(self) -> None:
        async with self._lock:
            await self._close()

    async def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.stop()

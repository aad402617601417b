"""`AsgiApp`: NeMo Gym's web applications in this process, without a port; `McpTools`: their MCP tools.

An exception of the application reaches the caller unchanged. Start and end run in one task of their own,
because what a lifespan opens must be closed by the task that opened it. NeMo Gym's `MCPResourcesServer`
answers each JSON-RPC message with JSON, and a header names the session, so no MCP client is needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

import httpx
import orjson

from gym_serve.servers.tools import ToolDescription, is_tool_name
from gym_serve.servers.transport import encode
from gym_serve.types.errors import GraphError, ToolFailed
from gym_serve.types.requests import JSON

_BASE = "http://in-process"


class Answer(NamedTuple):
    """An application's answer."""

    status: int
    body: bytes


class AsgiApp:
    """A Starlette or FastAPI application."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self._transport = httpx.ASGITransport(app)
        self._end = asyncio.Event()
        self._life: asyncio.Task[None] | None = None

    async def start(self) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live(ready))
        await ready

    async def stop(self) -> None:
        self._end.set()
        if self._life is not None:
            await self._life

    async def post(
        self, path: str, body: Any, cookies: httpx.Cookies, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """A POST request with a JSON body to an escaped path; ``cookies`` receives those of the answer.
        Raises Exception: whatever the application does not catch.
        """
        headers = {**(headers or {}), "content-type": "application/json"}
        request = httpx.Request("POST", f"{_BASE}{path}", content=encode(body), headers=headers)
        cookies.set_cookie_header(request)
        response = await self._transport.handle_async_request(request)
        response.request = request
        content = await response.aread()
        cookies.extract_cookies(response)
        return Answer(response.status_code, content)

    async def _live(self, ready: asyncio.Future[None]) -> None:
        try:
            async with self.app.router.lifespan_context(self.app):
                ready.set_result(None)
                await self._end.wait()
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)


_ACCEPT = {"accept": "application/json, text/event-stream"}  # MCP asks for both, whatever is answered


class McpTools:
    """The tools that a server's application offers by MCP, at ``path``."""

    def __init__(self, app: AsgiApp, path: str) -> None:
        self._app = app
        self._path = path

    async def tools(self) -> list[JSON]:
        """All tools, as a row has them (OpenAI's function tools). Raises GraphError: the server does not tell
        them, or one has a name that cannot be a route's.
        """
        tools: list[JSON] = []
        cursor: JSON = {}
        while True:
            answer = await self._ask("tools/list", cursor, {})
            result = answer.get("result")
            if not isinstance(result, dict):
                raise GraphError(f"server: it did not list its tools over MCP: {_message(answer)}")
            tools += [
                ToolDescription(
                    tool["name"], tool.get("description") or "", tool.get("inputSchema") or {"type": "object"}
                ).openai()
                for tool in result["tools"]
            ]
            if not result.get("nextCursor"):
                break
            cursor = {"cursor": result["nextCursor"]}
        odd = [tool["name"] for tool in tools if not is_tool_name(tool["name"])]
        if odd:
            raise GraphError(f"server: MCP tools have invalid names: {', '.join(map(repr, odd))}")
        return tools

    async def call(self, name: str, arguments: Any, headers: dict[str, str]) -> str:
        """The text of a tool's answer; ``headers`` name the session, see `session_headers`. Raises
        ToolFailed: it failed or refused its arguments.
        """
        answer = await self._ask("tools/call", {"name": name, "arguments": arguments}, headers)
        result = answer.get("result")
        if not isinstance(result, dict):
            raise ToolFailed(_message(answer))
        parts = result.get("content") or ()
        text = "\n".join(p["text"] if isinstance(p.get("text"), str) else f"[{p.get('type')}]" for p in parts)
        if result.get("isError"):
            raise ToolFailed(text or f"{name} failed")
        return text

    async def _ask(self, method: str, params: JSON, headers: dict[str, str]) -> JSON:
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        answer = await self._app.post(self._path, body, httpx.Cookies(), {**_ACCEPT, **headers})
        try:
            decoded = orjson.loads(answer.body)
        except orjson.JSONDecodeError:
            decoded = None
        return decoded if isinstance(decoded, dict) else {"error": {"message": repr(answer.body[:500])}}


def session_headers(seeded: Any) -> dict[str, str]:
    """The headers that name the session, as ``/seed_session`` answered them; none without MCP."""
    mcp = seeded.get("mcp") if isinstance(seeded, dict) else None
    headers = mcp.get("headers") if isinstance(mcp, dict) else None
    return {str(name): str(value) for name, value in headers.items()} if isinstance(headers, dict) else {}


def _message(answer: JSON) -> str:
    error = answer.get("error")
    return str(error.get("message") if isinstance(error, dict) else answer)[:1000]

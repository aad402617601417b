"""An environment as an MCP server: its tools by streamable HTTP, at ``/{server}/mcp`` of the gateway.

Nothing is kept between requests, so any replica of the gateway answers any of them. Only the session with
the environment lasts. A client names it in ``X-Session-Id`` (if it opened it by ``/seed_session`` and will
verify it), in ``Mcp-Session-Id``, or in its cookie. If a client begins with MCP's handshake and names none,
it gets a session, seeded with an empty row, as its ``Mcp-Session-Id``; its ``DELETE`` closes it.

A tool's own error is a result that the model reads (``isError``); an unavailable server is an error of the
protocol. Source: https://modelcontextprotocol.io/specification, to version 2026-07-28.
"""

from __future__ import annotations

from typing import Any

import orjson
from mcp import MCPError
from mcp.server import Server, ServerRequestContext
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from mcp.types import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    ImageContent,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
)
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message

from gym_serve.servers.runner import DESCRIBE
from gym_serve.servers.tools import is_tool_name
from gym_serve.servers.transport import Call, Reply, Transport, encode
from gym_serve.types.errors import BadRequest, GymError, NotFound, Retryable, SessionLost, SessionNotFound
from gym_serve.types.media import shown_parts
from gym_serve.types.requests import JSON

MCP_SESSION = "mcp-session-id"
"""The header with the session that MCP's handshake opened."""

_DESCRIBE_SECONDS = 10.0


class McpExchange:
    """One request of an MCP client, and its answer. ``timeout``: seconds that the client waits, None for no
    limit. ``session``: the session that the request belongs to, opened by it or not."""

    def __init__(
        self,
        server: str,
        transport: Transport,
        session: str | None,
        request_id: str,
        timeout: float | None,
        *,
        traceparent: str | None = None,
    ) -> None:
        self.session = session
        self._server = server
        self._transport = transport
        self._request_id = request_id
        self._timeout = timeout
        self._traceparent = traceparent
        self._gone: GymError | None = None

    async def answer(self, request: Request, body: bytes) -> Response:
        """Answer a ``POST`` with this body. Raises SessionNotFound: the session that it names has ended; open
        another; GymError: no session could be opened for the client."""
        opened = self.session is None and _begins(body)
        if opened:
            await self._open()
        response = await self._respond(request, body)
        if self._gone is not None:
            raise SessionNotFound(self._gone.message, server=self._server)
        if opened and self.session is not None:
            response.headers[MCP_SESSION] = self.session
        return response

    async def _respond(self, request: Request, body: bytes) -> Response:
        """The answer of the protocol's own library."""
        server: Server[Any] = Server(self._server, on_list_tools=self._list, on_call_tool=self._call)
        # The gateway has checked Host and Origin.
        security = TransportSecuritySettings(enable_dns_rebinding_protection=False)
        manager = StreamableHTTPSessionManager(
            server, json_response=True, stateless=True, security_settings=security
        )
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[Message] = []

        async def receive() -> Message:
            return pending.pop() if pending else await request.receive()

        async def send(message: Message) -> None:
            sent.append(message)

        async with manager.run():
            await manager.handle_request(request.scope, receive, send)
        content, status = b"".join(m.get("body", b"") for m in sent), sent[0]["status"]
        headers = dict(sent[0].get("headers", []))
        if status >= 400 and headers.get(b"content-type") != b"application/json":  # a sentence
            refused = BadRequest(content.decode(), server=self._server)
            return JSONResponse(refused.to_body(), status)
        response = Response(content, status)
        response.raw_headers = [*headers.items()]
        return response

    async def _open(self) -> None:
        reply = await self._transport.call(self._to("seed_session", b"{}"))
        if reply.status >= 500 or reply.status == 429:
            reply.json()  # raises
        # An environment that needs a row refuses; its tools can be listed all the same.
        self.session = reply.session if reply.status < 400 else None

    async def _list(
        self, context: ServerRequestContext[Any], params: PaginatedRequestParams | None
    ) -> ListToolsResult:
        try:
            reply = await self._transport.call(Call(DESCRIBE, timeout=_DESCRIBE_SECONDS))
            operations = reply.json()
        except GymError as error:
            raise MCPError(INTERNAL_ERROR, f"{self._server} lists no tools: {error.message}") from None
        tools = [
            Tool(
                name=op.removeprefix("tools/"),
                description=str(operation.get("summary", "")),
                input_schema=operation.get("request") or {"type": "object"},
            )
            for op, operation in operations.items()
            if op.startswith("tools/")
        ]
        return ListToolsResult(tools=tools)

    async def _call(
        self, context: ServerRequestContext[Any], params: CallToolRequestParams
    ) -> CallToolResult:
        if not is_tool_name(params.name):
            raise MCPError(INVALID_PARAMS, f"Unknown tool: {params.name[:100]}")
        try:
            reply = await self._transport.call(
                self._to(f"tools/{params.name}", encode(params.arguments or {}))
            )
            self.session = reply.session or self.session
            if reply.status >= 400:
                reply.json()  # raises
        except (SessionNotFound, SessionLost) as error:
            self._gone = error
            raise MCPError(INVALID_PARAMS, error.message) from None
        except NotFound as error:
            raise MCPError(INVALID_PARAMS, error.message) from None
        except Retryable as error:
            raise MCPError(INTERNAL_ERROR, error.message) from None
        except GymError:
            return _result(reply, is_error=True)
        return _result(reply)

    def _to(self, op: str, body: bytes) -> Call:
        return Call(
            op, body, self.session, self._request_id, None, self._timeout, traceparent=self._traceparent
        )


def _begins(body: bytes) -> bool:
    try:
        message = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return isinstance(message, dict) and message.get("method") == "initialize"


def _result(reply: Reply, *, is_error: bool = False) -> CallToolResult:
    parts = shown_parts(reply.body) or [{"type": "input_text", "text": reply.body.decode("utf-8", "replace")}]
    return CallToolResult(content=list(map(_block, parts)), is_error=is_error)


def _block(part: JSON) -> TextContent | ImageContent:
    if part["type"] == "input_text":
        return TextContent(type="text", text=part["text"])
    head, _, data = part["image_url"].partition(";base64,")
    return ImageContent(type="image", data=data, mime_type=head.removeprefix("data:"))

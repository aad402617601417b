"""Environments as MCP servers: the official client against a graph."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import httpx2
import pytest
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp.types import INTERNAL_ERROR, INVALID_PARAMS, CallToolResult
from starlette.requests import Request
from support.http_servers import SECRET, Shop

from gym_serve.assembly import ThisProcess
from gym_serve.gateway.gateway import Gateway
from gym_serve.gateway.mcp_endpoint import McpExchange
from gym_serve.graph.spec import Graph, Node
from gym_serve.servers import Call, Reply
from gym_serve.types.errors import (
    DeadlineExceeded,
    GymError,
    InvalidRequest,
    NotFound,
    Overloaded,
    SessionLost,
    SessionNotFound,
    Unavailable,
)

TEA = {"order": {"lines": [{"item": "tea", "count": 2}], "payment": {"by": "card", "number": 7}}}
VERSIONS = ["auto", "legacy"]  # without a handshake, and with it


@asynccontextmanager
async def connected(url: str, mode: str, **headers: str) -> AsyncIterator[Client]:
    async with (
        httpx2.AsyncClient(headers=headers, timeout=60) as client,
        Client(streamable_http_client(f"{url}/shop/mcp", http_client=client), mode=mode) as connection,
    ):
        yield connection


def told(result: CallToolResult) -> Any:
    (block,) = result.content
    return json.loads(block.text)  # type: ignore[union-attr]


def post(http: httpx.Client, body: Any, **headers: str) -> httpx.Response:
    accept = {"accept": "application/json, text/event-stream"}
    return http.post("/shop/mcp", json=body, headers={**accept, **headers})


def begin(version: str = "2025-06-18") -> dict[str, Any]:
    params = {"protocolVersion": version, "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    return {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    params = {"name": name, "arguments": arguments}
    return {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": params}


@pytest.mark.parametrize("mode", VERSIONS)
async def test_tools_are_listed_as_rows_have_them(url: str, mode: str) -> None:
    async with connected(url, mode) as client:
        found = (await client.list_tools()).tools
    shown = [
        tool.model_dump(by_alias=True, include={"name", "description", "input_schema"}) for tool in found
    ]
    assert shown == [spec.mcp() for spec in Shop.tools.values()]


@pytest.mark.parametrize("mode", VERSIONS)
async def test_a_client_has_a_session(url: str, mode: str) -> None:
    async with connected(url, mode) as one, connected(url, mode) as other:
        assert told(await one.call_tool("order", TEA)) == {"items": 2, "orders": 1}
        assert told(await one.call_tool("order", TEA)) == {"items": 2, "orders": 2}
        assert told(await other.call_tool("order", TEA)) == {"items": 2, "orders": 1}


@pytest.mark.parametrize("mode", VERSIONS)
async def test_a_harness_works_in_the_session_that_is_verified(url: str, mode: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as trainer:
        session = (await trainer.post("/shop/seed_session", json={"orders": 5})).headers["x-session-id"]
        async with connected(url, mode, **{"x-session-id": session}) as client:
            assert told(await client.call_tool("order", TEA))["orders"] == 6
        # The harness has left, and the session is still there.
        verdict = await trainer.post("/shop/verify", json={"response": {"output": []}})
    assert verdict.json()["reward"] == 6.0


@pytest.mark.parametrize("mode", VERSIONS)
async def test_what_goes_wrong(url: str, mode: str) -> None:
    async with connected(url, mode) as client:
        wrong = await client.call_tool("order", {"order": {"lines": []}})
        assert wrong.is_error
        assert told(wrong)["error"]["code"] == "invalid_request"
        broken = await client.call_tool("break_down", {})
        assert broken.is_error
        assert told(broken)["error"]["code"] == "tool_failed"
        assert SECRET not in str(broken)
        for name in ("verify", "seed_session", "mcp", "restore_session", "../told/v1/responses", "no_tool"):
            with pytest.raises(MCPError) as caught:
                await client.call_tool(name, {})
            assert caught.value.code == INVALID_PARAMS


def test_the_session_of_a_handshake(http: httpx.Client) -> None:
    began = post(http, begin())
    session = began.headers["mcp-session-id"]
    assert began.json()["result"]["serverInfo"]["name"] == "shop"
    http.cookies.clear()
    named = {"mcp-session-id": session}
    assert post(http, {"jsonrpc": "2.0", "method": "notifications/initialized"}, **named).status_code == 202
    for count in (1, 2):
        answer = post(http, call("order", **TEA), **named).json()
        assert json.loads(answer["result"]["content"][0]["text"])["orders"] == count
    assert http.delete("/shop/mcp", headers=named).status_code == 200
    http.cookies.clear()
    gone = post(http, call("order", **TEA), **named)
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "session_not_found")


def test_requests_that_are_refused(http: httpx.Client) -> None:
    assert http.get("/shop/mcp").status_code == 405
    assert http.get("/shop/mcp").headers["allow"] == "POST, DELETE"
    assert http.delete("/shop/mcp").json()["error"]["code"] == "bad_request"
    assert post(http, begin(), origin="http://evil.example").status_code == 403
    assert http.post("/shop/mcp", content=b"{", headers={"accept": "*/*"}).status_code == 400
    assert post(http, [call("order", **TEA)]).status_code == 400
    assert post(http, call("order", **TEA), **{"x-request-timeout": "never"}).status_code == 400
    assert http.post("/parrot/mcp", json=begin()).status_code == 404
    assert http.post("/told/mcp", json=begin()).status_code == 404


def test_a_request_that_is_too_large(http: httpx.Client) -> None:
    assert post(http, call("stock", item="x" * (5 << 20))).status_code == 413


# The exchange by itself


class Answers:
    """A transport that gives its replies one after the other."""

    server = "shop"

    def __init__(self, *replies: Reply | GymError) -> None:
        self.replies = list(replies)
        self.calls: list[Call] = []

    async def call(self, call: Call) -> Reply:
        self.calls.append(call)
        reply = self.replies.pop(0)
        if isinstance(reply, GymError):
            raise reply
        return reply

    async def close(self) -> None:
        pass


async def exchange(
    transport: Answers, body: Any, session: str | None = None
) -> tuple[dict[str, Any], httpx.Headers, McpExchange]:
    async def receive() -> dict[str, Any]:
        raise AssertionError("the body was read before")

    headers = [(b"content-type", b"application/json"), (b"accept", b"application/json"), (b"host", b"h")]
    scope = {"type": "http", "method": "POST", "path": "/shop/mcp", "query_string": b"", "headers": headers}
    made = McpExchange("shop", transport, session, "r", 5.0)
    response = await made.answer(Request(scope, receive), json.dumps(body).encode())
    return json.loads(response.body), httpx.Headers(response.raw_headers), made


async def test_a_server_that_needs_a_row_gives_no_session() -> None:
    transport = Answers(Reply.failed(InvalidRequest("orders: missing")))
    body, headers, made = await exchange(transport, begin())
    assert body["result"]["serverInfo"]["name"] == "shop"
    assert "mcp-session-id" not in headers
    assert (made.session, transport.calls[0].op) == (None, "seed_session")


@pytest.mark.parametrize("error", [Unavailable("gone"), Overloaded("full")])
async def test_a_server_that_cannot_be_had_begins_nothing(error: GymError) -> None:
    with pytest.raises(type(error)):
        await exchange(Answers(Reply.failed(error)), begin())
    with pytest.raises(type(error)):
        await exchange(Answers(error), begin())


@pytest.mark.parametrize("raised", [False, True])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Unavailable("gone"), INTERNAL_ERROR),
        (DeadlineExceeded("slow"), INTERNAL_ERROR),
        (NotFound("no"), INVALID_PARAMS),
    ],
)
async def test_a_failure_that_is_no_tools_is_the_protocols(error: GymError, code: int, raised: bool) -> None:
    transport = Answers(error if raised else Reply.failed(error))
    body, _, _ = await exchange(transport, call("order"), "shop.1")
    assert (body["error"]["code"], body["error"]["message"]) == (code, error.message)
    assert (transport.calls[0].session, transport.calls[0].timeout) == ("shop.1", 5.0)


@pytest.mark.parametrize("error", [SessionLost("its replica died"), SessionNotFound("closed")])
async def test_a_session_that_is_gone_has_to_be_opened_again(error: GymError) -> None:
    with pytest.raises(SessionNotFound, match=error.message):
        await exchange(Answers(Reply.failed(error)), call("order"), "shop.1")


async def test_a_server_that_does_not_describe_itself() -> None:
    listing = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    body, _, _ = await exchange(Answers(Unavailable("gone")), listing, "shop.1")
    assert body["error"]["message"] == "shop lists no tools: gone"


async def test_a_session_that_moved_is_told() -> None:
    _, _, made = await exchange(Answers(Reply.of({}, "other.2")), call("order"), "shop.1")
    assert made.session == "other.2"


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Graph({"shop": Node("shop", "resources", "m:Shop", url="http://shop:1")})
    monkeypatch.setitem(sys.modules, "gym_serve.gateway.mcp_endpoint", None)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}"}

    scope = {"type": "http", "method": "POST", "path": "/shop/mcp", "root_path": "", "headers": []}
    response = asyncio.run(Gateway(plan, {}, ThisProcess(plan, [])).answer(Request(scope, receive)))
    assert response.status_code == 404
    assert b"pip install 'gym-serve[mcp]'" in response.body

"""The HTTP transport towards what stands between it and a graph."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from gym_serve.servers.transport import Call
from gym_serve.transports import HttpTransport
from gym_serve.types.errors import NotFound, Unavailable

# Word for word what the proxy of Ray 2.60 answers before it knows any application.
NO_ROUTE = "Path '/math/agent/run' not found. Ping http://.../-/routes for available routes."


Handle = Callable[[web.Request], Awaitable[web.Response]]


@asynccontextmanager
async def transport_to(handle: Handle, **options: Any) -> AsyncIterator[HttpTransport]:
    app = web.Application()
    app.router.add_post("/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    transport = HttpTransport("agent", f"http://127.0.0.1:{runner.addresses[0][1]}/math/agent", **options)
    try:
        yield transport
    finally:
        await transport.close()
        await runner.cleanup()


async def send(call: Call, handle: Handle) -> None:
    async with transport_to(handle) as transport:
        (await transport.call(call)).json()


async def call(answer: web.Response) -> None:
    async def handle(request: web.Request) -> web.Response:
        return answer

    await send(Call("run", b"{}"), handle)


async def test_a_proxy_that_has_just_started_knows_no_graph_yet() -> None:
    with pytest.raises(Unavailable):
        await call(web.Response(status=404, text=NO_ROUTE))


@pytest.mark.parametrize(
    ("session", "affinity", "sent"),
    [
        (None, "Aufgabe-1", {"x-session-affinity": "Aufgabe-1"}),
        (None, "日本-0", {"x-session-affinity": "%E6%97%A5%E6%9C%AC-0"}),
        (None, "a\r\nx-other: b", {"x-session-affinity": "a%0D%0Ax-other:%20b"}),
        (None, "\ud800-0", {"x-session-affinity": "%3F-0"}),
        ("r.é", None, {"x-session-id": "r.é", "cookie": "gym_session=r.é"}),
        ("cookie:a=é", None, {"cookie": "a=é"}),
    ],
)
async def test_keys_and_sessions_in_any_script_are_delivered(
    session: str | None, affinity: str | None, sent: dict[str, str]
) -> None:
    got: dict[str, str] = {}

    async def handle(request: web.Request) -> web.Response:
        got.update(request.headers)
        return web.json_response({})

    await send(Call("run", b"{}", session, affinity=affinity), handle)
    got = {name.lower(): value for name, value in got.items()}
    assert {name: got.get(name) for name in sent} == sent
    assert "x-other" not in got


async def test_each_episode_has_a_session_of_its_own_with_a_server_that_sets_cookies() -> None:
    sent: list[str | None] = []

    async def handle(request: web.Request) -> web.Response:
        sent.append(request.headers.get("cookie"))
        answer = web.json_response({})
        answer.set_cookie("session", f"s{len(sent)}")
        return answer

    async with transport_to(handle) as transport:
        one = await transport.call(Call("seed_session", b"{}"))
        other = await transport.call(Call("seed_session", b"{}"))
        await transport.call(Call("tools/look", b"{}", one.session))
    assert (one.session, other.session) == ("cookie:session=s1", "cookie:session=s2")
    assert sent == [None, None, "session=s1"]


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_a_tool_that_is_unavailable_fails_or_is_shown(status: int) -> None:
    async def handle(request: web.Request) -> web.Response:
        return web.Response(status=status, text="busy")

    async with transport_to(handle) as transport:
        assert (await transport.call(Call("tools/search", b"{}"))).status == status
    async with transport_to(handle, unavailable_tools="show") as transport:
        shown = await transport.call(Call("tools/search", b"{}"))
        assert (shown.status, shown.body) == (422, b"busy")
        assert (await transport.call(Call("verify", b"{}"))).status == status


async def test_any_other_404_is_final() -> None:
    with pytest.raises(NotFound):
        await call(
            web.json_response({"error": {"code": "not_found", "message": "no such route"}}, status=404)
        )

"""Tools that a hosted NeMo Gym server has over MCP alone, with a double that answers JSON-RPC by hand."""

from contextlib import asynccontextmanager

import pytest
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, PlainTextResponse
from support.environments import Bench, said

from gym_serve.interop.nemo_gym.construction import session_headers
from gym_serve.interop.nemo_gym.hosting import NemoGym
from gym_serve.servers import Call
from gym_serve.types.errors import GraphError

ROW = {"responses_create_params": {"input": "Weather?"}}
TOOLS = [
    {"name": "weather", "description": "Of a city.\nAny city.", "inputSchema": {"type": "object"}},
    {"name": "shout"},
]


class Forecast(NemoGym):
    """Two tools, on two pages of a list; the header names the session."""

    listed = TOOLS

    def make_app(self):
        app = FastAPI()
        calls = self.calls = []

        @app.post("/seed_session")
        async def seed():
            return {"mcp": {"headers": {"x-session": "s1"}}, "hint": 1}

        @app.post("/verify")
        async def verify(request: Request):
            return {**await request.json(), "reward": float(len(calls))}

        @app.post("/mcp/")
        async def mcp(request: Request):
            body = await request.json()
            assert "application/json" in request.headers["accept"]
            if body["method"] == "tools/list":
                at = int(body["params"].get("cursor", 0))
                more = {"nextCursor": str(at + 1)} if at + 1 < len(self.listed) else {}
                return answer({"tools": [self.listed[at]], **more})
            session, params = request.headers.get("x-session"), body["params"]
            if session is None:
                return answer({"content": [{"type": "text", "text": "no session"}], "isError": True})
            if not isinstance(params["arguments"], dict):
                return JSONResponse({"jsonrpc": "2.0", "id": 1, "error": {"message": "odd arguments"}})
            if params["arguments"].get("page"):
                return PlainTextResponse("<html>")
            calls.append((session, params["name"], params["arguments"]))
            return answer({"content": [{"type": "text", "text": "Sun."}, {"type": "image", "data": ""}]})

        return app, "/mcp/"


def answer(result):
    return JSONResponse({"jsonrpc": "2.0", "id": 1, "result": result})


@asynccontextmanager
async def hosted(cls=Forecast):
    bench = Bench(cls(server="somewhere.app"))
    await bench.host.start()
    try:
        yield bench
    finally:
        await bench.host.stop()


async def test_the_model_gets_the_tools_and_calls_them_in_its_session():
    async with hosted() as bench:
        seeded = await bench.call("seed_session", ROW)
        assert seeded["hint"] == 1
        assert [(tool["name"], tool["description"]) for tool in seeded["tools"]] == [
            ("weather", "Of a city.\nAny city."),
            ("shout", ""),
        ]
        assert await bench.tool("weather", city="Oslo") == "Sun.\n[image]"
        assert bench.host.server.calls == [("s1", "weather", {"city": "Oslo"})]
        assert (await bench.verify(ROW, said("x")))["reward"] == 1.0


@pytest.mark.parametrize(
    ("body", "message"),
    [(b"[1]", b"odd arguments"), (b'{"page": 1}', b"<html>")],
)
async def test_what_goes_wrong_is_for_the_model(body, message):
    async with hosted() as bench:
        await bench.call("seed_session", ROW)
        reply = await bench.host.dispatch(Call("tools/weather", body, bench.session))
        assert reply.status == 422
        assert message in reply.body


async def test_without_a_seed_the_server_refuses():
    async with hosted() as bench:
        reply = await bench.host.dispatch(Call("tools/weather", b"{}"))
        assert (reply.status, b"no session" in reply.body) == (422, True)


async def test_they_are_documented_and_offered_like_others():
    async with hosted() as bench:
        described = await bench.host.describe(None)
        assert described["tools/weather"]["summary"] == "Of a city."
        assert "tools/shout" in described


@pytest.mark.parametrize("tools", [[{"name": "verify"}], [{"name": "a/b"}]])
async def test_a_tool_must_not_take_the_name_of_a_route(tools):
    class Odd(Forecast):
        pass

    Odd.listed = tools
    with pytest.raises(GraphError, match="have invalid names"):
        async with hosted(Odd):
            pass


@pytest.mark.parametrize(
    ("seeded", "headers"),
    [
        ({"mcp": {"headers": {"a": 1}}}, {"a": "1"}),
        ({"mcp": {"headers": None}}, {}),
        ({"mcp": "x"}, {}),
        ([], {}),
    ],
)
def test_headers_of_a_session(seeded, headers):
    assert session_headers(seeded) == headers

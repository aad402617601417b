"""MCP servers as environments: real servers, over stdio and HTTP; their states, failures and ends."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from mcp.types import CallToolResult, TextContent, Tool
from pydantic import ValidationError
from support import mcp_servers, odd_mcp_server
from support.environments import Bench, examples, said

from gym_serve.deployments.scripted_model import ScriptedModel
from gym_serve.deployments.simple_agent import SimpleAgent
from gym_serve.environments.mcp import McpEnvironment, completed, offered, text_of
from gym_serve.environments.mcp.connection import McpSession
from gym_serve.servers import EnvironmentClient, ModelClient, ServerRunner, Verdict, VerifyRequest
from gym_serve.servers.transport import text_as_json
from gym_serve.transports import InlineTransport
from gym_serve.types.errors import GraphError, InvalidRequest, ToolFailed, Unavailable

WAREHOUSE: dict[str, Any] = {"command": ["python", "-m", "gym_serve.environments.mcp.warehouse"]}
TOOLS = ["remember", "process", "refuse", "sleep", "end", "show", "long", "header"]
HABITS: dict[str, Any] = {"command": ["python", str(Path(mcp_servers.__file__))], "tools": TOOLS}


@asynccontextmanager
async def running(
    environment: type[McpEnvironment] = McpEnvironment, **settings: Any
) -> AsyncIterator[Bench]:
    bench = Bench(environment(**settings))
    await bench.host.start()
    try:
        yield bench
    finally:
        await bench.host.stop()


def another(bench: Bench) -> Bench:
    """A second session of the same environment."""
    other = Bench(McpEnvironment(**HABITS))
    other.host = bench.host
    return other


def alive(pid: str) -> bool:
    return Path("/proc", pid).exists()


async def test_example_rows() -> None:
    rows = examples(McpEnvironment)
    assert len(rows) >= 5
    async with running(**WAREHOUSE, connection="replica") as bench:
        server = bench.host.server
        assert isinstance(server, McpEnvironment)
        for row in rows:
            offered = [tool.openai() for tool in server.offered.values()]
            assert row["responses_create_params"]["tools"] == offered
            right = await bench.verify(row, said(f"\\boxed{{{row['expected_answer']}}}"))
            assert right == {"reward": 1.0, "extracted_answer": row["expected_answer"]}
        await bench.call("seed_session", rows[1])
        await bench.tool("take", item="bolts", number=75)
        assert await bench.tool("take", item="nuts", number=15) == "You took 15 nuts; 500 are left."
        left = [await bench.tool("count", item=item) for item in ("bolts", "nuts")]
        assert str(sum(left)) == rows[1]["expected_answer"]


async def test_sessions_have_processes_of_their_own_which_end_with_them() -> None:
    async with running(**HABITS) as first:
        second = another(first)
        await second.call("seed_session", {})  # and a first call without one opens a session as well
        assert await first.tool("remember", word="a") == "a"
        assert await second.tool("remember", word="b") == "b"
        assert await first.tool("remember", word="c") == "a c"
        pids = [(await bench.tool("process"))["pid"] for bench in (first, second)]
        assert pids[0] != pids[1]
        await first.call("close_session")
        assert [alive(pid) for pid in pids] == [False, True]
    assert not alive(pids[1])  # the replica stopped


async def test_sessions_may_share_a_connection() -> None:
    async with running(**HABITS, connection="replica") as first:
        second = another(first)
        await first.tool("remember", word="a")
        assert await second.tool("remember", word="b") == "a b"
        await first.call("close_session")
        assert await second.tool("remember", word="c") == "a b c"


async def test_what_goes_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "nobody-may-read-this")
    async with running(**HABITS, env={"TOLD": "yes"}, call_timeout=30, max_output_chars=60) as bench:
        with pytest.raises(ToolFailed, match="not today"):
            await bench.tool("refuse")
        with pytest.raises(ToolFailed, match="Error executing tool long"):
            await bench.tool("long", number="many")
        with pytest.raises(InvalidRequest, match="must be a JSON object"):
            await bench.call("tools/long", [1])
        assert await bench.tool("long", number=62) == "x" * 60 + "... [2 more characters]"
        await bench.tool("remember", word="a")
        bench.host.server.reconfigure({"call_timeout": 0.2})
        with pytest.raises(ToolFailed, match=r"sleep took over 0\.2 s"):
            await bench.tool("sleep", seconds=2)
        bench.host.server.reconfigure({"call_timeout": 30, "max_output_chars": 1000})
        assert await bench.tool("remember", word="b") == "a b"  # the session goes on
        told = await bench.tool("process")
        assert (told["told"], told["key"]) == ("yes", "")
        with pytest.raises(ToolFailed, match="ended; the next call starts a new one"):
            await bench.tool("end")
        assert await bench.tool("remember", word="c") == "c"
        text, dot = await bench.tool("show")
        assert text == {"type": "input_text", "text": "A dot:\n[image, image/png]"}
        assert dot == {"type": "input_image", "image_url": "data:image/png;base64,aGk="}
        assert not alive(told["pid"])


@pytest.mark.parametrize(
    ("text", "body"),
    [
        ('{"a": 1}', b'{"a": 1}'),
        ("5", b"5"),
        ("five", b'"five"'),
        ("", b'""'),
        ('"', b'"\\""'),
        ("NaN", b'"NaN"'),
    ],
)
def test_the_body_of_a_reply_is_json(text: str, body: bytes) -> None:
    assert text_as_json(text) == body


# Starting


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"command": ["x"], "url": "http://h/mcp"},
        {"command": []},
        {"url": "file:///x"},
        {"command": "python x"},
    ],
)
def test_a_server_has_to_be_named(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        McpEnvironment(**settings)


def test_secrets_are_not_shown() -> None:
    settings = {"env": {"KEY": "hidden"}, "headers": {"authorization": "hidden"}}
    assert "hidden" not in repr(McpEnvironment(command=["x"], **settings).config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"command": ["/no/such/program"]}, "FileNotFoundError"),
        ({"command": ["python", "-c", "pass"]}, "cannot connect to"),
        ({"command": [*HABITS["command"], "--mute"], "start_timeout": 0.5}, "did not answer within 0.5 s"),
        ({"url": "http://127.0.0.1:9/mcp"}, "cannot connect to"),
    ],
)
async def test_a_server_that_cannot_be_had(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(Unavailable, match=message):
        await McpEnvironment(**settings).start()


@pytest.mark.parametrize(
    ("tools", "message"),
    [(["remember", "forget"], "no tool 'forget'; it has"), (None, "'verify' cannot be offered")],
)
async def test_tools_that_cannot_be_offered(tools: list[str] | None, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        await McpEnvironment(**{**HABITS, "tools": tools}).start()


async def test_only_the_tools_that_are_named_are_offered() -> None:
    environment = McpEnvironment(**{**HABITS, "tools": ["remember"]})
    (tool,) = (await environment.discover()).values()
    assert tool.openai()["parameters"]["required"] == ["word"]
    assert tool.mcp() == {
        "name": "remember",
        "description": "Remember a word.",
        "inputSchema": tool.parameters,
    }


ODD: dict[str, Any] = {"command": ["python", str(Path(odd_mcp_server.__file__))]}


async def test_invalid_tools_are_left_out_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with running(**ODD) as bench:
            tools = (await bench.call("seed_session", {}))["tools"]
            assert [tool["name"] for tool in tools] == ["structure", "bare", "blank", "plain"]
            assert tools[0]["parameters"] == {"type": "object", "properties": {}}
            assert tools[3]["parameters"]["properties"] == {"a": {"type": "string"}}
            assert await bench.tool("structure") == {"größe": 5, "of": ["a"]}
            assert await bench.tool("plain", a="x") == "words"
            assert await bench.tool("bare") == await bench.tool("blank") == {"a": 1}
    for name in ("'listed'", "'bad name!'", "''", "'untyped'", "'schemaless'", "'textual'", "5"):
        assert f"the tool {name} of an MCP server is left out" in caplog.text


# Over HTTP


async def test_a_server_by_its_url() -> None:
    app = mcp_servers.make_server().streamable_http_app()
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", ws="none"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn sets no event
        await asyncio.sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/mcp"
    async with running(url=url, tools=TOOLS, headers={"x-told": "hidden"}) as bench:
        await bench.call("seed_session", {})
        assert await bench.tool("header") == "hidden"
        assert (await bench.tool("process"))["pid"] == str(os.getpid())
        with pytest.raises(ToolFailed, match="not today"):
            await bench.tool("refuse")
    server.should_exit = True
    await serving


# Rewards of one's own, and rows without tools


class Kept(McpEnvironment):
    """Reward 1.0 if the server has kept exactly the row's words."""

    reverify_mode = "unsupported"

    async def verify(self, request: VerifyRequest, session: McpSession) -> Verdict:
        kept = await self.call(session, "remember", {"word": "."})
        return Verdict(reward=float(kept == f"{request.model_extra['words']} ."))  # type: ignore[index]


async def test_a_subclass_asks_the_server() -> None:
    async with running(Kept, **HABITS, connection="replica") as bench:
        await bench.call("seed_session", {})
        await bench.tool("remember", word="a")
        assert (await bench.verify({"words": "a"}, []))["reward"] == 1.0
        assert (await bench.verify({"words": "a"}, []))["reward"] == 0.0  # it has kept the point as well


@pytest.mark.parametrize("own", [False, True])
async def test_a_row_without_tools_gets_those_of_the_server(own: bool) -> None:
    environment = ServerRunner(McpEnvironment(**WAREHOUSE, connection="replica"))
    model = ServerRunner(ScriptedModel())
    await environment.start()
    agent = SimpleAgent(
        model=ModelClient(InlineTransport(model)), resources=EnvironmentClient(InlineTransport(environment))
    )
    row: dict[str, Any] = {"responses_create_params": {"input": "What is there?"}, "expected_answer": "6"}
    if own:
        row["responses_create_params"]["tools"] = [
            {"type": "function", "name": "count", "parameters": {"type": "object", "required": ["item"]}}
        ]
    rollout = await agent.run(row)
    call = next(item for item in rollout["response"]["output"] if item["type"] == "function_call")
    assert call["name"] == ("count" if own else "list_items")
    assert rollout["responses_create_params"] == row["responses_create_params"]
    await environment.stop()


def test_the_structure_of_a_result_without_content() -> None:
    assert text_of(CallToolResult(content=[], structuredContent={"n": 1}), 100) == '{"n":1}'
    text = [TextContent(type="text", text="one")]
    assert text_of(CallToolResult(content=text, structuredContent={"n": 1}), 100) == "one"


def test_schemas_of_tools() -> None:
    found = offered([Tool(name="half", inputSchema={"type": "object"})], None)
    assert found["half"].parameters == {"type": "object", "properties": {}}
    assert completed({"properties": {"a": {}}}) == {"properties": {"a": {}}}

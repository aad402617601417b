"""`NemoGym`: routes, cookies, failures and model calls of a hosted server, with a double of NeMo Gym's."""

import asyncio
from contextlib import asynccontextmanager

import aiohttp
import pytest
from openai.types.responses import ResponseUsage
from pydantic import BaseModel
from starlette.responses import JSONResponse
from starlette.routing import Route
from support.environments import Bench, said
from support.nemo_gym_double import HostedNotebook

from gym_serve.deployments.gymnasium_agent import GymnasiumAgent
from gym_serve.interop.nemo_gym.construction import GraphServers, ServerAnswer, with_paths
from gym_serve.interop.nemo_gym.hosting import NemoGym, tool_path
from gym_serve.servers import Call, EnvironmentClient, ModelClient, Reply, ServerRunner
from gym_serve.transports import InlineTransport
from gym_serve.types.errors import (
    GraphError,
    InvalidRequest,
    NotFound,
    Overloaded,
    Rejected,
    SessionNotFound,
    VerifierFailed,
)

ROW = {"responses_create_params": {"input": "Take notes."}, "first": "a", "expected": ["a", "b"]}
DOUBLE = {"server": "somewhere.app"}


class Transport:
    """A model that answers, or fails."""

    server = "judge"

    def __init__(self, reply):
        self.reply = reply
        self.calls = []

    async def call(self, call):
        self.calls.append(call)
        return self.reply

    async def close(self):
        pass


def judge(text=None, error=None):
    return ModelClient(Transport(Reply.failed(error) if error else Reply.of({"output": said(text)})))


@asynccontextmanager
async def hosted(**settings):
    bench = Bench(HostedNotebook(**DOUBLE, **settings))
    await bench.host.start()
    try:
        yield bench
    finally:
        await bench.host.stop()


async def test_a_session_is_the_cookies_of_the_server():
    async with hosted() as bench:
        other = Bench(bench.host.server)
        other.host = bench.host
        assert await bench.call("seed_session", ROW) == {}
        await other.call("seed_session", {**ROW, "first": "x"})
        assert await bench.tool("take_note", text="b") == {"count": 2}
        assert await other.tool("take_note", text="y") == {"count": 2}
        verdict = await bench.verify(ROW, said("done"))
        assert verdict == {"reward": 1.0, "notes": ["a", "b"]}, "what it repeats of the request is left out"
        assert (await other.verify(ROW, said("done")))["notes"] == ["x", "y"]
        assert len(bench.host.server.notebook.notes) == 2


async def test_the_end_of_a_session_reaches_the_server_once():
    async with hosted() as bench:
        await bench.call("seed_session", ROW)
        session = bench.session
        await bench.call("close_session")
        assert bench.host.server.notebook.notes == {}
        bench.session = session
        with pytest.raises(SessionNotFound):
            await bench.tool("take_note", text="late")
        assert bench.host.server.notebook.notes == {}


async def test_calls_without_a_session_get_their_own():
    async with hosted() as bench:
        assert await bench.tool("take_note", text="b") == {"count": 1}
        assert bench.session is not None
        assert await bench.tool("take_note", text="c") == {"count": 2}
        bench.session = None
        assert (await bench.verify(ROW, said("done")))["reward"] == 0.0
        assert bench.host.server.live_sessions == 1


async def test_what_a_tool_says_is_for_the_model():
    async with hosted() as bench:
        await bench.call("seed_session", ROW)
        raw = await bench.host.dispatch(Call("tools/take_note", b'{"txt": 1}', bench.session))
        assert raw.status == 422
        assert b"text" in raw.body, "the server's own words on what is missing"
        broken = await bench.host.dispatch(Call("tools/take_note", b'{"text": "explode"}', bench.session))
        assert broken.status == 422
        assert b"RuntimeError: the pen broke" in broken.body


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_a_tool_that_is_unavailable_is_shown_as_in_nemo_gym_unless_it_is_to_fail(status):
    for settings, expected in (({}, 422), ({"unavailable_tools": "fail"}, status)):
        async with hosted(**settings) as bench:
            await bench.call("seed_session", ROW)
            note = b'{"text": "%d"}' % status
            reply = await bench.host.dispatch(Call("tools/take_note", note, bench.session))
            assert (reply.status, reply.body) == (expected, b'{"detail":"the desk is taken"}')


async def test_seeding_again_asks_the_server_in_the_same_session():
    async with hosted() as bench:
        await bench.call("seed_session", ROW)
        session = bench.session
        await bench.tool("take_note", text="b")
        await bench.call("seed_session", {**ROW, "first": "again"})
        assert bench.session == session
        assert (await bench.verify(ROW, said("done")))["notes"] == ["a", "b", "again"], "as it sees fit"


async def test_a_route_with_a_parameter_is_any_tool_and_no_route():
    async with hosted() as bench:
        await bench.call("seed_session", ROW)
        assert await bench.tool("email_search", query="x") == "you called email_search"
        for name in (
            "verify",
            "seed_session",
            "../verify",
            "a/b",
            "",
            "{tool}",
            "x" * 200,
            "aggregate_metrics",
        ):
            with pytest.raises(NotFound):
                await bench.call(f"tools/{name}", {})
    assert tool_path({}, "email_search") is None


async def test_failures_of_seed_and_verify_are_typed():
    async with hosted(servers={"judge_model": judge(error=Overloaded("queue"))}) as bench:
        with pytest.raises(InvalidRequest, match="first: a field is missing"):
            await bench.call("seed_session", {"responses_create_params": {"input": ""}})
        assert bench.host.server.live_sessions == 0
        await bench.call("seed_session", ROW)
        with pytest.raises(VerifierFailed, match="KeyError"):
            await bench.verify({k: v for k, v in ROW.items() if k != "expected"}, said("done"))
        with pytest.raises(Overloaded, match="queue"):
            await bench.verify({**ROW, "judge": True}, said("done"))


async def test_a_tool_that_no_model_could_call_is_refused_at_the_start():
    class Stepping(HostedNotebook):
        def make_app(self):
            app, path = super().make_app()
            app.router.routes = [route for route in app.routes if route.path != "/reset"]
            return app, path

    host = ServerRunner(Stepping(**DOUBLE))
    with pytest.raises(GraphError, match="a tool named step, which is a route here"):
        await host.start()
    assert host.server.notebook.life == ["started", "stopped"]


async def test_a_stored_rollout_is_a_row_too():
    async with hosted() as bench:
        row = {**ROW, "first": "a", "expected": ["a"], "reward": 1.0, "notes": ["a"]}
        await bench.call("seed_session", row)
        assert await bench.verify(row, said("done")) == {"reward": 1.0}, "although the row says so already"


async def test_its_models_are_those_of_the_graph():
    transport = judge("good")
    async with hosted(servers={"judge_model": transport}) as bench:
        await bench.call("seed_session", ROW)
        verdict = await bench.verify({**ROW, "judge": True}, said("done"))
        assert verdict["reward"] == 1.0
    call = transport.transport.calls[0]
    assert (call.op, call.body) == ("v1/responses", b'{"input":"a"}')


async def test_a_refusal_of_a_model_is_the_servers_to_handle():
    async with hosted(servers={"judge_model": judge(error=Rejected("no"))}) as bench:
        await bench.call("seed_session", ROW)
        verdict = await bench.verify({**ROW, "judge": True}, said("done"))
        assert (verdict["reward"], verdict["status"]) == (0.25, 400)


async def test_a_model_that_is_not_in_the_graph():
    async with hosted() as bench:
        await bench.call("seed_session", ROW)
        with pytest.raises(NotFound, match="servers has no server for 'judge_model'; it has none"):
            await bench.verify({**ROW, "judge": True}, said("done"))


async def test_a_stepped_server_with_the_gymnasium_agent():
    texts = ["one", "two"]

    class Policy:
        async def responses(self, params):
            text = texts.pop(0)
            return {"output": [{"type": "message", "role": "assistant", "content": text}]}

        async def chat_completions(self, body):
            raise NotImplementedError

    async with hosted() as bench:
        agent = GymnasiumAgent(model=Policy(), resources=EnvironmentClient(InlineTransport(bench.host)))
        reply = await ServerRunner(agent).dispatch(
            Call("run", b'{"responses_create_params": {"input": "Go."}}')
        )
        rollout = reply.json()
        assert rollout["reward"] == 1.0
        assert rollout["terminated"] is True
        shown = [item["content"] for item in rollout["response"]["output"] if item.get("role") == "user"]
        assert shown == ["One more."]
        assert bench.host.server.notebook.notes == {}, "closed"
        assert bench.host.server.live_sessions == 0


async def test_metrics_are_the_servers_own():
    async with hosted() as bench:
        metrics = await bench.call("aggregate_metrics", {"verify_responses": [{"reward": 1.0}]})
        assert metrics["agent_metrics"] == {"n": 1}


async def test_operations_are_documented():
    async with hosted() as bench:
        described = await bench.host.describe(None)
        assert described["tools/take_note"]["summary"] == "Write a note down."
        assert described["tools/take_note"]["request"]["required"] == ["text"]
        assert not {"tools/verify", "tools/{tool}", "tools/step"} & set(described)


async def test_start_and_end_of_the_application():
    async with hosted() as bench:
        notebook = bench.host.server.notebook
        assert notebook.life == ["started"]
    assert notebook.life == ["started", "stopped"]


async def test_an_application_that_cannot_start():
    class Broken(HostedNotebook):
        def make_app(self):
            app, mcp_path = super().make_app()

            @asynccontextmanager
            async def lifespan(app):
                raise OSError("no data here")
                yield

            app.router.lifespan_context = lifespan
            return app, mcp_path

    host = ServerRunner(Broken(**DOUBLE))
    with pytest.raises(OSError, match="no data here"):
        await host.start()
    await host.stop()


async def test_nemo_gym_is_not_installed(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "nemo_gym.base_resources_server", None)
    with pytest.raises(GraphError, match=r"pip install nemo-gym==0\.4\.0"):
        await ServerRunner(NemoGym(server="resources_servers.mcqa.app")).start()


def test_a_path_that_is_none():
    with pytest.raises(ValueError, match="server"):
        NemoGym(server="os; rm -rf /")


def test_paths_are_those_of_the_servers_folder(tmp_path):
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts/judge.txt").write_text("?")
    settings = {
        "prompt_fpath": "prompts/judge.txt",
        "other_fpath": "elsewhere.txt",
        "label": "prompts",
        "in": {"template_dir": "prompts"},
        "count": 3,
    }
    assert with_paths(settings, tmp_path) == {
        "prompt_fpath": str(tmp_path / "prompts/judge.txt"),
        "other_fpath": "elsewhere.txt",
        "label": "prompts",
        "in": {"template_dir": str(tmp_path / "prompts")},
        "count": 3,
    }


async def test_an_answer_reads_like_aiohttps():
    good, bad = ServerAnswer(200, b'{"a":1}'), ServerAnswer(404, b"gone")
    assert (good.ok, await good.json(), await good.text(), await good.content.read()) == (
        True,
        {"a": 1},
        '{"a":1}',
        b'{"a":1}',
    )
    good.raise_for_status()
    with pytest.raises(aiohttp.ClientResponseError, match="gone") as caught:
        bad.raise_for_status()
    assert caught.value.status == 404


async def test_a_pydantic_body_sends_its_set_fields():
    class Body(BaseModel):
        input: str
        temperature: float | None = None

    model = judge("x")
    servers = GraphServers({"m": model}, "servers")
    await asyncio.gather(*(servers.request("m", "/v1/responses", Body(input="q")) for _ in range(3)))
    assert {call.body for call in model.transport.calls} == {b'{"input":"q"}'}


async def test_responses_have_what_newer_types_of_openai_require():
    usages = []

    class Looks(HostedNotebook):
        def make_app(self):
            app, mcp_path = super().make_app()

            async def verify(request):
                usages.append((await request.json())["response"].get("usage"))
                return JSONResponse({"reward": 1.0})

            app.router.routes = [route for route in app.routes if route.path != "/verify"]
            app.router.routes.insert(0, Route("/verify", verify, methods=["POST"]))
            return app, mcp_path

    host = ServerRunner(Looks(**DOUBLE))
    await host.start()
    client = EnvironmentClient(InlineTransport(host))
    told = (
        {"input_tokens_details": {"cached_tokens": 2}},
        {"input_tokens": 3, "output_tokens_details": None},
    )
    for usage in (*told, {"input_tokens_details": "?"}, None):
        await client.verify(ROW, {"output": [], "usage": usage}, None)
    await host.stop()
    assert usages[0]["input_tokens_details"] == {"cached_tokens": 2, "cache_write_tokens": 0}
    assert usages[-1] is None
    for usage in usages[:-1]:
        ResponseUsage.model_validate(usage, strict=True)

"""`OpenEnv` by URL, with a double that speaks OpenEnv's protocol; its texts, settings and failures."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st
from support.environments import Bench, Scripted, called, said

from gym_serve.deployments.gymnasium_agent import GymnasiumAgent
from gym_serve.deployments.simple_agent import SimpleAgent
from gym_serve.interop.openenv import OpenEnv, action_in, observation_text, text_field, tool_result
from gym_serve.servers import Call, EnvironmentClient, ServerRunner
from gym_serve.transports import InlineTransport
from gym_serve.types.errors import (
    GraphError,
    InvalidRequest,
    Overloaded,
    SessionLost,
    ToolFailed,
    Unavailable,
)

GUESS = {"properties": {"word": {"type": "string"}, "metadata": {"type": "object"}}, "required": ["word"]}
MOVE = {"properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x", "y"]}
TOOLS = [
    {"name": "shout", "description": "Say it loudly.", "input_schema": {"type": "object"}},
    {"name": "reset", "description": "a route", "input_schema": {}},
]
ROW = {"responses_create_params": {"input": "Play."}}


class Refused(Exception):
    pass


class Double:
    """A game of guessing: the word is `gym`. Each connection is one episode."""

    def __init__(self, schema=GUESS):
        self.schema = schema
        self.open = 0
        self.resets = []

    def app(self):
        app = web.Application()
        app.router.add_get("/schema", self.get_schema)
        app.router.add_get("/ws", self.websocket)
        return app

    async def get_schema(self, request):
        return web.json_response({"action": self.schema})

    async def websocket(self, request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.open += 1
        turns = []
        try:
            async for message in socket:
                body = json.loads(message.data)
                try:
                    payload = await getattr(self, body["type"])(body["data"], turns, socket)
                except Refused as error:
                    answer = {"type": "error", "data": {"message": str(error), "code": error.args[1]}}
                else:
                    answer = {"type": "observation", "data": payload}
                if not socket.closed:
                    await socket.send_json(answer)
        finally:
            self.open -= 1
        return socket

    async def reset(self, data, turns, socket):
        self.resets.append(data)
        if data.get("full"):
            raise Refused("8 of 8 sessions", "CAPACITY_REACHED")
        return {"observation": {"text": "Guess.", "metadata": {}}, "reward": None, "done": False}

    async def step(self, data, turns, socket):
        if data.get("type") == "list_tools":
            return {"observation": {"tools": TOOLS}, "reward": None, "done": False}
        if data.get("type") == "call_tool":
            return self.called(data)
        word = data.get("word")
        turns.append(word)
        if word == "break":
            raise Refused("it broke", "EXECUTION_ERROR")
        if word == "end":
            await socket.close()
            return None
        if word == "hang":
            await asyncio.sleep(60)
        if word is None or not word.isalpha():
            raise Refused("word: letters only", "VALIDATION_ERROR")
        right = word == "gym"
        return {
            "observation": {"text": f"turn {len(turns)}"},
            "reward": 1.0 if right else -0.25,
            "done": right,
        }

    def called(self, data):
        text = data["arguments"].get("text")
        if text is None:
            observation = {"tool_name": "shout", "result": None, "error": {"message": "text is missing"}}
            return {"observation": observation, "reward": None, "done": False}
        result = {"content": [{"type": "text", "text": text.upper()}], "data": None, "is_error": False}
        return {"observation": {"tool_name": "shout", "result": result}, "reward": 0.5, "done": False}


@asynccontextmanager
async def played(double=None, **settings):
    double = double or Double()
    async with TestServer(double.app()) as server:
        bench = Bench(OpenEnv(url=str(server.make_url("/")), **settings))
        await bench.host.start()
        try:
            yield bench, double
        finally:
            await bench.host.stop()


async def rollout(agent, bench, policy, row=ROW, **settings):
    server = agent(model=policy, resources=EnvironmentClient(InlineTransport(bench.host)), **settings)
    return (await ServerRunner(server).dispatch(Call("run", json.dumps(row).encode()))).json()


async def test_an_episode_with_the_gymnasium_agent():
    policy = Scripted("art", "gym")
    row = {**ROW, "verifier_metadata": {"seed": 7, "options": {"level": 2}}}
    async with played() as (bench, double):
        found = await rollout(GymnasiumAgent, bench, policy, row)
        assert (found["reward"], found["terminated"], found["num_steps"]) == (0.75, True, 2)
        assert double.resets == [{"level": 2, "seed": 7}]
        prompt = policy.asked[0]["input"]
        assert prompt[-1]["content"] == "Guess.\n\nAnswer with the action alone."
        assert policy.asked[1]["input"][-1]["content"] == "turn 1"
        assert bench.host.server.live_sessions == 0
    assert double.open == 0


async def test_what_is_no_action_costs_a_turn_and_then_the_episode():
    async with played(Double(MOVE), max_invalid_actions=2) as (bench, _):
        opened = await bench.call("reset", ROW)
        assert '"required":["x","y"]' in opened["observation"]
        first = await bench.call("step", {**ROW, "response": {"output": said("left")}})
        assert "That was no action: not valid JSON" in first["observation"]
        assert (first["reward"], first["truncated"]) == (0.0, False)
        second = await bench.call("step", {**ROW, "response": {"output": said('```json\n{"x": 1}\n```')}})
        assert "letters only" in second["observation"], "the environment's own words"
        assert second["truncated"] is True


async def test_tools_with_the_simple_agent():
    policy = Scripted([called("shout", {})], [called("shout", {"text": "hi"})], [called("reset", {})], "done")
    async with played(interface="tools") as (bench, double):
        found = await rollout(SimpleAgent, bench, policy)
        outputs = [i["output"] for i in found["response"]["output"] if i["type"] == "function_call_output"]
        assert "text is missing" in outputs[0]
        assert outputs[1] == '"HI"'
        assert "There is no tool" in outputs[2]
        assert found["reward"] == 0.5
        assert [tool["name"] for tool in policy.asked[0]["tools"]] == ["shout"]
    assert double.open == 0


@pytest.mark.parametrize(
    ("word", "error", "words"),
    [("break", ToolFailed, "it broke"), ("end", SessionLost, "ended the connection")],
)
async def test_failures_of_a_step(word, error, words):
    async with played() as (bench, _):
        await bench.call("reset", ROW)
        with pytest.raises(error, match=words):
            await bench.call("step", {**ROW, "response": {"output": said(word)}})


async def test_an_environment_that_is_full():
    async with played() as (bench, double):
        with pytest.raises(Overloaded, match="8 of 8"):
            await bench.call("reset", {**ROW, "verifier_metadata": {"options": {"full": True}}})
        assert bench.host.server.live_sessions == 0
    assert double.open == 0


async def test_a_call_that_was_given_up_leaves_no_answer_to_the_next():
    async with played() as (bench, _):
        await bench.call("reset", ROW)
        body = json.dumps({**ROW, "response": {"output": said("hang")}}).encode()
        reply = await bench.host.dispatch(Call("step", body, bench.session, timeout=1.0))
        assert reply.status == 504
        with pytest.raises(SessionLost):
            await bench.call("step", {**ROW, "response": {"output": said("gym")}})


async def test_environments_that_cannot_be_had():
    with pytest.raises(Unavailable, match="schema of its actions"):
        await ServerRunner(OpenEnv(url="http://127.0.0.1:9")).start()
    with pytest.raises(Unavailable, match="cannot connect to"):
        await ServerRunner(OpenEnv(url="http://127.0.0.1:9", interface="tools")).start()


async def test_openenv_is_not_installed(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "openenv.core.env_server.interfaces", None)
    with pytest.raises(GraphError, match=r"pip install 'gym-serve\[openenv\]'"):
        await ServerRunner(OpenEnv(env="json:loads", interface="tools")).start()


@pytest.mark.parametrize(
    "settings", [{}, {"url": "http://a", "env": "a:B"}, {"env": "a:B"}, {"url": "ftp://a"}, {"env": "a b"}]
)
def test_settings_that_do_not_fit(settings):
    with pytest.raises(ValueError, match=r"url|env|action"):
        OpenEnv(**settings)


@given(st.text())
def test_a_models_text_is_an_action_or_refused(text):
    assert action_in(text, "message") == {"message": text}
    try:
        assert isinstance(action_in(text, None), dict)
    except InvalidRequest:
        return


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ('{"x": 1}', {"x": 1}),
        ('I move.\n```json\n{"x": 1}\n```', {"x": 1}),
        ('```\n{"x": 1}\n```\nor\n```\n{"x": 2}\n```\nthere', {"x": 2}),
    ],
)
def test_actions_as_json(text, action):
    assert action_in(text, None) == action


def test_the_only_text_that_an_action_needs():
    assert text_field(GUESS) == "word"
    assert text_field(MOVE) is None
    assert text_field({}) is None
    assert text_field({"required": ["n"], "properties": {"n": {"type": "integer"}}}) is None


@pytest.mark.parametrize(
    ("observation", "field", "text"),
    [
        ({"text": "hello", "metadata": {"a": 1}}, None, "hello"),
        ({"text": "hello", "board": [1]}, None, '{"text":"hello","board":[1]}'),
        ({"text": "hello", "board": [1]}, "text", "hello"),
        ({"text": "hello", "board": [1]}, "board", "[1]"),
        ({"metadata": {"status": "ready"}}, None, '{"metadata":{"status":"ready"}}'),
        ({}, "text", ""),
    ],
)
def test_observations(observation, field, text):
    assert observation_text(observation, field) == text


@pytest.mark.parametrize(
    ("observation", "result"),
    [
        ({"result": {"content": [{"text": "a"}, {"text": "b"}]}}, ("a\nb", None)),
        ({"result": {"content": [], "data": {"n": 1}}}, ({"n": 1}, None)),
        ({"result": {"content": [{"text": "no"}], "is_error": True}}, (None, "no")),
        ({"result": 3}, (3, None)),
        ({"error": {"message": "gone"}}, (None, "gone")),
        ({"error": {"error_type": "timeout"}}, (None, "{'error_type': 'timeout'}")),
    ],
)
def test_tool_results(observation, result):
    assert tool_result(observation) == result

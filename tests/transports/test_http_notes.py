"""What a server at a URL tells of its calls: as much as one of the graph, and no more than it can know."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.in_process import serving

from gym_serve import Gym, ModelClient, ModelServer, ResourcesServer, tool
from gym_serve.graph import resolve
from gym_serve.graph.spec import GraphSpec
from gym_serve.observe.timeline import Recorder
from gym_serve.servers.transport import Reply
from gym_serve.transports import NOTES_HEADER, split_notes, with_notes
from gym_serve.types.errors import VerifierFailed
from gym_serve.types.timeline import Step, Timeline

ROW = {"responses_create_params": {"input": "Hi"}}
LONG = "Is it a yes? " * 1000  # longer than any header


class Policy(ModelServer):
    async def responses(self, body: dict[str, Any]) -> dict[str, Any]:
        item: dict[str, Any] = {"type": "message", "role": "assistant", "content": "Done"}
        if len(body["input"]) == 1:
            item = {"type": "function_call", "call_id": "c", "name": "ask", "arguments": '{"n": 1}'}
        return {"id": "r", "output": [item], "created_at": 1, "model": "p", "object": "response"}


class Judge(ModelServer):
    async def chat_completions(self, body: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": 0, "message": {"role": "assistant", "content": "5"}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 3, "completion_tokens": 1}
        return {"id": "c", "created": 0, "model": "j", "choices": [choice], "usage": usage}


class Judged(ResourcesServer):
    class Config(ResourcesServer.Config):
        judge: ModelClient
        fails: bool = False

    config: Config

    @tool
    async def ask(self, n: int) -> str:
        """Ask a model."""
        await self.config.judge.chat_completions({"messages": [{"role": "user", "content": "Yes?"}]})
        return "yes"

    async def verify(self) -> float:
        await self.config.judge.chat_completions({"messages": [{"role": "user", "content": LONG}]})
        if self.config.fails:
            raise VerifierFailed("no verdict")
        return 1.0


def graph(url: str | None) -> dict[str, Any]:
    """The graph, with its environments and its policy at a URL if one is given."""
    here = {
        "models": {"policy": {"type": Policy}, "judge": {"type": Judge}},
        "resources": {
            "env": {"type": Judged, "judge": "judge"},
            "bad": {"type": Judged, "judge": "judge", "fails": True},
        },
    }
    at = {
        "models": {"policy": {"type": "http", "url": f"{url}/policy"}},
        "resources": {name: {"type": "http", "url": f"{url}/{name}"} for name in ("env", "bad")},
    }
    agents = {
        f"{name}_agent": {"type": "simple_agent", "model": "policy", "resources": name}
        for name in ("env", "bad")
    }
    return {**(here if url is None else at), "agents": agents}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(lambda url: {"": resolve(GraphSpec.model_validate(graph(None)))}) as base:
        yield base


def steps_of(gym: Gym, agent: str) -> tuple[dict[str, Any], list[Step]]:
    [rollout] = gym.run([ROW], agent=agent)
    timeline = rollout.timeline
    assert timeline is not None
    return rollout, timeline.steps


@pytest.mark.parametrize("agent", ["env_agent", "bad_agent"])
def test_judges_are_in_the_timeline_also_where_their_environment_is_at_a_url(url: str, agent: str) -> None:
    with Gym.from_graph(graph(None), ray=False) as near, Gym.from_graph(graph(url), ray=False) as far:
        rollout, steps = steps_of(near, agent)
        remote, over_http = steps_of(far, agent)
    told = [(s.kind, s.stage, s.server, s.status, s.name, s.output_tokens, s.prompt, s.answer) for s in steps]
    assert told == [
        (s.kind, s.stage, s.server, s.status, s.name, s.output_tokens, s.prompt, s.answer) for s in over_http
    ]
    judged = [step for step in over_http if step.stage == "verify"]
    assert [(step.server, step.prompt, step.answer) for step in judged] == [("judge", LONG, "5")]
    [verify] = [step for step in over_http if step.kind == "verify"]
    assert verify.start <= judged[0].end <= verify.end + 1e-4
    for each in (rollout, remote):
        del each["_ng_timeline"], each["_ng_latency_s"]
    assert remote == rollout


def test_who_does_not_ask_gets_no_notes(url: str) -> None:
    body = {**ROW, "response": {"output": []}}
    plain = httpx.post(f"{url}/env/verify", json=body)
    assert NOTES_HEADER not in plain.headers
    assert plain.json() == {**body, "reward": 1.0, "model_usage": plain.json()["model_usage"]}
    asked = httpx.post(f"{url}/env/verify", json=body, headers={NOTES_HEADER: "1"})
    size = int(asked.headers[NOTES_HEADER])
    assert asked.content[:-size] == plain.content
    assert LONG in asked.text


def notes(**changes: Any) -> dict[str, Any]:
    """Notes of an environment that called its judge half a second ago, in a call that has taken a second."""
    step = {"ts": 9_500_000, "dur": 400_000, "server": 0, "stage": "verify", **changes}
    array = ["model", step["ts"], step["dur"], 0, step["server"], 1, 0, 1, "stop", {"stage": step["stage"]}]
    return {"model_calls": {"age": 10_000_000, "servers": ["judge"], "endpoints": [], "steps": [array]}}


def read(told: Any, body: bytes = b"{}") -> tuple[bytes, Any]:
    data = json.dumps(told).encode()
    return split_notes(body + data, str(len(data)), 1.0)


def test_notes_arrive_as_they_were_told() -> None:
    told = {**notes(), "replica": "r1", "queued": 7, "endpoint": "http://e", "retries": 1, "ttft": 5}
    content, headers = with_notes(Reply(200, b'"a tool"', notes={**told, "usage": {}, "unknown": 1}))
    assert split_notes(content, headers[NOTES_HEADER], 1.0) == (b'"a tool"', told)
    assert with_notes(Reply(200, b"{}", notes={"usage": {}})) == (b"{}", {})


@pytest.mark.parametrize(
    "forged",
    [
        {"stage": None},  # a call of the agent's
        {"ts": 8_000_000},  # before the call
        {"ts": 9_900_000},  # it would end after it
        {"dur": -5},
        {"server": 1},
    ],
)
def test_a_step_that_is_not_of_the_call_is_not_believed(forged: dict[str, Any]) -> None:
    body, believed = read(notes(**forged))
    assert body == b"{}"
    assert believed["model_calls"]["steps"] == []
    assert len(read(notes())[1]["model_calls"]["steps"]) == 1


def test_a_server_waited_no_longer_than_its_call_took() -> None:
    assert read({"queued": 10**9, "ttft": 10**9})[1] == {"queued": 1_000_000, "ttft": 1_000_000}


@pytest.mark.parametrize(
    "told",
    [
        {"timeline": {}, "replica": 5},
        {
            "model_calls": {
                "age": 1,
                "servers": [],
                "endpoints": [],
                "steps": [["tool", 0, 0, 0, 0, "a", 1, 1]],
            }
        },
        {"endpoint": "x" * 3000},
        {"queued": -1},
        5,
    ],
)
def test_what_are_no_notes_is_body(told: Any) -> None:
    body, believed = read(told)
    assert (body, believed) == (b"{}" + json.dumps(told).encode(), None)


def test_an_agents_timeline_is_no_note_of_another_graph() -> None:
    assert read({"timeline": {"steps": []}}) == (b"{}", {})


@given(st.binary(max_size=40), st.none() | st.text(max_size=4) | st.integers(-5, 50).map(str))
def test_no_answer_breaks_the_reader(content: bytes, length: str | None) -> None:
    body, believed = split_notes(content, length, 1.0)
    assert content.startswith(body)
    assert believed is None or isinstance(believed, dict)


def test_too_many_texts_are_left_out() -> None:
    recorder = Recorder(texts=True)
    for _ in range(50):
        asked = {"messages": [{"role": "user", "content": "x" * 200_000}]}
        recorder.add_model_call("verify", 0.0, "judge", {"choices": []}, request=asked)
    content, headers = with_notes(Reply(200, b"{}", notes={"model_calls": recorder.take()}))
    body, believed = split_notes(content, headers[NOTES_HEADER], 1e9)
    assert body == b"{}"
    assert believed is not None
    agent = Recorder()
    agent.take_notes(believed)
    timeline = Timeline.of({"_ng_timeline": agent.to_json("agent", {}, 0.0, 1.0)})
    assert timeline is not None
    assert [(step.server, step.prompt) for step in timeline.steps] == [("judge", None)] * 50

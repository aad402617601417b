"""The timeline of a rollout: which calls it has, how large it is, and that no foreign one breaks a reader."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.upstream import ChatEndpoint

from gym_serve import (
    EnvironmentClient,
    Gym,
    ModelClient,
    ModelServer,
    ResourcesServer,
    Rollout,
    ServerRunner,
    tool,
)
from gym_serve.deployments.simple_agent import SimpleAgent
from gym_serve.observe.timeline import Recorder
from gym_serve.servers.transport import Call, Reply
from gym_serve.transports import InlineTransport
from gym_serve.types.errors import Unavailable
from gym_serve.types.timeline import TIMELINE_FIELD, Step, Timeline

ROWS = "environments/simple_weather/data/example.jsonl"
ROW = {"responses_create_params": {"input": "Hi"}}


class Policy(ModelServer):
    """Calls the tool once, then stops at its limit."""

    async def responses(self, body: dict[str, Any]) -> dict[str, Any]:
        item: dict[str, Any] = {"type": "message", "role": "assistant", "content": "Done"}
        cut = {"reason": "max_output_tokens"}
        if len(body["input"]) == 1:
            item, cut = {"type": "function_call", "call_id": "c", "name": "ask", "arguments": '{"n": 1}'}, {}
        item["weight_version"] = "17"
        usage = {"input_tokens": 10, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 2}
        return {"id": "r", "output": [item], "usage": usage, "incomplete_details": cut or None}


class Judge(ModelServer):
    class Config(ModelServer.Config):
        broken: bool = False

    config: Config

    async def chat_completions(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.config.broken:
            raise Unavailable("down")
        choice = {"index": 0, "message": {"role": "assistant", "content": "5"}, "finish_reason": "stop"}
        return {"id": "c", "created": 0, "model": "j", "choices": [choice]}


class Judged(ResourcesServer):
    class Config(ResourcesServer.Config):
        judge: ModelClient

    config: Config

    @tool
    async def ask(self, n: int) -> str:
        """Ask a model."""
        await self.config.judge.chat_completions({"messages": [{"role": "user", "content": "Is it a yes?"}]})
        return "yes"

    async def verify(self) -> float:
        await self.config.judge.responses({"input": "good?"})
        return 1.0


async def rollout_of(*, broken: bool = False, timeline: bool = True) -> Rollout:
    judge = ServerRunner(Judge(name="judge", broken=broken), "j1")
    env = ServerRunner(Judged(name="env", judge=ModelClient(InlineTransport(judge)), replica="e1"))
    policy = ModelClient(InlineTransport(ServerRunner(Policy(name="policy"), "p1")))
    agent = SimpleAgent(
        name="agent", model=policy, resources=EnvironmentClient(InlineTransport(env)), timeline=timeline
    )
    call = Call("run", json.dumps(ROW).encode(), waited=0.25)
    return Rollout((await ServerRunner(agent, "a1").dispatch(call)).json())


async def test_every_call_is_a_step_also_those_of_the_environment() -> None:
    before = time.time()
    rollout = await rollout_of()
    timeline = rollout.timeline
    assert timeline is not None
    assert before <= timeline.began <= time.time()
    assert (timeline.agent, timeline.replica, timeline.queued) == ("agent", "a1", 0.25)
    assert [(s.kind, s.stage, s.server, s.replica) for s in timeline.steps] == [
        ("seed", None, "env", "e1"),
        ("model", None, "policy", "p1"),
        ("model", "tool", "judge", "j1"),
        ("tool", None, "env", "e1"),
        ("model", None, "policy", "p1"),
        ("model", "verify", "judge", "j1"),
        ("verify", None, "env", "e1"),
    ]
    _, first, _, tool_call, last, judge, verify = timeline.steps
    assert (first.input_tokens, first.cached_tokens, first.output_tokens) == (10, 4, 2)
    assert (first.finish_reason, last.finish_reason, judge.finish_reason) == ("tool_calls", "length", "stop")
    assert (first.version, judge.version, judge.input_tokens) == ("17", None, None)
    assert (tool_call.name, tool_call.argument_bytes, tool_call.result_bytes) == ("ask", 8, 5)
    assert {step.status for step in timeline.steps} == {200}
    assert (judge.prompt, judge.answer) == ("good?", "5")
    assert {(step.prompt, step.answer) for step in (first, last, verify)} == {(None, None)}
    # A judge's call lies within its step, although another clock timed it.
    assert verify.start <= judge.start + 1e-4
    assert judge.end <= verify.end + 1e-4
    assert all(0 <= step.start <= step.end <= timeline.duration + 1e-5 for step in timeline.steps)


async def test_failed_calls_are_steps_with_their_status() -> None:
    rollout = await rollout_of(broken=True)
    assert rollout.failure is not None
    timeline = rollout.timeline
    assert timeline is not None
    assert [(s.kind, s.stage, s.status, s.replica) for s in timeline.steps] == [
        ("seed", None, 200, "e1"),
        ("model", None, 200, "p1"),
        ("model", "tool", 503, "j1"),
        ("tool", None, 503, "e1"),
    ]
    asked = timeline.steps[2]
    assert (asked.prompt, asked.answer) == ("Is it a yes?", None)


async def test_a_call_that_ran_out_of_time_is_a_step() -> None:
    class Slow(ModelServer):
        async def responses(self, body: dict[str, Any]) -> dict[str, Any]:
            await asyncio.sleep(60)
            return {}

    class Unserved(InlineTransport):
        """A model whose own limit never comes: the agent's does."""

        async def call(self, call: Call) -> Reply:
            return await super().call(call._replace(timeout=None))

    env = ServerRunner(Judged(name="env", judge=ModelClient(InlineTransport(ServerRunner(Judge())))))
    policy = ModelClient(Unserved(ServerRunner(Slow(name="policy"))))
    agent = SimpleAgent(
        name="agent", model=policy, resources=EnvironmentClient(InlineTransport(env)), model_timeout=0.05
    )
    call = Call("run", json.dumps(ROW).encode())
    rollout = Rollout((await ServerRunner(agent).dispatch(call)).json())
    assert rollout.failure is not None
    assert rollout.failure["kind"] == "model_timeout"
    timeline = rollout.timeline
    assert timeline is not None
    assert [(s.kind, s.status) for s in timeline.steps] == [("seed", 200), ("model", 504)]
    assert timeline.steps[1].duration >= 0.05


def test_endpoints_and_what_they_cost_are_in_the_steps() -> None:
    before = time.time()
    with ChatEndpoint("Oslo is cold.") as endpoint:
        endpoint.fails = 1
        model = {"type": "chat_model", "base_url": endpoint.url, "model": "m"}
        with Gym.from_graph("graphs/weather.yaml", overrides={"models.policy": model}, ray=False) as gym:
            gym.policy.update_weights("policy", "7")
            [rollout] = gym.run(ROWS, limit=1)
    assert rollout.timeline is not None
    [step] = [step for step in rollout.timeline.steps if step.kind == "model"]
    assert (step.endpoint, step.retries, step.version, step.finish_reason) == (endpoint.url, 1, "7", "stop")
    assert (step.input_tokens, step.cached_tokens, step.output_tokens) == (3, 0, 2)
    assert rollout["response"]["created_at"] == 1  # what the endpoint said
    assert before <= rollout.timeline.began


def test_a_rollout_says_when_it_was_created() -> None:
    before = time.time()
    with Gym.from_graph("graphs/weather.yaml", ray=False) as gym:
        rollouts = gym.run(ROWS)
    for rollout in rollouts:
        assert rollout.timeline is not None
        ended = rollout.timeline.began + rollout.timeline.duration
        assert before <= rollout.timeline.began <= rollout["response"]["created_at"] <= ended


async def test_a_setting_of_the_agent_switches_it_off() -> None:
    rollout = await rollout_of(timeline=False)
    assert TIMELINE_FIELD not in rollout
    assert rollout.timeline is None


def test_a_step_has_less_than_150_bytes() -> None:
    with Gym.from_graph("graphs/weather.yaml", ray=False) as gym:
        for rollout in gym.run(ROWS):
            size = len(json.dumps(rollout[TIMELINE_FIELD], separators=(",", ":")))
            assert size < 150 * len(rollout[TIMELINE_FIELD]["steps"])
    # A call that has every key there is, in an episode of minutes, with the tool call that follows it.
    notes = {"replica": "x7k2m9qa", "queued": 12_000, "ttft": 312_456, "endpoint": "http://10.0.0.7:8000/v1"}
    recorder, begun = Recorder(time.monotonic() - 100), time.monotonic() - 10
    answer = {"output": [{"type": "function_call", "weight_version": "1234"}]}
    tokens = (31_234, 30_000, 1_024)
    recorder.add_model_call("model", begun, "policy", answer, tokens=tokens, notes=notes)
    recorder.add("tool", begun, recorder.server("env/p3n8t5ub"), ("get_weather", 120, 4096), 200)
    assert len(json.dumps(recorder.steps, separators=(",", ":"))) < 2 * 150


JSONS = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(["began", "dur", "agent", "servers", "endpoints", "steps", "kind", "ts", "server"])


NUMBERS = st.just(0) | JSONS
STEPS = st.tuples(
    st.sampled_from(["seed", "model", "tool", "verify", "other"]), st.lists(NUMBERS, min_size=4, max_size=10)
).map(lambda step: [step[0], *step[1]])
LINE = {"began": 1.0, "dur": 1, "agent": "a/b", "servers": ["s"]}


@given(
    st.dictionaries(KEYS, JSONS | st.lists(st.dictionaries(KEYS, JSONS), max_size=2))
    | st.lists(STEPS, max_size=2).map(lambda steps: {**LINE, "steps": steps})
)
def test_no_foreign_timeline_breaks_a_reader(given_: dict[str, Any]) -> None:
    timeline = Timeline.of({TIMELINE_FIELD: given_})
    assert timeline is None or all(isinstance(step, Step) for step in timeline.steps)


@pytest.mark.parametrize("answer", [None, 5, {}, {"output": [None]}, {"output": 5}, {"choices": [None]}])
def test_no_answer_of_a_model_breaks_a_recorder(answer: Any) -> None:
    recorder = Recorder(texts=True)
    recorder.add_model_call("verify", 0.0, "policy", answer, request=answer)
    assert recorder.steps[0][0] == "model"


@pytest.mark.parametrize(
    ("asked", "prompt"),
    [
        ({"input": "Right?", "instructions": "Be strict."}, "system: Be strict.\n\nuser: Right?"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Right?"}]}]}, "Right?"),
        ({"model": "m", "text_1": "a", "text_2": "b"}, '{"model":"m","text_1":"a","text_2":"b"}'),
        ({"input": "half a \ud800 pair"}, "half a ? pair"),
        ({"input": "x" * 200_000}, "x" * 100_000 + "…"),
    ],
)
def test_what_a_judge_was_asked_is_kept_as_text(asked: Any, prompt: str) -> None:
    recorder = Recorder(texts=True)
    recorder.add_model_call("verify", 0.0, "judge", {"data": [{"score": 0.5}]}, request=asked)
    more = recorder.steps[0][-1]
    assert (more["prompt"], more["answer"]) == (prompt, '{"data":[{"score":0.5}]}')

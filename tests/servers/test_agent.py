"""`AgentServer` and `simple_agent` without Ray: what goes upstream, and how an episode ends."""

import asyncio
import json
import sys
import time
from typing import Any

import pytest
from pydantic import BaseModel

from gym_serve import (
    EnvironmentClient,
    Episode,
    InvalidRequest,
    ModelClient,
    ResourcesServer,
    ServerRunner,
    Verdict,
    VerifyRequest,
    tool,
)
from gym_serve.deployments.simple_agent import SimpleAgent
from gym_serve.servers.context import current
from gym_serve.servers.transport import Call, encode
from gym_serve.transports import InlineTransport
from gym_serve.types.errors import DeadlineExceeded, GymError, Overloaded, SessionLost, Unavailable


def say(text: str, **tokens: Any) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "role": "assistant", "content": content, **tokens}


def call(name: str, arguments: str = "{}", call_id: str = "c", **tokens: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, **tokens}


def bundle(prompt: list[int], generation: list[int]) -> dict[str, Any]:
    return {
        "prompt_token_ids": prompt,
        "generation_token_ids": generation,
        "generation_log_probs": [-0.5] * len(generation),
    }


class FakeModel:
    """Answers with its turns in order and remembers what it was asked."""

    def __init__(self, *turns: list[dict[str, Any]], usage: Any = None) -> None:
        self.turns = list(turns)
        self.asked: list[dict[str, Any]] = []
        self.usage = usage

    async def responses(self, params: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(params)
        return {"id": f"r{len(self.asked)}", "output": self.turns[len(self.asked) - 1], "usage": self.usage}

    async def chat_completions(self, body: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError("the agent speaks Responses")


class Bell(ResourcesServer):
    class Session(BaseModel):
        rung: int = 0

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.closed = 0
        self.started = asyncio.Event()

    @tool
    async def ring(self, session: Session) -> int:
        session.rung += 1
        return session.rung

    @tool
    async def ring_slowly(self) -> str:
        self.started.set()
        await asyncio.sleep(0.01)
        return "dong"

    @tool
    async def wait(self) -> None:
        self.started.set()
        await asyncio.Event().wait()

    async def verify(self, request: VerifyRequest, session: Session) -> Verdict:
        return Verdict(reward=float(session.rung))

    async def close(self, session: Session) -> None:
        self.closed += 1


def agent(model: FakeModel, bell: Bell, **settings: Any) -> SimpleAgent:
    return SimpleAgent(
        model=model, resources=EnvironmentClient(InlineTransport(ServerRunner(bell))), **settings
    )


ROW = {"responses_create_params": {"input": "go"}, "id": 7}


async def test_only_the_last_token_bundle_goes_upstream_and_all_come_back() -> None:
    first, second = call("ring", **bundle([1], [2])), call("ring", **bundle([1, 2, 3], [4]))
    model = FakeModel([first], [second], [say("x", **bundle([1, 2, 3, 4, 5], [6]))])
    rollout = await agent(model, Bell()).run(ROW)
    upstream = [[item for item in asked["input"] if "prompt_token_ids" in item] for asked in model.asked]
    assert [len(bundles) for bundles in upstream] == [0, 1, 1]
    assert upstream[2][0]["prompt_token_ids"] == [1, 2, 3]
    returned = [i["prompt_token_ids"] for i in rollout["response"]["output"] if "prompt_token_ids" in i]
    assert returned == [[1], [1, 2, 3], [1, 2, 3, 4, 5]]


@pytest.mark.parametrize("who", ["caller", "transport"])
async def test_a_stage_that_is_late_says_the_same_whoever_notices_first(who: str) -> None:
    class Late(FakeModel):
        async def responses(self, params: dict[str, Any]) -> dict[str, Any]:
            if who == "transport":
                time.sleep(current().timeout() or 0.0)  # noqa: ASYNC251  # the caller's timer has not rung yet
                raise DeadlineExceeded("no answer in time", server="transport")
            await asyncio.Event().wait()
            raise AssertionError

    failure = (await agent(Late(), Bell(), model_timeout=0.05).run(ROW))["failure"]
    assert (failure["kind"], failure["stage"], failure.get("server")) == ("model_timeout", "model", None)
    assert failure["detail"] == "the model ran out of time (model_timeout: 0.05 s)"


async def test_sampling_that_responses_lack_travels_in_the_metadata() -> None:
    model = FakeModel([say("x")])
    row = {**ROW, "extra_body": {"seed": 3, "top_k": 5}, "chat_template_kwargs": {"enable_thinking": False}}
    row["responses_create_params"] = {"input": "go", "metadata": {"extra_body": '{"top_k": 1, "min_p": 0.1}'}}
    rollout = await agent(model, Bell()).run(row)
    assert model.asked[0]["metadata"] == {
        "extra_body": '{"top_k":5,"min_p":0.1,"seed":3}',
        "chat_template_kwargs": '{"enable_thinking":false}',
    }
    assert {key: rollout[key] for key in row} == row


async def test_the_model_gets_the_tools_of_the_environment_where_the_row_says_nothing() -> None:
    model = FakeModel([call("ring")], [say("x")])
    rollout = await agent(model, Bell()).run(ROW)
    assert [tool["name"] for tool in model.asked[0]["tools"]] == ["ring", "ring_slowly", "wait"]
    assert (rollout["reward"], rollout["responses_create_params"]) == (1, ROW["responses_create_params"])


async def test_a_row_with_tools_is_asked_as_it_is() -> None:
    tools = [{"type": "function", "name": "ring"}]
    model = FakeModel([call("ring")], [say("x")])
    rollout = await agent(model, Bell()).run({"responses_create_params": {"input": "go", "tools": tools}})
    assert (model.asked[0]["tools"], rollout["reward"]) == (tools, 1)


async def test_a_row_with_an_empty_list_of_tools_has_none() -> None:
    model = FakeModel([call("ring")], [say("x")])
    rollout = await agent(model, Bell()).run({"responses_create_params": {"input": "go", "tools": []}})
    assert model.asked[0]["tools"] == []
    assert "no tool named 'ring'" in rollout["response"]["output"][1]["output"]
    assert rollout["reward"] == 0


async def test_tools_that_an_environment_finds_go_to_every_row_that_brings_none() -> None:
    class Found(Bell):
        async def seed(self, row: dict[str, Any], session: Any) -> dict[str, Any]:
            return {"tools": [type(self).tools["ring"].openai()]}

    for tools in ({}, {"tools": []}):
        model = FakeModel([call("ring_slowly")], [call("ring")], [say("x")])
        row = {"responses_create_params": {"input": "go", **tools}}
        rollout = await agent(model, Found()).run(row)
        assert [tool["name"] for tool in model.asked[0]["tools"]] == ["ring"]
        assert "no tool named" in rollout["response"]["output"][1]["output"]
        assert rollout["reward"] == 1


@pytest.mark.parametrize("error", [Overloaded, Unavailable, DeadlineExceeded])
async def test_what_a_tool_that_is_unavailable_does_is_the_servers_setting(error: type[GymError]) -> None:
    class Sick(Bell):
        @tool
        async def ring(self, session: Bell.Session) -> int:
            raise error("the search is busy")

    async def ran(**settings: Any) -> dict[str, Any]:
        return await agent(FakeModel([call("ring")], [say("x")]), Sick(**settings)).run(ROW)

    failed = await ran()
    assert (failed["failure"]["stage"], failed["failure"]["retryable"]) == ("tool", True)
    shown = await ran(unavailable_tools="show")
    assert shown["reward"] == 0
    assert "_ng_failure_class" not in shown
    told = json.loads(shown["response"]["output"][1]["output"])["error"]
    assert (told["code"], told["message"]) == ("tool_failed", "the search is busy")


async def test_a_session_that_is_lost_is_no_answer_of_a_tool() -> None:
    class Lost(Bell):
        @tool
        async def ring(self, session: Bell.Session) -> int:
            raise SessionLost("the shop behind it is gone")

    rollout = await agent(FakeModel([call("ring")]), Lost(unavailable_tools="show")).run(ROW)
    assert rollout["failure"]["kind"] == "session_lost"


@pytest.mark.parametrize("max_steps", [0, None])
async def test_without_a_limit_of_steps_the_model_ends_the_episode(max_steps: int | None) -> None:
    turns = [[call("ring")] for _ in range(100)]
    rollout = await agent(FakeModel(*turns, [say("x")]), Bell(), max_steps=max_steps).run(ROW)
    assert rollout["reward"] == 100
    assert (await agent(FakeModel(*turns), Bell(), max_steps=3).run(ROW))["reward"] == 3


async def test_verification_can_be_skipped() -> None:
    class Unasked(Bell):
        async def verify(self, request: VerifyRequest, session: Bell.Session) -> Verdict:
            raise AssertionError("nobody asks")

    bell = Unasked()
    skipping = agent(FakeModel([say("x")]), bell, skip_verification=True, skip_verification_reward=0.5)
    rollout = await skipping.run(ROW)
    assert {key: rollout[key] for key in ("id", "reward", "verification_skipped")} == {
        "id": 7,
        "reward": 0.5,
        "verification_skipped": True,
    }
    assert rollout["response"]["output"] == [say("x")]
    assert bell.closed == 1
    metrics = await skipping.aggregate({"verify_responses": [rollout]})
    assert (metrics["group_level_metrics"], metrics["agent_metrics"], metrics["key_metrics"]) == ([], {}, {})
    assert "verification_skipped" not in await agent(FakeModel([say("x")]), Bell()).run(ROW)


async def test_a_name_that_the_row_does_not_declare_is_no_tool() -> None:
    row = {"responses_create_params": {"input": "go", "tools": [{"type": "function", "name": "ring_slowly"}]}}
    rollout = await agent(FakeModel([call("ring")], [say("x")]), Bell()).run(row)
    assert "no tool named" in rollout["response"]["output"][1]["output"]
    assert rollout["reward"] == 0


@pytest.mark.parametrize("name", [["ring"], {"name": "ring"}, 7, None, "a b", "../verify"])
async def test_a_name_that_is_none_is_no_tool(name: Any) -> None:
    row = {"responses_create_params": {"input": "go", "tools": [{"type": "function", "name": "ring"}]}}
    rollout = await agent(FakeModel([call(name)], [say("x")]), Bell()).run(row)
    assert "no tool named" in rollout["response"]["output"][1]["output"]
    assert rollout["reward"] == 0


@pytest.mark.parametrize(
    "depth",
    [
        # Some depth can be read, but not sent on. From Python 3.12 this one can.
        pytest.param(1000, marks=pytest.mark.skipif(sys.version_info >= (3, 12), reason="it is sent on")),
        50_000,
    ],
)
async def test_arguments_that_are_too_deep_are_told_to_the_model(depth: int) -> None:
    deep = '{"times": ' + depth * "[" + depth * "]" + "}"
    rollout = await agent(FakeModel([call("ring", deep)], [call("ring")], [say("x")]), Bell()).run(ROW)
    assert "nested too deeply" in rollout["response"]["output"][1]["output"]
    assert rollout["reward"] == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("{'times': 1}", "JSONDecodeError('Expecting property name enclosed in double quotes: "),
        ('{"times": 1}}', "JSONDecodeError('Extra data: line 1 column 13 (char 12)')"),
        ('{"times": NaN}', "ValueError('NaN is no JSON')"),
        ('{"times": 1e999, "more": 123456789012345678901}', "ValueError('1e999 is no JSON')"),
        ('{"times": 1' + 5000 * "0" + "}", "ValueError('Exceeds the limit"),
        (100_000 * "[", "nested too deeply"),
    ],
)
async def test_arguments_that_are_no_json_are_told_to_the_model(arguments: str, said: str) -> None:
    rollout = await agent(FakeModel([call("ring", arguments)], [say("x")]), Bell()).run(ROW)
    output = json.loads(rollout["response"]["output"][1]["output"])
    assert output["error"].startswith(f"Invalid tool call arguments: {said}")
    assert rollout["reward"] == 0


async def test_a_tool_without_a_usable_name_declares_nothing() -> None:
    tools = [{"type": "function", "name": ["ring"]}, {"type": "function", "name": "ring"}]
    row = {"responses_create_params": {"input": "go", "tools": tools}}
    assert (await agent(FakeModel([call("ring")], [say("x")]), Bell()).run(row))["reward"] == 1


async def test_tools_run_one_after_the_other_unless_parallel_is_asked_for() -> None:
    calls = [call("ring_slowly", call_id=f"c{n}") for n in range(5)]
    for parallel in (False, True):
        rollout = await agent(FakeModel(calls, [say("x")]), Bell(), parallel_tools=parallel).run(ROW)
        outputs = [i["call_id"] for i in rollout["response"]["output"] if i["type"] == "function_call_output"]
        assert outputs == [f"c{n}" for n in range(5)]


async def test_usage_is_summed_and_stays_null_where_nobody_counts() -> None:
    usage = {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}
    rollout = await agent(FakeModel([call("ring")], [say("x")], usage=usage), Bell()).run(ROW)
    assert rollout["response"]["usage"]["total_tokens"] == 10
    rollout = await agent(FakeModel([call("ring")], [say("x")]), Bell()).run(ROW)
    assert rollout["response"]["usage"] is None


@pytest.mark.parametrize("ending", ["cancelled", "episode deadline", "tool deadline"])
async def test_the_session_is_closed_on_every_way_out(ending: str) -> None:
    bell = Bell()
    limits = {"episode deadline": {"episode_timeout": 0.05}, "tool deadline": {"tool_timeout": 0.05}}
    runs = agent(FakeModel([call("wait")]), bell, **limits.get(ending, {}))
    task = asyncio.create_task(runs.run(ROW))
    await bell.started.wait()
    if ending == "cancelled":
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await runs.stop()
    else:
        rollout = await task
        assert rollout["stopped_by"] == ending.replace(" ", "_")
        assert "_ng_failure_class" not in rollout
    assert bell.closed == 1
    assert len(bell.sessions) == 0


async def test_an_agent_that_waits_for_something_else_ends_with_the_episode() -> None:
    class Waiting(SimpleAgent):
        async def act(self, episode: Episode) -> None:
            await asyncio.Event().wait()

    bell = Bell()
    waiting = Waiting(
        model=FakeModel(),
        resources=EnvironmentClient(InlineTransport(ServerRunner(bell))),
        episode_timeout=0.05,
    )
    rollout = await waiting.run(ROW)
    assert (rollout["stopped_by"], rollout["reward"]) == ("episode_deadline", 0)
    assert rollout["reason"] == "the episode ran out of time (episode_timeout: 0.05 s)"
    assert bell.closed == 1


async def test_a_time_out_of_the_agents_own_is_no_deadline() -> None:
    class Hasty(SimpleAgent):
        async def act(self, episode: Episode) -> None:
            await asyncio.wait_for(asyncio.Event().wait(), 0.01)

    hasty = Hasty(model=FakeModel(), resources=EnvironmentClient(InlineTransport(ServerRunner(Bell()))))
    failure = (await hasty.run(ROW))["failure"]
    assert failure["kind"] == "unavailable"
    assert "in act: TimeoutError" in failure["detail"]


async def test_an_agent_that_breaks_is_a_failed_rollout() -> None:
    rollout = await agent(FakeModel(), Bell()).run(ROW)  # a model without turns raises IndexError
    assert rollout["_ng_failure_class"] == "agent_failed"
    assert "IndexError" in rollout["failure"]["detail"]
    assert rollout["id"] == 7


async def test_responses_is_a_whole_episode_without_verify() -> None:
    bell = Bell()
    host = ServerRunner(agent(FakeModel([call("ring")], [say("done")]), bell))
    reply = await host.dispatch(Call("v1/responses", encode({"input": "go"})))
    assert [item["type"] for item in reply.json()["output"]] == [
        "function_call",
        "function_call_output",
        "message",
    ]
    assert bell.closed == 1


@pytest.mark.parametrize(
    ("asked", "offered"),
    [
        ({}, ["ring", "ring_slowly", "wait"]),
        ({"tools": None}, ["ring", "ring_slowly", "wait"]),
        ({"tools": []}, []),
    ],
)
async def test_an_endpoint_offers_the_tools_of_its_environment(
    asked: dict[str, Any], offered: list[str]
) -> None:
    model = FakeModel([say("done")])
    await agent(model, Bell()).responses({"input": "go", **asked})
    assert [tool["name"] for tool in model.asked[0].get("tools") or ()] == offered


class Particular(Bell):
    async def seed(self, row: dict[str, Any], session: Bell.Session) -> None:
        session.rung = row["verifier_metadata"]["rung"]


async def test_an_endpoint_whose_environment_needs_a_row_offers_none() -> None:
    model = FakeModel([say("done")])
    response = await agent(model, Particular()).responses({"input": "go"})
    assert response["output"] == [say("done")]
    assert "tools" not in model.asked[0]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, "responses_create_params"),
        ({"responses_create_params": {"input": "x", "temprature": 1, "topp": 1}}, "temprature"),
        ({"responses_create_params": {"input": 7}}, "input"),
        (
            {"responses_create_params": {"input": "x", "metadata": "abc"}, "extra_body": {"seed": 1}},
            "metadata",
        ),
        (
            {"responses_create_params": {"input": "x", "metadata": {"extra_body": "{"}}, "extra_body": {}},
            r"metadata\.extra_body",
        ),
        (
            {"responses_create_params": {"input": "x", "metadata": {"extra_body": "[1]"}}, "extra_body": {}},
            r"metadata\.extra_body",
        ),
        ([], "JSON object"),
    ],
)
async def test_a_row_that_breaks_the_contract_is_refused(row: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        await agent(FakeModel(), Bell()).run(row)


def test_a_model_is_any_object_with_its_methods_and_nothing_else() -> None:
    with pytest.raises(ValueError, match="name of a model server"):
        SimpleAgent(model=object(), resources="env")
    assert isinstance(SimpleAgent(model="policy", resources="env").config.model, str)
    assert issubclass(ModelClient, object)

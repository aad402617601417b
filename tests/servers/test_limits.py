"""What a policy gets that goes over a limit: a real result, never a failure."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from support.environments import Scripted

from gym_serve import EnvironmentClient, ResourcesServer, ServerRunner, Verdict, VerifyRequest, tool
from gym_serve.deployments.simple_agent import SimpleAgent
from gym_serve.servers.episode import shortened, written_bytes
from gym_serve.transports import InlineTransport

ROW = {"responses_create_params": {"input": "go"}}
TOKENS = {"prompt_token_ids": [1], "generation_token_ids": [2, 3], "generation_log_probs": [-0.1, -0.2]}


class Counter(ResourcesServer):
    class Session(BaseModel):
        calls: int = 0

    @tool
    async def count(self, session: Session) -> int:
        session.calls += 1
        return session.calls

    @tool
    async def echo(self, text: str, times: int, session: Session) -> str:
        session.calls += 1
        return text * times

    async def verify(self, request: VerifyRequest, session: Session) -> Verdict:
        return Verdict(reward=float(session.calls))


def call(name: str = "count", **arguments: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": "c", "name": name, "arguments": json.dumps(arguments)}


def say(text: str, **more: Any) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "role": "assistant", "content": content, **more}


async def rollout_of(policy: Scripted, **settings: Any) -> dict[str, Any]:
    agent = SimpleAgent(
        model=policy, resources=EnvironmentClient(InlineTransport(ServerRunner(Counter()))), **settings
    )
    rollout = await agent.run(ROW)
    assert "failure" not in rollout
    return rollout


def outputs_of(rollout: dict[str, Any]) -> list[str]:
    return [i["output"] for i in rollout["response"]["output"] if i["type"] == "function_call_output"]


@pytest.mark.parametrize("parallel", [False, True])
async def test_of_many_calls_in_a_turn_the_first_ones_are_run(parallel: bool) -> None:
    policy = Scripted([call()] * 20_000, [say("done")])
    rollout = await rollout_of(policy, parallel_tools=parallel)
    outputs = outputs_of(rollout)
    assert (rollout["reward"], len(outputs), len(policy.asked)) == (128.0, 20_000, 2)
    assert outputs[:128] == [str(n) for n in range(1, 129)]
    assert all("at most 128 tool calls are run of a turn" in output for output in outputs[128:])


async def test_calls_of_an_episode_count_together() -> None:
    policy = Scripted([call()] * 3, [call()] * 3, [call()], [say("done")])
    rollout = await rollout_of(policy, max_tool_calls=4)
    assert rollout["reward"] == 4.0
    assert [output.isdigit() for output in outputs_of(rollout)] == [True] * 4 + [False] * 3


async def test_long_arguments_are_told_to_the_model() -> None:
    policy = Scripted([call("echo", text="é" * 100, times=1), call("echo", text="e", times=1)], [say("done")])
    rollout = await rollout_of(policy, max_argument_bytes=200)
    assert "longer than 200 bytes" in outputs_of(rollout)[0]
    assert (rollout["reward"], outputs_of(rollout)[1]) == (1.0, '"e"')


async def test_an_answer_over_the_limit_is_cut_and_verified() -> None:
    policy = Scripted([call()], [say("x" * 5000), call(), {**call(), **TOKENS}], [say("never asked for")])
    rollout = await rollout_of(policy, max_answer_bytes=2000)
    response = rollout["response"]
    assert (rollout["reward"], rollout["stopped_by"], len(policy.asked)) == (1.0, "max_answer_bytes", 2)
    assert (response["status"], response["incomplete_details"]["reason"]) == (
        "incomplete",
        "max_output_tokens",
    )
    last = response["output"][-1]
    assert last["content"][0]["text"].strip("x") == ""
    assert 1800 < written_bytes(last) < 2100
    assert {key: last[key] for key in TOKENS} == TOKENS


async def test_an_episode_over_the_limit_ends_and_is_verified() -> None:
    turn = [call("echo", text="e" * 100, times=5)]
    policy = Scripted(*[turn] * 30)
    rollout = await rollout_of(policy, max_episode_bytes=5000)
    assert rollout["stopped_by"] == "max_episode_bytes"
    assert rollout["reward"] == float(len(policy.asked)) < 10
    assert written_bytes(rollout["response"]["output"]) < 7000


@pytest.mark.parametrize(
    ("limit", "most"),
    [
        ("max_episode_tokens", 101),
        ("max_episode_cost", {"most": 0.0005, "input": 2.0, "output": 12.0}),  # 0.0002 a call
    ],
)
async def test_an_episode_that_has_used_up_its_tokens_ends_and_is_verified(limit: str, most: Any) -> None:
    usage = {"input_tokens": 40, "output_tokens": 10, "total_tokens": 50}
    turn = {"id": "r", "object": "response", "output": [call()], "usage": usage}
    policy = Scripted(*[turn] * 30)
    rollout = await rollout_of(policy, **{limit: most})
    assert (rollout["stopped_by"], rollout["reward"]) == (limit, 3.0)
    assert rollout["response"]["usage"]["total_tokens"] == 150


async def test_the_limit_of_steps_is_told() -> None:
    rollout = await rollout_of(Scripted(*[[call()]] * 30), max_steps=2)
    assert (rollout["stopped_by"], rollout["reward"]) == ("max_steps", 2.0)


async def test_an_output_that_has_no_room_is_not_kept() -> None:
    policy = Scripted([call("echo", text="e", times=10_000_000), call()], [say("done")])
    rollout = await rollout_of(policy, max_episode_bytes=100_000)
    assert "The output is too long: 10000002 bytes" in outputs_of(rollout)[0]
    assert (rollout["reward"], outputs_of(rollout)[1]) == (2.0, "2")


async def test_within_the_limits_nothing_is_touched() -> None:
    turn = [say("x" * 3_000_000), {**call(), **TOKENS}]
    rollout = await rollout_of(Scripted(turn, [say("done")]))
    assert rollout["response"]["output"][:2] == turn
    assert "stopped_by" not in rollout


def test_log_probabilities_and_tokens_are_not_what_a_policy_wrote() -> None:
    entries = [{"token": "x", "logprob": -0.1, "bytes": [120]}] * 1000
    item = say("x" * 1000, **{key: value * 1000 for key, value in TOKENS.items()})
    item["content"][0]["logprobs"] = entries
    assert shortened([item], 1200) is None


@pytest.mark.parametrize(
    "setting", [{"max_answer_bytes": 0}, {"max_tool_calls": -1}, {"max_episode_bytes": 1}]
)
def test_limits_that_nothing_could_keep_are_refused(setting: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        SimpleAgent(
            model=Scripted(), resources=EnvironmentClient(InlineTransport(ServerRunner(Counter()))), **setting
        )


TEXT = st.text(st.characters(), max_size=400)
ITEMS = st.lists(
    st.builds(say, TEXT)
    | st.builds(call, st.sampled_from(["count", "echo"]), text=TEXT)
    | st.builds(lambda t: {"type": "reasoning", "summary": [{"type": "summary_text", "text": x} for x in t]},
                st.lists(TEXT, max_size=4)),
    min_size=1, max_size=8,
)  # fmt: skip


@given(ITEMS, st.integers(600, 3000))
def test_what_is_cut_is_a_prefix_within_the_limit(items: list[dict[str, Any]], limit: int) -> None:
    items[-1] = {**items[-1], **TOKENS}
    cut = shortened(items, limit)
    if written_bytes(items) - len(items) <= limit:
        assert cut is None
        return
    assert cut is not None
    assert {key: cut[-1][key] for key in TOKENS} == TOKENS
    assert [item["type"] for item in cut] == [item["type"] for item in items[: len(cut)]]
    assert cut[:-1] == items[: len(cut) - 1]
    # The ids and types of the item at the border stay whole.
    assert written_bytes(cut) <= limit + 600
    json.dumps(cut)

"""The loopback model server: the official client reads its answers, and its faults are what they say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import aiohttp
import openai
import pytest

from benchmarks.loopback import Behaviour, RunningModelServer, run_model_server
from gym_serve.deployments.chat_model import ChatModel

QUESTION = {"role": "user", "content": 'Is "role":"tool" a tool message?'}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningModelServer]:
    behaviour = Behaviour(
        turns=2, calls_per_turn=2, tool="look", arguments='{"at":"x"}', answer="Seen.", tokens=3
    )
    with run_model_server(behaviour) as running:
        yield running


@pytest.fixture
def client(server: RunningModelServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def told(calls: list[Any]) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": call.id, "content": "nothing"} for call in calls]


def test_a_chat_episode_of_the_official_client(client: openai.OpenAI) -> None:
    messages: list[Any] = [QUESTION]
    ids = []
    seen: list[int] = []
    for _ in range(2):
        completion = client.chat.completions.create(model="any", messages=messages)
        (choice,) = completion.choices
        assert choice.finish_reason == "tool_calls"
        calls = choice.message.tool_calls or []
        assert [(call.function.name, call.function.arguments) for call in calls] == [
            ("look", '{"at":"x"}')
        ] * 2
        ids += [call.id for call in calls]
        extra = completion.model_extra or {}
        assert extra["prompt_token_ids"][: len(seen)] == seen
        seen = extra["prompt_token_ids"] + (choice.model_extra or {})["token_ids"]
        messages += [choice.message.model_dump(exclude_none=True), *told(calls)]
    assert len(set(ids)) == 4
    completion = client.chat.completions.create(model="any", messages=messages)
    (choice,) = completion.choices
    assert (choice.finish_reason, choice.message.content) == ("stop", "Seen.")
    assert (completion.model_extra or {})["prompt_token_ids"][: len(seen)] == seen
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 3


def test_a_responses_episode_of_the_official_client(client: openai.OpenAI) -> None:
    items: list[Any] = [QUESTION]
    for _ in range(2):
        response = client.responses.create(model="any", input=items)
        assert [item.type for item in response.output] == ["function_call"] * 2
        assert len((response.output[-1].model_extra or {})["generation_token_ids"]) == 3
        items += [
            item.model_dump(include={"type", "call_id", "name", "arguments"}) for item in response.output
        ]
        items += [
            {"type": "function_call_output", "call_id": item.call_id, "output": "nothing"}  # type: ignore[union-attr]
            for item in response.output
        ]
    assert client.responses.create(model="any", input=items).output_text == "Seen."


async def test_chat_model_reads_the_token_ids(server: RunningModelServer) -> None:
    model = ChatModel(name="policy", base_url=f"{server.url}/v1", model="any", return_token_ids=True)
    await model.start()
    response = await model.responses({"input": [QUESTION]})
    await model.stop()
    last = response["output"][-1]
    assert [
        len(last[key]) for key in ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
    ] == [3] * 3
    assert all(log_prob <= 0 for log_prob in last["generation_log_probs"])


async def test_faults_come_every_nth_request() -> None:
    faults: dict[Any, int] = {"overloaded": 2, "error": 3, "garbage": 5, "drop": 7}
    seen: list[Any] = []
    with run_model_server(Behaviour(faults=faults)) as running:
        async with aiohttp.ClientSession() as session:
            for _ in range(10):
                try:
                    async with session.post(f"{running.url}/v1/chat/completions", json={}) as answer:
                        body = await answer.read()
                        seen.append(answer.status)
                        if answer.status == 429:
                            assert float(answer.headers["retry-after"]) > 0
                        if answer.status == 200 and not body.endswith(b"}"):
                            seen[-1] = "garbage"
                except aiohttp.ServerDisconnectedError:
                    seen.append("drop")
        assert seen == [200, 429, 500, 429, "garbage", 429, "drop", 429, 500, 429]
        assert running.stats()["answered"] == 9

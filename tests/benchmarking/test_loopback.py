"""The loopback model server: the official client reads its answers, and its faults are what they say."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import openai
import pytest

from benchmarks.loopback import Behaviour, RunningModelServer, run_model_server
from benchmarks.loopback.server import Answers
from gym_serve.deployments.chat_model import ChatModel
from gym_serve.servers.context import CallContext, use
from gym_serve.types.errors import DeadlineExceeded, InvalidRequest, Unavailable

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


async def until_open(server: RunningModelServer, requests: int) -> dict[str, Any]:
    """The counts, once so many requests are open; the time limit of the test ends the wait otherwise."""
    while True:
        stats = await asyncio.to_thread(server.stats)
        if stats["open"] == requests:
            return stats
        await asyncio.sleep(0.01)


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


def test_models_and_what_it_refuses(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["loopback"]
    with pytest.raises(openai.BadRequestError, match="does not stream"):
        client.responses.create(model="any", input=[QUESTION], stream=True)  # type: ignore[list-item]
    with pytest.raises(openai.NotFoundError, match="routes"):
        client.embeddings.create(model="any", input="x")


def test_a_row_may_be_written_with_spaces() -> None:
    answers = Answers(Behaviour())
    said = {"messages": [QUESTION, {"role": "tool", "content": "x"}]}
    for separators in ((",", ":"), (", ", ": ")):
        assert b"That is all." in answers.chat(json.dumps(said, separators=separators).encode())


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


async def test_who_leaves_is_counted() -> None:
    with run_model_server(Behaviour(faults={"hang": 1})) as running:
        model = ChatModel(name="policy", base_url=f"{running.url}/v1", model="any")
        await model.start()
        with use(CallContext()):
            call = asyncio.create_task(model.responses({"input": [QUESTION]}))
            await until_open(running, 1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        stats = await until_open(running, 0)
        await model.stop()
    assert (stats["requests"], stats["answered"], stats["abandoned"]) == (1, 0, 1)


async def test_latency_holds_every_answer() -> None:
    with run_model_server(Behaviour(latency_ms=60_000)) as running:
        model = ChatModel(name="policy", base_url=f"{running.url}/v1", model="any", timeout=0.2)
        await model.start()
        with pytest.raises(DeadlineExceeded):
            await model.responses({"input": [QUESTION]})
        await model.stop()


def test_what_is_no_http_ends_its_own_connection_alone(server: RunningModelServer) -> None:
    address = ("127.0.0.1", urlsplit(server.url).port or 0)
    with socket.create_connection(address) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        received = b""
        while part := connection.recv(4096):
            received += part
    assert received.startswith(b"HTTP/1.1 400 ")
    assert server.stats()["open"] == 0


def test_a_request_in_many_pieces(server: RunningModelServer) -> None:
    address = ("127.0.0.1", urlsplit(server.url).port or 0)
    body = b'{"messages":[]}'
    request = b"POST /v1/chat/completions HTTP/1.1\r\nconnection: close\r\n"
    request += b"content-length: %d\r\n\r\n%b" % (len(body), body)
    with socket.create_connection(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for position in range(len(request)):
            connection.sendall(request[position : position + 1])
        received = b""
        while part := connection.recv(65536):
            received += part
    assert received.startswith(b"HTTP/1.1 200 ")
    assert b'"tool_calls"' in received


def test_what_cannot_be_meant() -> None:
    for wrong in ({"turns": -1}, {"calls_per_turn": 0}, {"latency_ms": -1.0}, {"faults": {"late": 1}}):
        with pytest.raises(InvalidRequest):
            Behaviour(**wrong)


def test_a_port_that_is_taken() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(Unavailable, match="did not start"),
        run_model_server(port=taken.getsockname()[1]),
    ):
        pass

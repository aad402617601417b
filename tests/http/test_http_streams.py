"""Streams while they are made: the official clients against a backend that streams token by token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from benchmarks.loopback import Behaviour, RunningModelServer, run_model_server

WORDS = 12
ANSWER = " ".join(f"word{i}" for i in range(WORDS))
ASK: Any = [{"role": "user", "content": "go"}]
STREAMS = 300
ENDLESS = " ".join(["word"] * 5000)


@pytest.fixture(scope="module")
def backends() -> Iterator[dict[str, RunningModelServer]]:
    """One that answers, and one that goes on for minutes."""
    with (
        run_model_server(Behaviour(turns=0, answer=ANSWER, tokens=WORDS, token_latency_ms=30)) as quick,
        run_model_server(Behaviour(turns=0, answer=ENDLESS, token_latency_ms=50)) as endless,
    ):
        yield {"quick": quick, "endless": endless}


@pytest.fixture(scope="module")
def streaming(deploy: Callable[..., Any], backends: dict[str, RunningModelServer]) -> str:
    """Address of a graph with a model at each of them."""
    models = {
        name: {
            "type": "chat_model",
            "base_url": f"{backend.url}/v1",
            "model": "m",
            "max_ongoing_requests": 1000,
        }
        for name, backend in backends.items()
    }
    url: str = deploy({"models": models, "gateway": {"max_ongoing_requests": 1000}}, name="streaming").url
    return url


def test_the_first_event_comes_before_the_last_token(
    streaming: str, backends: dict[str, RunningModelServer]
) -> None:
    def at_work() -> bool:
        return bool(backends["endless"].stats()["open"])

    with openai.OpenAI(base_url=f"{streaming}/endless/v1", api_key="none", max_retries=0) as client:
        with client.responses.create(model="m", input="go", stream=True) as events:
            kinds = [next(events).type for _ in range(5)]
            assert at_work()
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.output_text.delta"
        chat = client.chat.completions.create(model="m", messages=ASK, stream=True)
        with chat:
            assert next(chat).choices[0].delta.role == "assistant"
            assert at_work()


def ask_in_words(url: str) -> Iterator[str]:
    """The words of a call's stream; leaving it hangs up."""
    with (
        openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
        client.chat.completions.create(model="m", messages=ASK, stream=True) as chunks,
    ):
        yield from (text for chunk in chunks if (text := chunk.choices[0].delta.content))


def test_recorded_streams_are_live_as_well(streaming: str, backends: dict[str, RunningModelServer]) -> None:
    """Of one protocol: servers/test_capture_streams.py has all."""
    with httpx.Client(base_url=streaming, timeout=60) as client:
        id_ = client.post("/quick/rollouts").json()["id"]
        words = list(ask_in_words(f"{streaming}/quick/rollouts/{id_}/v1"))
        assert (len(words), "".join(words)) == (WORDS, ANSWER)
        found = client.get(f"/quick/rollouts/{id_}").json()  # recorded before its end was sent
        assert (found["calls"], found["unfinished"]) == (1, 0)
        (item,) = found["trajectories"][0]["response"]["output"]
        assert item["content"][0]["text"] == ANSWER

        id_ = client.post("/endless/rollouts").json()["id"]
        endless = ask_in_words(f"{streaming}/endless/rollouts/{id_}/v1")
        assert next(endless).strip() == "word"
        assert backends["endless"].stats()["open"]
        endless.close()  # type: ignore[attr-defined]
        while backends["endless"].stats()["open"]:
            pass  # the time limit of the test ends it
        found = client.get(f"/endless/rollouts/{id_}").json()
        assert (found["calls"], found["unfinished"]) == (0, 1)


async def test_many_streams_and_no_event_is_lost(streaming: str) -> None:
    limits = httpx.Limits(max_connections=STREAMS)
    async with httpx.AsyncClient(base_url=streaming, timeout=150, limits=limits) as client:

        async def text(number: int) -> str:
            said = ""
            body = {"input": f"go {number}", "stream": True}
            async with client.stream("POST", "/quick/v1/responses", json=body) as answer:
                assert answer.status_code == 200
                numbers = []
                async for line in answer.aiter_lines():
                    if line.startswith("data:"):
                        event = json.loads(line[5:])
                        numbers.append(event["sequence_number"])
                        said += event.get("delta", "")
            assert numbers == list(range(len(numbers)))
            assert event["type"] == "response.completed"
            return said

        assert set(await asyncio.gather(*map(text, range(STREAMS)))) == {ANSWER}


async def test_a_client_that_goes_away_ends_the_generation(
    streaming: str, backends: dict[str, RunningModelServer]
) -> None:
    async def opened() -> int:
        return int((await asyncio.to_thread(backends["endless"].stats))["open"])

    async with openai.AsyncOpenAI(
        base_url=f"{streaming}/endless/v1", api_key="none", max_retries=0
    ) as client:
        before = (await asyncio.to_thread(backends["endless"].stats))["abandoned"]
        streams = [
            await client.chat.completions.create(model="m", messages=ASK, stream=True) for _ in range(5)
        ]
        for stream in streams:
            await stream.__anext__()
        assert await opened() >= 5
        for stream in streams:
            await stream.close()
        while await opened():
            pass  # the time limit of the test ends it
        assert (await asyncio.to_thread(backends["endless"].stats))["abandoned"] >= before + 5

"""Streams of engines through the gateway: many at a time, and clients that go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import psutil
import pytest
from support.waiting import until

from gym_serve import Gym

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default"), pytest.mark.timeout(500)]

_TOKENS = 24
_MIB = 1 << 20


def _body(number: int, tokens: int) -> dict[str, Any]:
    extra = json.dumps({"ignore_eos": True, "structured_outputs": None})
    return {
        "input": f"Tell me of {number}",
        "stream": True,
        "max_output_tokens": tokens,
        "metadata": {"extra_body": extra},
    }


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    assert answer.status == 200, await answer.text()
    async for line in answer.content:
        if line.startswith(b"data:"):
            yield json.loads(line[5:])


def _memory(titles: tuple[str, ...]) -> float:
    """MiB that the processes with such titles have for themselves."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline() or [process.name()])
            if any(wanted in title for wanted in titles):
                total += process.memory_full_info().uss
        except psutil.NoSuchProcess:
            continue
    return total / _MIB


@pytest.mark.parametrize(("model", "streams"), [("policy", 100), ("gpu_judge", 500)])
async def test_no_event_of_many_streams_is_lost(judged: Gym, model: str, streams: int) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=400)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:

        async def one(number: int) -> None:
            body = _body(number, _TOKENS)
            async with client.post(f"{judged.url}/{model}/v1/responses", json=body) as answer:
                events = [event async for event in _events(answer)]
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            response = events[-1]["response"]
            assert response["usage"]["output_tokens"] == _TOKENS
            kinds = ("response.output_text.delta", "response.reasoning_summary_text.delta")
            deltas = (event for event in events if event["type"] in kinds)
            said = "".join(event["delta"] for event in deltas if event["item_id"].startswith("msg_"))
            # A lone </think> at the end of random words makes reasoning of what was told as text.
            told = [item for item in response["output"] if item["id"].startswith("msg_")]
            parts = (item.get("content") or item["summary"] for item in told)
            assert "".join(part[0]["text"] for part in parts) == said

        async def round_() -> None:
            await asyncio.gather(*map(one, range(streams)))

        titles = ("ProxyActor", "ServeReplica:math_gpu_judge:gateway", f"ServeReplica:math_gpu_judge:{model}")
        first = await asyncio.to_thread(_memory, titles)
        await round_()
        warm = await asyncio.to_thread(_memory, titles)
        await round_()
        again = await asyncio.to_thread(_memory, titles)
    print(
        f"{model}: {streams} streams; {first:.0f}, {warm:.0f}, {again:.0f} MiB before, after and after again"
    )
    assert again - warm < 100  # a round of streams leaves nothing behind but what the allocator keeps


@pytest.mark.parametrize("model", ["policy", "gpu_judge"])
async def test_a_client_that_goes_away_frees_its_place(judged: Gym, model: str) -> None:
    def running() -> int:
        return int(judged.call(model, "load")["running"])

    url = f"{judged.url}/{model}/v1/responses"
    async with aiohttp.ClientSession() as client:
        async with client.post(url, json=_body(1, 1900)) as answer:
            async for event in _events(answer):
                if event["type"] == "response.output_text.delta":
                    break
            assert await asyncio.to_thread(running) == 1
            answer.close()
        seconds = await until(lambda: running() == 0)
    print(f"{model}: its place was free after {1000 * seconds:.0f} ms")

"""Captured calls that are streamed: live, without tokens, and recorded as a whole or not at all."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from gym_serve.servers import Call, ModelServer, ServerRunner
from gym_serve.types.errors import GymError, Unavailable
from gym_serve.types.protocols import TOKEN_KEYS, ResponseStream, chat_to_response

JSON = dict[str, Any]

BODIES: dict[str, JSON] = {
    "responses": {"input": [{"role": "user", "content": "Hi"}]},
    "chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, "model": "m"},
}
BUNDLE = dict(zip(TOKEN_KEYS, ([1, 2], [3, 4], [-0.5, -0.25]), strict=True))


class Slow(ModelServer):
    """Says "One two", and waits in the middle."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.go_on = asyncio.Event()
        self.ended = asyncio.Event()
        self.fails = False

    async def responses(self, body: JSON) -> JSON:
        raise AssertionError("it is asked for a stream")

    async def stream_responses(self, body: JSON) -> AsyncIterator[JSON]:
        stream = ResponseStream(body, parse_think=False)
        try:
            for text in ("One ", "two"):
                delta = {"content": text}
                for event in stream.chunk({"created": 1, "choices": [{"index": 0, "delta": delta}]}):
                    yield event
                await self.go_on.wait()
            if self.fails:
                raise Unavailable("the engine died")
        finally:
            self.ended.set()
        message = {"role": "assistant", "content": "One two", **BUNDLE}
        completion = {"created": 1, "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        completion["usage"] = {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
        events, _ = stream.finish(chat_to_response(completion, body, parse_think=False, token_ids=True))
        for event in events:
            yield event


class Harness:
    """Reads the stream of one call, without HTTP."""

    def __init__(self, protocol: str) -> None:
        self.model = Slow(name="policy", replica="r1")
        self.host = ServerRunner(self.model)
        self.protocol = protocol
        self.received = b""
        self.calls_at_the_end = -1
        self.began = asyncio.Event()

    async def ask(self) -> None:
        """Open a capture, make a call and read its stream."""
        self.id = (await self.host.dispatch(Call("rollouts"))).session
        body = json.dumps({**BODIES[self.protocol], "stream": True}).encode()
        op = f"rollouts/v1/{self.protocol}"
        async with aclosing(self.host.stream(Call(op, body, self.id))) as parts:
            async for part in parts:
                await self._receive(part)

    async def _receive(self, part: bytes) -> None:
        self.received += part
        if b"One" in self.received:
            self.began.set()
        if b"response.completed" in part or b"message_stop" in part or b'finish_reason":"stop' in part:
            self.calls_at_the_end = (await self.found())["calls"]

    async def found(self) -> JSON:
        found: JSON = (await self.host.dispatch(Call("rollouts/trajectories", b"", self.id))).json()
        return found


@pytest.mark.parametrize("protocol", BODIES)
async def test_a_stream_is_live_and_recorded_before_it_ends(protocol: str) -> None:
    harness = Harness(protocol)
    asked = asyncio.create_task(harness.ask())
    await harness.began.wait()
    assert not asked.done()
    assert b"two" not in harness.received
    assert {key: (await harness.found())[key] for key in ("calls", "unfinished")} == {
        "calls": 0,
        "unfinished": 1,
    }
    harness.model.go_on.set()
    await asked
    assert harness.calls_at_the_end == 1  # a harness that hangs up now has lost nothing
    received = harness.received.decode()
    assert "two" in received
    assert not any(key in received for key in TOKEN_KEYS)
    found = await harness.found()
    assert (found["calls"], found["unfinished"]) == (1, 0)
    (item,) = found["trajectories"][0]["response"]["output"]
    assert BUNDLE.items() <= item.items()


@pytest.mark.parametrize("protocol", BODIES)
async def test_a_harness_that_hangs_up_ends_the_generation(protocol: str) -> None:
    harness = Harness(protocol)
    asked = asyncio.create_task(harness.ask())
    await harness.began.wait()
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert harness.model.ended.is_set()
    found = await harness.found()
    assert (found["calls"], found["unfinished"], found["trajectories"]) == (0, 1, [])
    harness.model.go_on.set()  # it may ask again
    await harness.ask()
    assert (await harness.found())["calls"] == 1


@pytest.mark.parametrize("protocol", BODIES)
async def test_a_model_that_dies_in_a_stream(protocol: str) -> None:
    harness = Harness(protocol)
    harness.model.fails = True
    harness.model.go_on.set()
    with pytest.raises(GymError, match="the engine died"):
        await harness.ask()
    found = await harness.found()
    assert (found["calls"], found["unfinished"]) == (0, 1)

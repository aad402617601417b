"""`Gate`: what calls do while a policy changes."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from gym_serve.servers.context import time_limit
from gym_serve.servers.model import Gate
from gym_serve.types.errors import Unavailable


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Work:
    """Calls that end when they are told."""

    def __init__(self) -> None:
        self.begun = self.ended = 0
        self.go = asyncio.Event()

    async def __call__(self) -> str:
        self.begun += 1
        try:
            await self.go.wait()
        finally:
            self.ended += 1
        return "answer"

    async def events(self) -> AsyncIterator[int]:
        for number in range(3):
            yield number
            await self.go.wait()


async def test_new_calls_wait_and_running_ones_go_on() -> None:
    gate, work = Gate(), Work()
    first = asyncio.ensure_future(gate.run(work))
    await turns()
    gate.close()
    second = asyncio.ensure_future(gate.run(work))
    work.go.set()
    assert await first == "answer"
    await turns()
    assert work.begun == 1
    gate.open()
    assert await second == "answer"


async def test_idle_waits_for_the_running_ones() -> None:
    gate, work = Gate(), Work()
    calls = [asyncio.ensure_future(gate.run(work)) for _ in range(3)]
    await turns()
    gate.close()
    idle = asyncio.ensure_future(gate.idle())
    await turns()
    assert not idle.done()
    work.go.set()
    await idle
    assert work.ended == 3
    assert await asyncio.gather(*calls) == ["answer"] * 3


async def test_interrupted_calls_are_made_again() -> None:
    gate, work = Gate(), Work()
    calls = [asyncio.ensure_future(gate.run(work)) for _ in range(3)]
    await turns()
    gate.close()
    gate.interrupt()
    await gate.idle()
    assert (work.begun, work.ended) == (3, 3)
    assert not any(call.done() for call in calls)
    gate.open()
    work.go.set()
    assert await asyncio.gather(*calls) == ["answer"] * 3
    assert work.begun == 6


async def test_a_cancelled_call_stays_cancelled_also_if_it_is_interrupted() -> None:
    gate, work = Gate(), Work()
    call = asyncio.ensure_future(gate.run(work))
    await turns()
    gate.interrupt()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert work.begun == 1


async def test_a_deadline_holds_for_a_call_that_waits() -> None:
    gate, work = Gate(), Work()
    gate.close()
    with pytest.raises(asyncio.TimeoutError), time_limit(0.01):
        await gate.run(work)
    assert work.begun == 0


async def test_a_failure_is_no_interrupt() -> None:
    async def fails() -> None:
        raise Unavailable("gone")

    gate = Gate()
    with pytest.raises(Unavailable, match="gone"):
        await gate.run(fails)
    await gate.idle()


async def test_a_stream_that_was_interrupted_fails_and_another_waits() -> None:
    gate, work = Gate(), Work()
    stream = gate.stream(work.events)
    assert await anext(stream) == 0
    gate.close()
    gate.interrupt()
    waiting = asyncio.ensure_future(anext(gate.stream(work.events)))
    work.go.set()
    with pytest.raises(Unavailable, match="paused"):
        await anext(stream)
    await gate.idle()
    assert not waiting.done()
    gate.open()
    assert await waiting == 0


async def test_a_gate_that_is_closed_again_at_once_lets_nobody_in() -> None:
    gate, work = Gate(), Work()
    gate.close()
    calls = [asyncio.ensure_future(gate.run(work)) for _ in range(3)]
    stream = asyncio.ensure_future(anext(gate.stream(work.events)))
    await turns()
    gate.open()
    gate.close()
    await turns()
    assert work.begun == 0
    assert not stream.done()
    gate.open()
    work.go.set()
    assert await asyncio.gather(*calls) == ["answer"] * 3
    assert await stream == 0


async def test_a_stream_that_is_interrupted_before_its_first_item_is_made_again() -> None:
    begun = 0
    go = asyncio.Event()

    async def events() -> AsyncIterator[int]:
        nonlocal begun
        begun += 1
        await go.wait()
        yield begun

    gate = Gate()
    stream = gate.stream(events)
    first = asyncio.ensure_future(anext(stream))
    await turns()
    gate.close()
    gate.interrupt()
    await gate.idle()  # although no item came
    gate.open()
    go.set()
    assert await first == 2
    assert [item async for item in stream] == []

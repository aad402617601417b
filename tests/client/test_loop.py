"""The loop of the handles: results, failures and cancellation cross from any other loop."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import pytest
import uvloop

from gym_serve.client import loop


async def test_results_come_back_to_the_loop_that_asked() -> None:
    async def square(number: int) -> tuple[int, str]:
        await asyncio.sleep(0.001 * (number % 3))
        return number * number, threading.current_thread().name

    found = await asyncio.gather(*(loop.run(square(number)) for number in range(500)))
    assert [result for result, _ in found] == [number * number for number in range(500)]
    assert {thread for _, thread in found} == {"gym_serve"}


def test_threads_that_come_at_once_start_one_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    started = 0
    new = uvloop.new_event_loop

    def slowly() -> asyncio.AbstractEventLoop:
        nonlocal started
        started += 1
        time.sleep(0.05)
        return new()

    monkeypatch.setattr(uvloop, "new_event_loop", slowly)
    monkeypatch.setattr(loop, "_started", lru_cache(maxsize=1)(loop._started.__wrapped__))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: loop.wait(asyncio.sleep(0, n)), range(8)))
    assert found == list(range(8))
    assert started == 1


async def test_a_failure_is_raised_where_it_is_awaited() -> None:
    async def fails() -> None:
        raise LookupError("not there")

    with pytest.raises(LookupError, match="not there"):
        await loop.run(fails())


async def test_a_task_that_is_cancelled_there_is_cancelled_here() -> None:
    async def gives_up() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await loop.run(gives_up())


@pytest.mark.parametrize("at_once", [True, False])
async def test_cancelling_cancels_there(at_once: bool) -> None:
    ended = threading.Event()
    begun = threading.Event()

    async def waits() -> None:
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    task = asyncio.create_task(loop.run(waits()))
    await asyncio.sleep(0)
    if not at_once:
        assert await asyncio.to_thread(begun.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    if begun.is_set():
        assert await asyncio.to_thread(ended.wait, 10)
    assert await loop.run(asyncio.sleep(0, "goes on")) == "goes on"


def test_any_number_of_loops_may_ask_one_after_the_other() -> None:
    for number in range(20):
        assert asyncio.run(loop.run(asyncio.sleep(0, number))) == number


def test_a_loop_that_is_gone_stops_nothing() -> None:
    async def leaves() -> None:
        task = asyncio.create_task(loop.run(asyncio.sleep(0.05)))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(leaves())
    assert asyncio.run(loop.run(asyncio.sleep(0.1, "fine"))) == "fine"

"""`time_limit`: short limits have a timer of their own, long ones share one for each second; `wait_until`."""

import asyncio
from contextlib import suppress

import pytest

from gym_serve.servers import context
from gym_serve.servers.context import time_limit, wait_until


@pytest.fixture(params=["own timer", "shared timer"])
def coarse(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "shared timer":
        monkeypatch.setattr(context, "_COARSE_SECONDS", 0.0)


@pytest.mark.usefixtures("coarse")
class TestBoth:
    async def test_a_block_that_takes_too_long_ends(self) -> None:
        with pytest.raises((asyncio.TimeoutError, TimeoutError)), time_limit(0.01):
            await asyncio.Event().wait()

    async def test_a_block_in_time_is_left_alone(self) -> None:
        with time_limit(0.01):
            pass
        assert await asyncio.sleep(1.1, "undisturbed") == "undisturbed"

    async def test_of_two_limits_at_once_the_outer_one_tells(self) -> None:
        async def inner() -> None:
            try:
                with time_limit(30.0):
                    await asyncio.Event().wait()
            except (asyncio.TimeoutError, TimeoutError):
                raise AssertionError("the inner one has time left") from None

        with pytest.raises((asyncio.TimeoutError, TimeoutError)), time_limit(0.01):
            await inner()

    async def test_a_cancellation_from_elsewhere_stays_one(self) -> None:
        async def work() -> None:
            with time_limit(60.0):
                await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def test_an_error_of_the_block_passes(self) -> None:
        with pytest.raises(KeyError), time_limit(60.0):
            raise KeyError


async def test_limits_of_one_second_share_a_timer_and_leave_nothing_behind() -> None:
    async def work() -> None:
        with time_limit(60.0):
            await asyncio.sleep(0.01)

    await asyncio.gather(*(work() for _ in range(100)))
    seconds = context._seconds
    assert seconds.loop is asyncio.get_running_loop()
    assert len(seconds.ending) <= 2
    assert not any(seconds.ending.values())


async def test_a_block_that_caught_its_end_tells_of_it_no_more() -> None:
    with time_limit(0.01), suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    task = asyncio.current_task()
    assert task is not None
    assert context._cancelling(task) == 0


def test_loops_one_after_the_other_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_COARSE_SECONDS", 0.0)

    async def late() -> None:
        with time_limit(0.01):
            await asyncio.Event().wait()

    for _ in range(2):
        with pytest.raises((asyncio.TimeoutError, TimeoutError)):
            asyncio.run(late())


@pytest.mark.parametrize("seconds", [None, float("inf")])
async def test_no_limit(seconds: float | None) -> None:
    with time_limit(seconds):
        assert await asyncio.sleep(0, "undisturbed") == "undisturbed"


async def test_waiting_for_an_event() -> None:
    event = asyncio.Event()
    assert not await wait_until(event, 0.01)
    event.clear()
    waiting = asyncio.ensure_future(wait_until(event, 60))
    await asyncio.sleep(0)
    event.set()
    assert await waiting


async def test_a_cancellation_that_comes_together_with_the_event_is_not_lost() -> None:
    """A trainer that hands its policy over would wait for ever for a call that goes on."""
    event = asyncio.Event()
    waiting = asyncio.ensure_future(wait_until(event, 60))
    await asyncio.sleep(0)
    event.set()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

"""`time_limit`: short limits have a timer of their own, long ones share one for each second."""

from __future__ import annotations

import asyncio
import sys

import pytest

from gym_serve.servers import deadline
from gym_serve.servers.deadline import time_limit

shared = pytest.mark.skipif(sys.version_info < (3, 11), reason="each limit has a timer of its own there")


@pytest.fixture(params=["own timer", pytest.param("shared timer", marks=shared)])
def coarse(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "shared timer":
        monkeypatch.setattr(deadline, "_COARSE_SECONDS", 0.0)


@pytest.mark.usefixtures("coarse")
class TestBoth:
    async def test_a_block_that_takes_too_long_ends(self) -> None:
        with pytest.raises((asyncio.TimeoutError, TimeoutError)):
            async with time_limit(0.01):
                await asyncio.Event().wait()

    async def test_a_block_in_time_is_left_alone(self) -> None:
        async with time_limit(0.01):
            pass
        await asyncio.sleep(1.1)

    async def test_of_two_limits_at_once_the_outer_one_tells(self) -> None:
        async def inner() -> None:
            try:
                async with time_limit(0.5):
                    await asyncio.Event().wait()
            except (asyncio.TimeoutError, TimeoutError):
                raise AssertionError("the inner one has time left") from None

        with pytest.raises((asyncio.TimeoutError, TimeoutError)):
            async with time_limit(0.01):
                await inner()

    async def test_a_cancellation_from_elsewhere_stays_one(self) -> None:
        async def work() -> None:
            async with time_limit(60.0):
                await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def test_an_error_of_the_block_passes(self) -> None:
        with pytest.raises(KeyError):
            async with time_limit(60.0):
                raise KeyError


@shared
async def test_limits_of_one_second_share_a_timer_and_leave_nothing_behind() -> None:
    async def work() -> None:
        async with time_limit(60.0):
            await asyncio.sleep(0.01)

    await asyncio.gather(*(work() for _ in range(100)))
    due = deadline._of_loop[asyncio.get_running_loop()]
    assert len(due) <= 2
    assert not any(due.values())


@pytest.mark.parametrize("seconds", [None, float("inf")])
async def test_no_limit(seconds: float | None) -> None:
    async with time_limit(seconds):
        await asyncio.sleep(0)

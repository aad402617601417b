"""Replicas follow live sessions, no session is lost on the way, and a full graph slows its caller down."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
from ray import serve
from support.pinned import Pinned
from support.scaling import Answers
from typer.testing import CliRunner

from gym_serve import Gym
from gym_serve.cli import local_ray, main
from gym_serve.client import loop
from gym_serve.servers.clients import EnvironmentClient

# Serve means to drop, some day, the field by which replicas report more often than every 10 seconds.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning"),
]

QUICK = {
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 1,
    "downscale_to_zero_delay_s": 1,
    "look_back_period_s": 2,
}
ROW = {"responses_create_params": {"input": "go"}, "key": "k"}


@pytest.fixture(scope="module")
def gym(deploy: Any) -> Gym:
    graph = {
        "models": {"model": {"type": Answers, "max_ongoing_requests": 2, "max_queued_requests": 2}},
        "resources": {
            "env": {
                "type": Pinned,
                "autoscaling": {**QUICK, "min_replicas": 1, "max_replicas": 4, "target_sessions": 4},
            },
            "seldom": {
                "type": Pinned,
                "autoscaling": {**QUICK, "min_replicas": 0, "max_replicas": 2, "target_ongoing_requests": 4},
            },
        },
        "agents": {"agent": {"type": "simple_agent", "model": "model", "resources": "env"}},
    }
    return deploy(graph, name="scaling")


def replicas(server: str) -> int:
    deployment = serve.status().applications["scaling"].deployments[server]
    return int(deployment.replica_states.get("RUNNING", 0))


async def until(server: str, wanted: Callable[[int], bool], meanwhile: Callable[[], Any]) -> None:
    """Wait for a number of replicas; ``meanwhile`` goes on."""
    while not wanted(await asyncio.to_thread(replicas, server)):
        await meanwhile()
        await asyncio.sleep(0.2)


class Sessions:
    """Sessions that are called all the time, and know how often."""

    def __init__(self, gym: Gym, server: str) -> None:
        self._resources = EnvironmentClient(gym._core.transport(server))
        self.live: dict[str, str] = {}
        self.calls: dict[str, int] = {}
        self.homes: dict[str, int] = {}

    async def open(self, count: int) -> None:
        for _ in range(count):
            key = f"k{len(self.calls)}"
            session, fields = await self._resources.seed_session({"key": key})
            assert session is not None
            self.live[key], self.calls[key], self.homes[key] = session, 0, fields["pid"]

    async def touch(self) -> None:
        for key, session in self.live.items():
            answer = (await self._resources.call_tool("touch", {"key": key}, session)).json()
            self.calls[key] += 1
            assert answer == {"pid": self.homes[key], "mine": True, "calls": self.calls[key]}

    async def close(self, count: int) -> None:
        for key in list(self.live)[:count]:
            await self._resources.close_session(self.live.pop(key))


async def status_says(text: str) -> None:
    """Wait until `gym-serve status` prints it: replicas report their load from time to time."""
    for _ in range(300):
        result = await asyncio.to_thread(CliRunner().invoke, main, ["status"])
        if text in result.stdout:
            return
        await asyncio.sleep(0.2)
    raise AssertionError(f"{text!r} is not in\n{result.output}") from result.exception


def test_replicas_follow_sessions_up_and_down_and_none_is_lost(
    gym: Gym, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_ray, "connect", lambda address: None)

    async def run() -> None:
        sessions = Sessions(gym, "env")
        await sessions.open(14)
        assert len(set(sessions.homes.values())) == 1
        await status_says("14 sessions at 4 each ask for 4 (1 to 4 allowed)")
        await until("env", lambda count: count == 4, sessions.touch)
        await sessions.open(12)
        assert len(set(sessions.homes.values())) > 1  # the new ones are used
        await sessions.close(20)
        await until("env", lambda count: count < 4, sessions.touch)
        await sessions.touch()  # those of the replicas that are leaving, too
        await sessions.close(4)
        await until("env", lambda count: count == 1, sessions.touch)
        await sessions.touch()
        await sessions.close(2)

    loop.wait(run())


@pytest.mark.slow
def test_from_zero_and_back(gym: Gym) -> None:
    async def run() -> None:
        sessions = Sessions(gym, "seldom")
        assert await asyncio.to_thread(replicas, "seldom") == 0
        await sessions.open(1)
        await sessions.touch()
        assert await asyncio.to_thread(replicas, "seldom") == 1
        await sessions.close(1)
        await until("seldom", lambda count: count == 0, sessions.touch)

    loop.wait(run())
    while gym.pressure()["servers"]["seldom"]["replicas"]:  # it may be leaving still
        time.sleep(0.2)
    assert replicas("seldom") == 0  # and to be asked was no reason to start one


async def test_a_full_graph_slows_the_run_down_and_drops_nothing(gym: Gym) -> None:
    """The model takes four calls, and 40 rollouts want to run at once, with one attempt each."""
    limited: list[dict[str, Any]] = []
    seen = asyncio.Event()

    async def look() -> None:
        while True:
            pressure = await asyncio.to_thread(gym.pressure)
            if pressure["bottleneck"] == "model":
                limited.append(pressure)
                if pressure["servers"]["model"]["refused"] > 0:
                    seen.set()
            await asyncio.sleep(0.3)

    def rows() -> Iterator[dict[str, Any]]:
        """60 of them, and more until it is seen, however long a look takes on this machine."""
        for number in count():
            if number >= 60 and seen.is_set():
                return
            yield ROW

    looking = asyncio.create_task(look())
    try:
        rollouts = [r async for r in gym.rollouts(rows(), concurrency=40)]
    finally:
        looking.cancel()
    assert len(rollouts) >= 60
    assert {r["reward"] for r in rollouts} == {0.0}
    assert not any("failure" in r for r in rollouts)
    assert all(pressure["concurrency"] is None or pressure["concurrency"] < 40 for pressure in limited)

"""The numbers of several replicas together, and CPU time by stage."""

import asyncio
import time
from collections.abc import Awaitable, Coroutine
from typing import Any

import pytest

from gym_serve import Gym
from gym_serve.gateway.host import merged, stats
from gym_serve.observe import cpu
from gym_serve.observe.catalogue import CPU_SECONDS
from gym_serve.observe.cpu import OTHER, CallMeter, OtherCpu, measured_in_thread, stage_of


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    CPU_SECONDS.clear()
    monkeypatch.setattr(cpu, "EVERY", 1)


def point(name: str, value: float, kind: str = "counter", **labels: str) -> dict[str, Any]:
    return {"kind": kind, "name": name, "labels": labels, "value": value}


def seconds() -> dict[tuple[str, str], float]:
    return {(p.labels["server"], p.labels["stage"]): p.value for p in CPU_SECONDS.points()}


def measured(server: str, stage: str, work: Coroutine[Any, Any, Any]) -> Awaitable[Any]:
    """The first call of an operation, which is measured."""
    return counted(CallMeter(server, stage), work)


def counted(meter: CallMeter, work: Coroutine[Any, Any, Any]) -> Awaitable[Any]:
    """One more call of an operation."""
    meter.left -= 1
    return meter.measured(work)


def burn(limit: float) -> None:
    """Use CPU time of this thread, whatever else the machine does."""
    until = time.thread_time() + limit
    while time.thread_time() < until:
        pass


def test_counters_add_up_and_gauges_keep_each_replica() -> None:
    first = [point("calls_total", 3, op="run"), point("up", 1, "gauge", endpoint="a")]
    second = [point("calls_total", 4, op="run"), point("up", 0, "gauge", endpoint="a")]
    assert merged([first, second, [point("calls_total", 1, op="verify")]]) == {
        "calls_total": [{"labels": {"op": "run"}, "value": 7}, {"labels": {"op": "verify"}, "value": 1}],
        "up": [
            {"labels": {"endpoint": "a", "replica": "0"}, "value": 1},
            {"labels": {"endpoint": "a", "replica": "1"}, "value": 0},
        ],
    }


def test_stats_have_the_load_of_each_server_and_its_cpu_seconds() -> None:
    report = {
        "draining": False, "running": 2, "waiting": 0, "limit": 10, "sessions": 0, "target_sessions": None,
        "max_replicas": 0, "autoscaling": None, "cpu": 0.1, "refused": 0.0, "boxes": None,
        "counts": [
            point(CPU_SECONDS.name, 1.5, server="agent", stage="run"),
            point(CPU_SECONDS.name, 0.5, server="env", stage="verify"),  # inline in the agent
        ],
    }  # fmt: skip
    found = stats({"agent": [report, report], "env": []}, ["agent"])
    assert found["rollouts"] == 4
    assert found["servers"]["agent"]["cpu_seconds"] == {"run": 3.0}
    assert found["servers"]["env"]["cpu_seconds"] == {"verify": 1.0}
    assert found["metrics"][CPU_SECONDS.name][0] == {
        "labels": {"server": "agent", "stage": "run"},
        "value": 3.0,
    }


async def test_the_time_of_a_call_is_that_of_its_turns_without_the_calls_inside() -> None:
    async def verify() -> str:
        burn(0.02)
        await asyncio.sleep(0)
        burn(0.02)
        await asyncio.to_thread(measured_in_thread, lambda: burn(0.02))
        return "done"

    async def run() -> str:
        burn(0.01)
        answer = await measured("env", "verify", verify())
        await asyncio.create_task(_stranger())
        return answer

    async def _stranger() -> None:
        burn(0.2)  # its turns are not those of `run`

    assert await measured("agent", "run", run()) == "done"
    found = seconds()
    assert 0.06 <= found["env", "verify"] < 0.1
    assert 0.01 <= found["agent", "run"] < 0.05


async def test_failures_and_cancellations_pass_through() -> None:
    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("of the work")

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            burn(0.01)

    with pytest.raises(ValueError, match="of the work"):
        await measured("env", "verify", fails())
    task = asyncio.create_task(_awaited(measured("env", "close_session", waits())))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seconds()["env", "close_session"] >= 0.01


async def _awaited(work: Awaitable[Any]) -> Any:
    return await work


async def test_some_calls_are_measured_and_count_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "EVERY", 4)
    verify, run = CallMeter("env", "verify"), CallMeter("agent", "run")

    async def inner() -> None:
        burn(0.001)

    async def outer() -> None:
        burn(0.001)
        await counted(verify, inner())

    began = time.thread_time()
    for _ in range(200):
        await counted(run, outer())
    used = time.thread_time() - began
    found = seconds()
    assert 0.16 <= found["env", "verify"] <= 0.25
    assert 0.16 <= found["agent", "run"] <= 0.25
    assert sum(found.values()) < 1.1 * used


async def test_of_many_calls_few_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "EVERY", 128)
    meter, weights = CallMeter("env", "verify"), list[int]()
    monkeypatch.setattr(cpu._Measured, "add", lambda measure, seconds: weights.append(measure.weight))

    async def nothing() -> None: ...

    for number in range(20_000):
        await counted(meter, nothing())
        assert sum(weights) <= number + 1
    assert 20_000 - sum(weights) < 256  # those since the last one
    assert 100 < len(weights) < 300


def test_what_no_call_used_is_other() -> None:
    other = OtherCpu("agent")
    burn(0.03)
    CPU_SECONDS.add("agent", "run", value=0.01)
    other.refresh()
    assert 0.02 <= seconds()["agent", OTHER] < 0.5
    CPU_SECONDS.add("agent", "run", value=60)  # an estimate that is ahead
    other.refresh()
    assert seconds()["agent", OTHER] < 0.5


def test_the_calls_of_a_rollout_are_measured_by_stage() -> None:
    with Gym.from_graph("graphs/weather.yaml", ray=False) as gym:
        gym.run("environments/simple_weather/data/example.jsonl")
    stages = {stage for _, stage in seconds()}
    assert {"run", "seed_session", "verify", "close_session", "v1/responses", stage_of("tools/x")} <= stages

"""Graphs whose owners are killed, restarted by Ray, or hold Python's lock; and the event loop meanwhile."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import ray
from ray import serve
from support.processes import replicas_of
from support.upstream import ChatEndpoint
from support.waiting import wait_until

from gym_serve import AsyncGym, Conflict, Gym
from gym_serve.cluster.serve_compat import worker_is_alive

T = TypeVar("T")

LEASE = 3.0  # seconds
NOWHERE = "http://127.0.0.1:9/v1"
GRAPH: dict[str, Any] = {"models": {"policy": {"type": "chat_model", "base_url": NOWHERE, "model": "first"}}}


def runs(name: str) -> bool:
    return name in serve.status().applications


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Trainer:
    """A trainer's actor. The first one gives the next one all the time that it needs to start."""

    def __init__(self) -> None:
        lease_s = LEASE if ray.get_runtime_context().was_current_actor_reconstructed else 200.0
        self._gym = Gym.from_graph(GRAPH, name="taken", owner="run", lease_s=lease_s)

    def pid(self) -> int:
        return os.getpid()

    def move(self, url: str, model: str | None) -> None:
        self._gym.policy.set_endpoints("policy", [url], model)

    def hold_the_lock(self, seconds: int) -> None:
        """Run C code that does not let go of Python's lock."""
        ctypes.PyDLL(None).sleep(seconds)

    def shutdown(self) -> None:
        self._gym.shutdown()


def test_an_actor_that_ray_restarts_takes_its_graph_over(cluster: str) -> None:
    trainer = Trainer.remote()
    first = ray.get(trainer.pid.remote())
    ray.get(trainer.move.remote(NOWHERE, "second"))
    replicas = replicas_of("taken")
    assert set(replicas) == {"policy", "gateway"}

    os.kill(first, signal.SIGKILL)
    assert ray.get(trainer.pid.remote()) != first
    with pytest.raises(Conflict, match=r"it belongs to the run 'run', process \d+ on \S+\. Join"):
        Gym.from_graph(GRAPH, name="taken", owner="another run")
    with ChatEndpoint("yes") as endpoint:
        ray.get(trainer.move.remote(endpoint.url, None))
        with Gym.attach("taken") as guest:
            guest.call("policy", "v1/chat/completions", {"messages": [{"role": "user", "content": "?"}]})
        assert [request["model"] for request in endpoint.requests] == ["second"]

    ray.get(trainer.hold_the_lock.remote(round(2.5 * LEASE)))
    assert replicas_of("taken") == replicas
    ray.get(trainer.shutdown.remote())
    assert not runs("taken")
    ray.kill(trainer)


def test_who_lives(cluster: str) -> None:
    """A process whose machine is lost is gone, though nobody has reported its end."""
    context = ray.get_runtime_context()
    worker, node = context.get_worker_id(), context.get_node_id()
    assert worker_is_alive(worker, node)
    assert not worker_is_alive(worker, node[::-1])
    assert not worker_is_alive("ab" * (len(worker) // 2), node)


KILLED = """
import os, signal, sys
from gym_serve import AsyncGym, Gym
address, graph = sys.argv[1], {graph!r}
mine = Gym.from_graph(graph, address=address, name="abandoned", owner="run", lease_s={lease})
kept = Gym.from_graph(graph, address=address, name="kept", lease_s={lease}, detached=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_driver_leaves(cluster: str, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(KILLED.format(graph=GRAPH, lease=LEASE))
    address = ray.get_runtime_context().gcs_address
    driver = subprocess.run(
        [sys.executable, script, address], capture_output=True, text=True, timeout=150, check=False
    )
    assert driver.returncode == -signal.SIGKILL, driver.stderr
    wait_until(lambda: not runs("abandoned"))
    time.sleep(LEASE)
    replicas = replicas_of("kept")
    with Gym.from_graph(GRAPH, name="kept") as heir:
        heir.policy.set_endpoints("policy", [NOWHERE], "second")
        assert replicas_of("kept") == replicas
    assert not runs("kept")


async def ticks_during(work: Awaitable[T]) -> tuple[int, T]:
    """How often the event loop got round while something was awaited, and what came of it."""
    count = 0

    async def tick() -> None:
        nonlocal count
        while True:
            await asyncio.sleep(0.01)
            count += 1

    ticking = asyncio.create_task(tick())
    try:
        result = await work
    finally:
        ticking.cancel()
    return count, result


async def test_the_event_loop_goes_on(cluster: str) -> None:
    counts = {}
    counts["from_graph"], gym = await ticks_during(AsyncGym.from_graph(GRAPH, name="ticking"))
    counts["endpoints"], _ = await ticks_during(gym.policy.set_endpoints("policy", [NOWHERE], version="7"))
    counts["weights"], _ = await ticks_during(gym.policy.update_weights("policy", "8"))
    counts["attach"], guest = await ticks_during(AsyncGym.attach("ticking"))
    counts["leave"], _ = await ticks_during(guest.shutdown())
    counts["shutdown"], _ = await ticks_during(gym.shutdown())
    assert min(counts["from_graph"], counts["shutdown"], counts["endpoints"]) > 5, counts
    assert not runs("ticking")

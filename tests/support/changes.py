"""A graph on two nodes that is changed again and again under live sessions: none may be lost or misrouted.

Half of the sessions come by the replica transport of a driver, half by HTTP through the proxy, and episodes
of the graph's own agent run beside them. What happened is printed to standard error.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from contextlib import aclosing
from copy import deepcopy
from typing import Any

import aiohttp
from ray import serve

from gym_serve import Gym
from gym_serve.client import loop
from gym_serve.cluster.code import ship
from gym_serve.graph import GraphSpec, build, resolve
from support.live_sessions import HttpWay, Players, handle_way
from support.pinned import Pinned, SlowModel
from support.processes import replicas_of
from support.two_nodes import TwoNodes

NAME = "changes"
GRAPH: dict[str, Any] = {
    "models": {"model": {"type": SlowModel}},
    "resources": {"env": {"type": Pinned, "num_replicas": 3, "max_replicas_per_node": 4}},
    "agents": {
        "agent": {
            "type": "simple_agent",
            "model": "model",
            "resources": "env",
            "ray_resources": {"second": 0.01},
        }
    },
}


def changed(**servers: dict[str, Any]) -> dict[str, Any]:
    """`GRAPH` with other settings of some servers."""
    graph = deepcopy(GRAPH)
    for section in graph.values():
        for name, settings in servers.items():
            if name in section:
                section[name] |= settings
    return graph


MORE = changed(env={"session_ttl": 1800.0, "num_replicas": 5})
FEWER = changed(env={"session_ttl": 1800.0}, agent={"max_steps": 31})
FEWER["agents"]["other"] = {"type": "simple_agent", "model": "model", "resources": "env"}
CHANGES = {
    "new settings of the environment, and 5 replicas in the place of 3": MORE,
    "3 replicas again, a new agent and a new gateway at once": FEWER,
}


def deploy(graph: dict[str, Any]) -> None:
    """Change the running application; returns once every replaced replica has ended."""
    target = resolve(GraphSpec.model_validate(graph))
    serve.run(build(target, shipped=ship(target)), name=NAME, route_prefix=f"/{NAME}")


async def settled(graph: dict[str, Any]) -> dict[str, set[int]]:
    """Processes of the replicas, by server, once there are as many as a graph has.

    The last one that Serve has stopped may take a moment to end. Where their numbers stay wrong, they are
    those of after a minute.
    """
    servers = {name: settings for section in graph.values() for name, settings in section.items()}
    wanted = {name: settings.get("num_replicas", 1) for name, settings in servers.items()} | {"gateway": 1}
    for _ in range(600):
        found = replicas_of(NAME)
        if {name: len(pids) for name, pids in found.items()} == wanted:
            break
        await asyncio.sleep(0.1)
    return found


def ended_ones(before: dict[str, set[int]], after: dict[str, set[int]]) -> dict[str, int]:
    """How many processes of each server are in ``before`` alone."""
    return +Counter({server: len(pids - after.get(server, set())) for server, pids in before.items()})


async def episodes(gym: Gym, ended: Counter[str], stop: asyncio.Event) -> None:
    """Rollouts of the agent, as long as the changes go on."""

    def rows() -> Any:
        while not stop.is_set():
            yield {"responses_create_params": {"input": "go"}, "key": "k"}

    async with aclosing(gym.rollouts(rows(), concurrency=4)) as rollouts:
        async for rollout in rollouts:
            ended[rollout.get("_ng_failure_class") or f"reward {rollout['reward']:g}"] += 1


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def play(gym: Gym, *, sessions: int, pause: float, calls: int, seed: int) -> dict[str, Any]:
    players = Players(seed, pause=pause, calls=calls)
    ended: Counter[str] = Counter()
    stop = asyncio.Event()
    table: list[dict[str, Any]] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        players.start("handle", sessions // 2, handle_way(gym._core.transport("env")))
        players.start("http", sessions // 2, HttpWay(client, f"{gym.url}/env"))
        running = asyncio.create_task(episodes(gym, ended, stop))
        before = await settled(GRAPH)
        for name, graph in CHANGES.items():
            while players.live < 0.75 * sessions:  # noqa: ASYNC110  # on a slow machine they take a while
                await asyncio.sleep(0.1)
            counts, started = players.counts.copy(), time.monotonic()
            live = players.live
            await asyncio.to_thread(deploy, graph)
            seconds = round(time.monotonic() - started, 1)
            after = await settled(graph)
            row = {
                "change": name,
                "seconds": seconds,
                "live": live,
                "ended": ended_ones(before, after),
                "started": ended_ones(after, before),
                **(players.counts - counts),
            }
            table.append(row)
            before = after
            say(f"{row}")
        stop.set()
        await players.stop()
        await running
    return {"changes": table, "counts": players.counts, "problems": players.problems, "episodes": ended}


def run(cluster: TwoNodes, **options: Any) -> dict[str, Any]:
    """What comes of it; for the options see `Players`."""
    with Gym.from_graph(GRAPH, name=NAME, address=cluster.address) as gym:
        found: dict[str, Any] = loop.wait(play(gym, **options))
    return found

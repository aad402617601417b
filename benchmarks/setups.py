"""What the work is done with: graphs over each kind of transport, and the reference."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import aiohttp
import orjson

from benchmarks.harness.processes import Census
from benchmarks.harness.rounds import Advance, Setup
from benchmarks.harness.work import ROOT, graph
from benchmarks.loopback import RunningModelServer
from gym_serve import AsyncGym, Gym
from gym_serve.client.connection import HttpConnection
from gym_serve.client.core import Core
from gym_serve.metrics import LATENCY_FIELD
from gym_serve.servers.transport import Transport
from gym_serve.transports import HttpTransport

__all__ = ["TRANSPORTS", "TransportName", "setups"]

TransportName = Literal["replica", "inline", "http", "requests", "reference"]
"""``replica``: every server is a deployment. ``inline``: model and environment run inside the agent's
replicas. ``http``: `Gym.connect` to the gateway of the first, all rollouts in one run. ``requests``: a
``POST /run`` for each. ``reference``: the work by hand."""

TRANSPORTS: tuple[TransportName, ...] = get_args(TransportName)


class _Requests(HttpConnection):
    """A graph at a URL, of which each rollout is a request."""

    def transport(self, server: str) -> Transport:
        return HttpTransport(server, f"{self.url}/{server}")


class GymSetup:
    """A graph.

    Args:
        name: kind of its transports.
        gym: collects from it.
        census: its processes.
    """

    def __init__(self, name: str, gym: Gym, census: Census) -> None:
        self.name = name
        self.census = census
        self._gym = gym

    async def collect(
        self, rows: list[dict[str, Any]], output: Path, concurrency: int, advance: Advance
    ) -> None:
        """See `Setup.collect`."""
        await AsyncGym.of(self._gym).collect(
            rows, output, concurrency=concurrency, progress=lambda progress: advance(progress.finished)
        )


class ReferenceSetup:
    """The reference.

    Args:
        agent_url: its agent.
        census: its processes.
    """

    name = "reference"

    def __init__(self, agent_url: str, census: Census) -> None:
        self.census = census
        self._agent_url = agent_url

    async def collect(
        self, rows: list[dict[str, Any]], output: Path, concurrency: int, advance: Advance
    ) -> None:
        """Post every row to the agent, so many at a time, and append what it answers to a file."""
        url, places = f"{self._agent_url}/run", asyncio.Semaphore(concurrency)
        written = 0
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=600)
        with output.open("wb", buffering=0) as file:
            async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:

                async def one(row: dict[str, Any]) -> None:
                    nonlocal written
                    async with places:
                        started = time.monotonic()
                        body, headers = orjson.dumps(row), {"content-type": "application/json"}
                        async with client.post(url, data=body, headers=headers) as answer:
                            answer.raise_for_status()
                            rollout = orjson.loads(await answer.read())
                    rollout[LATENCY_FIELD] = time.monotonic() - started
                    file.write(orjson.dumps(rollout) + b"\n")
                    written += 1
                    advance(written)

                await asyncio.gather(*map(one, rows))


@contextmanager
def child(module: str, *arguments: str) -> Iterator[tuple[str, int]]:
    """Run ``python -m module``, which prints its URL once it listens; its URL and process id."""
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process.pid
        finally:
            process.terminate()


@contextmanager
def setups(
    transports: Sequence[TransportName],
    model: RunningModelServer,
    *,
    agent_replicas: int = 1,
    token_ids: bool = False,
) -> Iterator[list[Setup]]:
    """Everything that is to be compared, running side by side, in the order of ``transports``."""
    named = {model.pid: "model server"}
    gyms: dict[str, Gym] = {}
    found: list[Setup] = []
    with ExitStack() as stack:
        for transport in transports:
            if transport == "reference":
                environment_url, pid = stack.enter_context(child("benchmarks.reference.environment"))
                named[pid] = "weather"
                agent_url, pid = stack.enter_context(
                    child("benchmarks.reference.agent", model.url, environment_url)
                )
                named[pid] = "agent"
                found.append(ReferenceSetup(agent_url, Census(named)))
                continue
            application = "inline" if transport == "inline" else "replica"
            if application not in gyms:
                spec = graph(
                    model.url,
                    inline=transport == "inline",
                    agent_replicas=agent_replicas,
                    token_ids=token_ids,
                )
                gyms[application] = stack.enter_context(Gym.from_graph(spec, name=application))
            gym = gyms[application]
            if transport in ("http", "requests"):
                kind = HttpConnection if transport == "http" else _Requests
                gym = stack.enter_context(Gym(Core(kind(gym.url))))
            found.append(GymSetup(transport, gym, Census(named, application)))
        yield found

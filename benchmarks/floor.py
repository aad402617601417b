"""What an episode over inline transports costs its process, and how much of that is not gym_serve's.

    python -m benchmarks.floor [--concurrency 256] [--rollouts 2000] [--rounds 5]

Three loops take turns in this process, without Ray, on uvloop as in a replica: the two model requests of
an episode, made with aiohttp alone; the whole episode by hand (requests, JSON, tool, verifier, result) as
plain code in one function; and agent, model and environment of gym_serve with inline transports. Prints the
CPU of each in ms per rollout, as medians.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
import uvloop

from benchmarks.harness.reports import table
from benchmarks.harness.work import model_behaviour, rows
from benchmarks.loopback import run_model_server
from gym_serve import EnvironmentClient, ModelClient, ServerRunner
from gym_serve.deployments.chat_model import ChatModel
from gym_serve.deployments.simple_agent import SimpleAgent
from gym_serve.environments.simple_weather import SimpleWeather, city_key, mentions, weather_in
from gym_serve.servers.runner import tune_process
from gym_serve.servers.transport import Call
from gym_serve.transports import InlineTransport

_HEADERS = {"content-type": "application/json"}

Rollout = Callable[[bytes], Awaitable[bytes]]
"""One episode of a row, both as JSON."""


class ByHand:
    """The work, or only its requests, in as little code as it takes.

    Args:
        client: makes the requests.
        url: the model server.
    """

    def __init__(self, client: aiohttp.ClientSession, url: str) -> None:
        self._client = client
        self._url = f"{url}/v1/chat/completions"

    async def post(self, body: bytes) -> bytes:
        """One answer of the model."""
        async with self._client.post(self._url, data=body, headers=_HEADERS) as answer:
            return await answer.read()

    async def requests(self, row: bytes) -> bytes:
        """The requests alone; the row is what they send."""
        await self.post(row)
        return await self.post(row)

    async def episode(self, data: bytes) -> bytes:
        """All of it."""
        row = orjson.loads(data)
        params = row["responses_create_params"]
        messages = [{"role": "system", "content": params["instructions"]}, *params["input"]]
        tools = [{"type": "function", "function": tool} for tool in params["tools"]]
        output: list[Any] = []
        asked: set[str] = set()
        while True:
            body = {"model": "loopback", "messages": messages, "tools": tools}
            completion = orjson.loads(await self.post(orjson.dumps(body)))
            message = completion["choices"][0]["message"]
            messages.append(message)
            output.append(message)
            if not message.get("tool_calls"):
                break
            for call in message["tool_calls"]:
                city = orjson.loads(call["function"]["arguments"])["city"]
                asked.add(city_key(city))
                said = {
                    "role": "tool",
                    "tool_call_id": call["id"],
                    "content": str(weather_in(city)),
                }
                messages.append(said)
                output.append(said)
        cities = row["verifier_metadata"]["cities"]
        right = [city_key(c) in asked and mentions(message["content"], weather_in(c)) for c in cities]
        response = {"output": output, "usage": completion["usage"]}
        return orjson.dumps({**row, "response": response, "reward": float(all(right))})


@asynccontextmanager
async def served(url: str) -> AsyncIterator[Rollout]:
    """The servers."""
    model = ServerRunner(ChatModel(name="policy", base_url=f"{url}/v1", model="loopback"))
    environment = ServerRunner(weather := SimpleWeather(name="weather"))
    weather.takes_snapshots = False  # as in a replica
    agent = ServerRunner(
        SimpleAgent(
            name="agent",
            model=ModelClient(InlineTransport(model)),
            resources=EnvironmentClient(InlineTransport(environment)),
        )
    )
    hosts = (model, environment, agent)
    for host in hosts:
        await host.start()

    async def rollout(row: bytes) -> bytes:
        return (await agent.dispatch(Call("run", row))).body

    yield rollout
    for host in reversed(hosts):
        await host.stop()


async def cpu_ms(rollout: Rollout, row: bytes, count: int, concurrency: int) -> float:
    """CPU of this process in ms per rollout, so many at a time, each in a task of its own."""
    left = iter(range(count))

    async def worker() -> None:
        for _ in left:
            await asyncio.create_task(rollout(row))

    before = time.process_time()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return 1000 * (time.process_time() - before) / count


async def measured(url: str, arguments: argparse.Namespace) -> dict[str, float]:
    """The medians of all three."""
    row = orjson.dumps(rows(1)[0])
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as client, served(url) as servers:
        by_hand = ByHand(client, url)
        loops: dict[str, Rollout] = {
            "two requests by aiohttp": by_hand.requests,
            "the episode by hand": by_hand.episode,
            "gym_serve, inline transports": servers,
        }
        for rollout in (by_hand.episode, servers):
            assert orjson.loads(await rollout(row))["reward"] == 1.0
        found: dict[str, list[float]] = {name: [] for name in loops}
        for rollout in loops.values():
            await cpu_ms(rollout, row, arguments.concurrency, arguments.concurrency)  # connections, caches
        tune_process()  # as a replica
        for _ in range(arguments.rounds):
            for name, rollout in loops.items():
                found[name].append(await cpu_ms(rollout, row, arguments.rollouts, arguments.concurrency))
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=256, help="episodes in flight")
    parser.add_argument("--rollouts", type=int, default=2000, help="episodes of a round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds")
    arguments = parser.parse_args()
    uvloop.install()
    with run_model_server(model_behaviour()) as model:
        found = asyncio.run(measured(model.url, arguments))
    print(table(("one process", "CPU ms per rollout"), list(found.items())))


if __name__ == "__main__":
    main()

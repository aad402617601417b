"""The loop of the reference that collects rollouts."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from benchmarks.harness.rounds import Advance
from gym_serve.metrics import LATENCY_FIELD

__all__ = ["collect"]


async def collect(
    agent_url: str, rows: list[dict[str, Any]], output: Path, concurrency: int, advance: Advance
) -> None:
    """Post every row to the agent, so many at a time, and append what it answers to a file."""
    places = asyncio.Semaphore(concurrency)
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
                    async with client.post(f"{agent_url}/run", data=body, headers=headers) as answer:
                        answer.raise_for_status()
                        rollout = orjson.loads(await answer.read())
                rollout[LATENCY_FIELD] = time.monotonic() - started
                file.write(orjson.dumps(rollout) + b"\n")
                written += 1
                advance(written)

            await asyncio.gather(*map(one, rows))

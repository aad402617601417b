"""Sessions that live for a while, one after the other, and that notice when a call goes astray.

Every session holds a key and the number of its calls, and says which process it lives in; a player expects
all three. What it finds instead is counted: ``misrouted`` (another process, another session, or one with
another history) or the failure's code.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any, Protocol

import aiohttp
import orjson

from gym_serve.servers.transport import Call, Reply, Transport
from gym_serve.types.errors import GymError

__all__ = ["HttpWay", "Players", "Way", "handle_way"]

JSON = dict[str, Any]


class Way(Protocol):
    """How a player reaches the environment."""

    async def __call__(self, op: str, body: JSON, session: str | None) -> Reply: ...


def handle_way(transport: Transport) -> Way:
    """By the transport of a driver."""

    async def call(op: str, body: JSON, session: str | None) -> Reply:
        prefix = "" if op in ("seed_session", "verify", "close_session") else "tools/"
        return await transport.call(Call(prefix + op, orjson.dumps(body), session, timeout=60.0))

    return call


class HttpWay:
    """By the proxy."""

    def __init__(self, client: aiohttp.ClientSession, url: str) -> None:
        self._client = client
        self._url = url

    async def __call__(self, op: str, body: JSON, session: str | None) -> Reply:
        headers = {} if session is None else {"x-session-id": session}
        async with self._client.post(f"{self._url}/{op}", json=body, headers=headers) as answer:
            return Reply(answer.status, await answer.read(), answer.headers.get("x-session-id"))


class Players:
    """Players of sessions of `support.pinned.Pinned`.

    Args:
        seed: of the random pauses and lengths.
        pause: seconds between two calls of a session, on average.
        calls: calls of a session, on average.
    """

    def __init__(self, seed: int, *, pause: float, calls: int) -> None:
        self._random = random.Random(seed)
        self._pause = pause
        self._calls = calls
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self.live = 0
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.processes: Counter[int] = Counter()
        """Live sessions by process."""

    def start(self, name: str, count: int, way: Way) -> None:
        """Let ``count`` players begin."""
        self._tasks += [asyncio.create_task(self._play(f"{name}-{n}", way)) for n in range(count)]

    async def stop(self) -> None:
        """Let every session come to its end."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _play(self, name: str, way: Way) -> None:
        number = 0
        await asyncio.sleep(self._random.uniform(0, self._pause))  # else all begin at the same moment
        while not self._stopping:
            number += 1
            try:
                await self._session(f"{name}-{number}", way)
            except (GymError, aiohttp.ClientError, asyncio.TimeoutError) as error:
                code = getattr(error, "code", type(error).__name__)
                self._problem(code, f"{name}-{number}: {error!r}")
                await asyncio.sleep(self._pause)

    async def _session(self, key: str, way: Way) -> None:
        seeded = await way("seed_session", {"key": key}, None)
        pid = seeded.json()["pid"]
        session = seeded.session
        self.live += 1
        self.processes[pid] += 1
        try:
            calls = self._random.randint(1, 2 * self._calls - 1)
            for number in range(1, calls + 1):
                await asyncio.sleep(self._random.uniform(0, 2 * self._pause))
                touched = (await way("touch", {"key": key}, session)).json()
                self.counts["calls"] += 1
                self._expect(key, touched, {"pid": pid, "mine": True, "calls": number})
            row = {"responses_create_params": {"input": ""}, "response": {"output": []}}
            verdict = (await way("verify", row, session)).json()
            self._expect(key, verdict, {"pid": pid, "reward": float(calls)})
            (await way("close_session", {}, session)).json()
            self.counts["sessions"] += 1
        finally:
            self.live -= 1
            self.processes[pid] -= 1

    def _expect(self, key: str, answer: JSON, expected: JSON) -> None:
        found = {name: answer.get(name) for name in expected}
        if found != expected:
            self._problem("misrouted", f"{key}: {found} instead of {expected}")

    def _problem(self, code: str, text: str) -> None:
        self.counts[code] += 1
        if len(self.problems) < 20:
            self.problems.append(text)

"""An agent that does what its row says, and a proxy that cuts connections: for tests of ``/rollouts``."""

from __future__ import annotations

import asyncio
import random
import struct
from collections import Counter
from contextlib import suppress
from socket import SO_LINGER, SOL_SOCKET
from typing import Any, ClassVar

from gym_serve import AgentServer, ResourcesServer, Unavailable, Verdict, VerifyRequest
from gym_serve.servers.context import current
from gym_serve.types.rows import check_row

__all__ = ["CuttingProxy", "Doer", "Nothing", "graph", "rows"]

JSON = dict[str, Any]


class Nothing(ResourcesServer):
    """An environment that the agent does not use."""

    async def verify(self, request: VerifyRequest) -> Verdict:
        return Verdict(reward=1.0)


class Doer(AgentServer):
    """Returns its row with a reward, and counts the episodes of this process by ``number``.

    A row may say ``act``: ``hang`` until it is cancelled, ``slow``, ``down`` (the first time), or ``large``.
    """

    ran: ClassVar[Counter[int]] = Counter()
    cancelled: ClassVar[Counter[int]] = Counter()

    async def run(self, row: JSON) -> JSON:
        check_row(row)
        number, act = row["number"], row.get("act")
        self.ran[number] += 1
        try:
            if act == "hang":
                await asyncio.Event().wait()
            await asyncio.sleep(0.2 if act == "slow" else 0.0)
        except asyncio.CancelledError:
            self.cancelled[number] += 1
            raise
        if act == "down" and self.ran[number] == 1:
            raise Unavailable("it is down")
        text = "x" * 100_000 if act == "large" else f"answer {number}"
        message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
        return {
            **row,
            "response": {"output": [message]},
            "reward": number % 7 / 7,
            "trace": current().traceparent,
        }


def graph(**options: Any) -> JSON:
    return {
        "models": {
            "policy": {"type": "scripted_model", "script": [[{"type": "message", "content": "Yes."}]]}
        },
        "resources": {"nothing": {"type": Nothing}},
        "agents": {"doer": {"type": Doer, "model": "policy", "resources": "nothing"}},
        **options,
    }


def rows(count: int, **keys: Any) -> list[JSON]:
    return [
        {"responses_create_params": {"input": f"question {n}"}, "number": n, **keys} for n in range(count)
    ]


class CuttingProxy:
    """Passes connections on to another port, and cuts some of them off after so many bytes, either way.

    Args:
        port: the other port of this machine.
        cuts: how many connections to cut.
        seed: of the numbers of bytes.
        most: bytes after which one is cut at the latest.
    """

    def __init__(self, port: int, cuts: int, seed: int, most: int = 200_000) -> None:
        self.left = cuts
        self._port = port
        self._random = random.Random(seed)
        self._most = most
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        """Listen; the base URL."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        budget = [self._random.randint(1, self._most)]
        ways = [self._copy(reader, back, budget), self._copy(there, writer, budget)]
        tasks = [asyncio.ensure_future(way) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for side in (writer, back):
                with suppress(OSError):
                    side.close()

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, budget: list[int]
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                if self.left and budget[0] <= len(data):
                    self.left -= 1
                    writer.write(data[: budget[0]])
                    reset = struct.pack("ii", 1, 0)  # what is on its way is lost as well
                    writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, reset)
                    writer.transport.abort()
                    return
                budget[0] -= len(data)
                writer.write(data)
                await writer.drain()

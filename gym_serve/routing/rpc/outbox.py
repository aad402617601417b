"""`Outbox`: what waits to be written to a connection leaves together, in one frame.

With nothing under way a message leaves in the next turn of the event loop; under load, or while
the peer reads slowly, the messages of many calls gather and share the cost of a frame. Of thousands
the first leave before the last: a frame has `FULL` at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from gym_serve.routing.rpc.messages import FULL, Message, encode

__all__ = ["Outbox"]


class Outbox:
    """Writes messages.

    Args:
        send: writes one frame; waits while the peer does not read.
    """

    def __init__(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._send = send
        self._waiting: list[Message] = []
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()
        self._ended = False

    def put(self, message: Message) -> None:
        """Write ``message`` soon."""
        self._waiting.append(message)
        self._filled.set()
        if not self._ended:
            self._emptied.clear()

    async def run(self) -> None:
        """Write what comes, until cancelled or the connection breaks.

        Raises:
            OSError: it broke.
        """
        try:
            while True:
                await self._filled.wait()
                self._filled.clear()
                messages, self._waiting = self._waiting, []
                for first in range(0, len(messages), FULL):
                    await self._send(encode(messages[first : first + FULL]))
                if not self._waiting:
                    self._emptied.set()
        finally:
            self._ended = True
            self._emptied.set()

    async def flush(self) -> None:
        """Wait until everything is written, or nothing can be any more."""
        await self._emptied.wait()

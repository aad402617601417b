"""`SandboxPool`: sandboxes that are started before they are needed.

Each is given out once and never comes back: nobody finds what another left behind. While one is taken,
the next is being started, so that a caller waits only if calls come faster than processes start.
"""

from __future__ import annotations

import asyncio
from collections import deque

from gym_serve.sandbox.limits import Limits
from gym_serve.sandbox.process import SandboxedPython
from gym_serve.sandbox.providers import Sandbox
from gym_serve.types.errors import GymError, Unavailable

__all__ = ["SandboxPool"]


class SandboxPool:
    """Warm sandboxes of one kind.

    Args:
        sandbox: how they are confined.
        limits: what each may use.
        size: how many are kept ready.
        prelude: trusted code that each runs first.
    """

    def __init__(self, sandbox: Sandbox, limits: Limits, *, size: int, prelude: str = "") -> None:
        self._sandbox = sandbox
        self._limits = limits
        self._size = size
        self._prelude = prelude
        self._ready: deque[SandboxedPython] = deque()
        self._starting: set[asyncio.Task[None]] = set()
        self._running = False

    async def start(self) -> None:
        """Start all of them; returns when they are ready.

        Raises:
            Unavailable: one does not start, with its reason.
        """
        self._running = True
        try:
            outcomes = await asyncio.gather(*(self._add() for _ in range(self._size)), return_exceptions=True)
            for error in outcomes:
                if error is not None:
                    raise error
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End those that nobody took. Safe to call twice."""
        self._running = False
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(python.stop() for python in self._ready))
        self._ready.clear()

    async def take(self) -> SandboxedPython:
        """A started sandbox; the caller stops it.

        Raises:
            Unavailable: the pool is not running, or a sandbox does not start.
        """
        if not self._running:
            raise Unavailable("the sandboxes are not running")
        python = self._ready.popleft() if self._ready else await self._started()
        self._refill()
        return python

    async def _started(self) -> SandboxedPython:
        python = SandboxedPython(self._sandbox, self._limits, self._prelude)
        await python.start()
        return python

    async def _add(self) -> None:
        self._ready.append(await self._started())

    def _refill(self) -> None:
        for _ in range(self._size - len(self._ready) - len(self._starting)):
            task = asyncio.create_task(self._try_to_add())
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _try_to_add(self) -> None:
        try:
            await self._add()
        except GymError:
            return  # the next call starts one itself, and is told if that fails

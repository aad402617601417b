"""`TimedBox`: what ends a box, a failed start and its time to live included, whatever it is made of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gym_serve.sandbox.boxes import SandboxSpec


class TimedBox:
    """A box that is alive until `_end`; subclasses count its time to live with `_begin_to_live`."""

    def __init__(self, spec: SandboxSpec) -> None:
        self._spec = spec
        self._over: str | None = None  # why it is gone
        self._timer: asyncio.TimerHandle | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        """See `Sandbox.alive`."""
        return self._over is None

    async def close(self) -> None:
        """See `Sandbox.close`."""
        raise NotImplementedError

    @asynccontextmanager
    async def beginning(self) -> AsyncIterator[None]:
        """What makes it: it is closed if that fails, or is cancelled."""
        try:
            yield
        except BaseException:
            await self.close()
            raise

    def _begin_to_live(self) -> None:
        if self._spec.ttl is not None:
            self._timer = asyncio.get_running_loop().call_later(self._spec.ttl, self._expire)

    def _expire(self) -> None:
        self._end(f"its time to live, {self._spec.ttl:g} s, is over")
        self._closing = asyncio.create_task(self.close())

    def _end(self, reason: str) -> None:
        """The first reason stays."""
        self._over = self._over or reason
        if self._timer is not None:
            self._timer.cancel()

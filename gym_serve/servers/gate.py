"""`Gate`: the calls of a model wait while its policy changes, and none fails for that.

A closed gate holds new calls. What becomes of running ones is the caller's choice (`Policy.pause`): they go
on, they are waited for, or they are interrupted and made again once the gate opens, which is safe because a
model call has no effect but its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from gym_serve.servers.context import closing, interruptible
from gym_serve.types.errors import Unavailable

T = TypeVar("T")


class Gate:
    """The gate before the calls of one model. Use it in one event loop."""

    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self._opened.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._calls = 0
        self._blocks: set[interruptible] = set()
        self._interrupts = 0

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def close(self) -> None:
        self._opened.clear()

    def open(self) -> None:
        self._opened.set()

    async def idle(self) -> None:
        await self._idle.wait()

    def interrupt(self) -> None:
        self._interrupts += 1
        for block in list(self._blocks):
            block.interrupt()

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Make a call once the gate is open. One that is interrupted is made again."""
        while True:
            await self._until_open()
            with interruptible() as block, self._counted(block):
                return await work()

    async def stream(self, begin: Callable[[], AsyncIterator[T]]) -> AsyncGenerator[T, None]:
        """The items of a call that begins once the gate is open. One that is interrupted before its first
        item is made again, and later raises `Unavailable`: its reader has a part of the answer already."""
        while True:
            await self._until_open()
            interrupts, begun = self._interrupts, False
            with self._counted(None):
                async with closing(begin()) as items:
                    while self._interrupts == interrupts:
                        with interruptible() as block:
                            self._blocks.add(block)
                            try:
                                item = await anext(items)
                            except StopAsyncIteration:
                                return
                            finally:
                                self._blocks.discard(block)
                        if self._interrupts == interrupts:
                            begun = True
                            yield item
            if begun:
                raise Unavailable("the policy was paused in the middle of this answer")

    async def _until_open(self) -> None:
        while not self._opened.is_set():  # it may be closed again before all that waited have gone on
            await self._opened.wait()

    @contextmanager
    def _counted(self, block: interruptible | None) -> Iterator[None]:
        self._calls += 1
        self._idle.clear()
        if block is not None:
            self._blocks.add(block)
        try:
            yield
        finally:
            if block is not None:
                self._blocks.discard(block)
            self._calls -= 1
            if not self._calls:
                self._idle.set()

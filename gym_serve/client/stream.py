"""`GroupStream`: what `Gym.stream` returns. Groups are made in the background while the trainer learns.

They are made on the event loop of this package, in its own thread, so a training step that blocks the
trainer's thread holds up nothing.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Iterator

from typing_extensions import Self

from gym_serve.client import loop
from gym_serve.rollouts import Group, GroupFeed, Handover, StreamCounts


class GroupStream(AsyncIterator[Group], Iterator[Group]):
    """Groups for a trainer whose policy changes meanwhile; made by `Gym.stream`.

    Iterate over it with ``async for``, or with ``for`` if the trainer is not asynchronous. It begins with
    the first step, and ends with the last group, with `close` or `aclose`, at the end of a ``with`` or
    ``async with`` block, with its `Gym`, or when it is garbage-collected. Running rollouts are then
    cancelled, down to the model's request.
    """

    def __init__(self, feed: GroupFeed, on_take: Callable[[Group], None]) -> None:
        self._feed = feed
        self._on_take = on_take
        self._making = _Making(feed)
        weakref.finalize(self, self._making.abandon).atexit = False

    @property
    def counts(self) -> StreamCounts:
        """Counts of the groups and rollouts so far, and why rollouts were thrown away."""
        return self._feed.counts

    async def __anext__(self) -> Group:
        """The next group.

        Raises:
            StopAsyncIteration: all groups were taken, or the stream was closed.
            InvalidRequest: rows that cannot be used.
            OperatorError: a setting that all rollouts need is wrong; see `RolloutOptions`.
        """
        handover = Handover()
        try:
            group = await loop.run(self._take(handover))
        except asyncio.CancelledError:
            await loop.run(self._feed.give_back(handover))
            raise
        if group is None:
            raise StopAsyncIteration
        self._on_take(group)
        return group

    def __next__(self) -> Group:
        """The same, blocking.

        Raises:
            StopIteration: as `__anext__` ends.
        """
        handover = Handover()
        try:
            group = loop.wait(self._take(handover))
        except KeyboardInterrupt:
            loop.wait(self._feed.give_back(handover))
            raise
        if group is None:
            raise StopIteration
        self._on_take(group)
        return group

    async def aclose(self) -> None:
        """End the stream, and cancel running rollouts. Safe to call twice."""
        await loop.run(self._making.stop())

    def close(self) -> None:
        """The same, blocking."""
        loop.wait(self._making.stop())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    async def _take(self, handover: Handover) -> Group | None:
        if not self._making.start():
            return None
        try:
            group = await self._feed.take(handover)
        except Exception:
            await self._making.stop()
            raise
        if group is None:
            await self._making.stop()
        return group

    def look(self) -> None:
        """Look for a new version of the policy now. `Policy.update_weights` does so."""
        loop.start(self._making.look())


class _Making:
    """The task that makes the groups. It does not know the stream, so that nobody needs to close that.

    All methods but `abandon` run on the event loop of this package.
    """

    def __init__(self, feed: GroupFeed) -> None:
        self._feed = feed
        self._task: asyncio.Task[None] | None = None
        self._stopped = False

    def start(self) -> bool:
        """Begin, unless it runs; returns whether it does, or was stopped."""
        if self._task is None and not self._stopped:
            self._task = asyncio.ensure_future(self._feed.run())
        return not self._stopped

    async def stop(self) -> None:
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def look(self) -> None:
        self._feed.look()

    def abandon(self) -> None:
        loop.start(self.stop())

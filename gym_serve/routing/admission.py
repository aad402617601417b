"""`Admission`: how many calls a replica works on at the same time, and how many wait.

Calls do not pass through Serve's queues, so Serve's ``max_ongoing_requests`` and
``max_queued_requests`` are kept here, at the replica, where all of its callers meet. Serve does not
see the calls either: what its autoscaling goes by is counted here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

from gym_serve.routing.metering import LoadMeter
from gym_serve.routing.rpc import Busy
from gym_serve.servers.context import closing
from gym_serve.servers.transport import Call, Reply
from gym_serve.types.errors import GymError, Overloaded

__all__ = ["Admission"]


class Admission:
    """Lets calls in, first come first served.

    Args:
        dispatch: runs a call.
        stream: runs a call whose answer comes in parts.
        limits: the most calls that run, and that wait (-1 for no limit); asked anew for each call,
            as a deploy changes them.

    Attributes:
        running: calls at work.
        unbound: calls at work or waiting that belong to no session.
        meter: how busy the replica was of late.
    """

    def __init__(
        self,
        dispatch: Callable[[Call], Awaitable[Reply]],
        stream: Callable[[Call], AsyncIterator[bytes]],
        limits: Callable[[], tuple[int, int]],
    ) -> None:
        self.running = 0
        self.unbound = 0
        self.meter = LoadMeter()
        self._dispatch = dispatch
        self._stream = stream
        self._limits = limits
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """Calls that wait to be let in."""
        return len(self._queue)

    async def dispatch(self, call: Call) -> Reply:
        """Run a call when there is room.

        Raises:
            Busy: too many wait already; it was not begun.
        """
        await self._begin(call)
        try:
            reply = await self._dispatch(call)
        finally:
            self._end(call)
        self.meter.answered(refused=reply.status == Overloaded.status)
        return reply

    async def stream(self, call: Call) -> AsyncGenerator[bytes, None]:
        """`dispatch` for a call whose answer comes in parts."""
        await self._begin(call)
        try:
            async with closing(self._stream(call)) as parts:
                async for part in parts:
                    yield part
        except GymError as error:
            self.meter.answered(refused=isinstance(error, Overloaded))
            raise
        finally:
            self._end(call)
        self.meter.answered()

    async def _begin(self, call: Call) -> None:
        running, waiting = self._limits()
        full = self.running >= running or bool(self._queue)
        if full and 0 <= waiting <= len(self._queue):
            self.meter.answered(refused=True)
            raise Busy(f"{waiting} calls wait already")
        self.unbound += call.session is None
        if not full:
            self.running += 1
            return
        try:
            await self._turn()
        except BaseException:
            self.unbound -= call.session is None
            raise

    def _end(self, call: Call) -> None:
        self.unbound -= call.session is None
        self.running -= 1
        self._admit()

    async def _turn(self) -> None:
        """Wait to be let in; whoever lets it in has counted it."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._queue.remove(turn)
            else:  # let in and cancelled at the same moment
                self.running -= 1
                self._admit()
            raise

    def _admit(self) -> None:
        limit, _ = self._limits()
        while self._queue and self.running < limit:
            turn = self._queue.popleft()
            if not turn.done():
                self.running += 1
                turn.set_result(None)

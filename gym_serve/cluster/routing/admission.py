"""`Admission` limits the calls that a replica runs and queues; `LoadMeter` measures its load.

Calls do not pass through Serve's queues. So Serve's ``max_ongoing_requests`` and ``max_queued_requests`` are
enforced here, at the replica, and the calls are counted here for Serve's autoscaling.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from itertools import count

from gym_serve.assembly import QueuedCall
from gym_serve.cluster.routing.rpc import QueueFullError
from gym_serve.servers.context import closing
from gym_serve.servers.transport import Call, Reply
from gym_serve.types.errors import GymError, Overloaded

_WINDOW_SECONDS = 10


class Admission:
    """Admits calls, first come first served.

    ``limits`` are most calls that run, and most that wait (-1 for no limit); a deploy may change them.
    """

    def __init__(
        self,
        dispatch: Callable[[Call], Awaitable[Reply]],
        stream: Callable[[Call], AsyncIterator[bytes]],
        limits: Callable[[], tuple[int, int]],
    ) -> None:
        self.running = 0
        self.unbound = 0  # calls that run or wait and belong to no session
        self.meter = LoadMeter()  # the load of the last seconds
        self._dispatch = dispatch
        self._stream = stream
        self._limits = limits
        self._queue: OrderedDict[asyncio.Future[None], QueuedCall] = OrderedDict()
        self._numbers = count(1)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def queued(self) -> Iterable[QueuedCall]:
        return self._queue.values()

    def refuse(self, number: int, error: GymError) -> bool:
        """End a call that waits with an error; returns whether it waits."""
        turn = next((turn for turn, queued in self._queue.items() if queued.number == number), None)
        if turn is None:
            return False
        del self._queue[turn]
        turn.set_exception(error)
        return True

    async def dispatch(self, call: Call) -> Reply:
        """Run a call as soon as there is room; `QueueFullError` if too many calls wait already."""
        try:
            if waited := await self._begin(call):
                call = call._replace(waited=waited)
        except GymError as error:  # see `refuse`
            return Reply.failed(error, call.session)
        try:
            reply = await self._dispatch(call)
        finally:
            self._end(call)
        self.meter.answered(refused=reply.status == Overloaded.status)
        return reply

    async def stream(self, call: Call) -> AsyncGenerator[bytes, None]:
        """`dispatch` for a call whose answer comes in parts."""
        if waited := await self._begin(call):
            call = call._replace(waited=waited)
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

    async def _begin(self, call: Call) -> float:
        running, waiting = self._limits()
        full = self.running >= running or bool(self._queue)
        if full and 0 <= waiting <= len(self._queue):
            self.meter.answered(refused=True)
            raise QueueFullError(f"{waiting} calls wait already")
        self.unbound += call.session is None
        if not full:
            self.running += 1
            return 0.0
        begun = time.monotonic()
        try:
            await self._turn(call)
        except BaseException:
            self.unbound -= call.session is None
            raise
        return time.monotonic() - begun

    def _end(self, call: Call) -> None:
        self.unbound -= call.session is None
        self.running -= 1
        self._admit()

    async def _turn(self, call: Call) -> None:
        """Wait for room; `_admit` counts the call as running."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue[turn] = QueuedCall(next(self._numbers), call, time.monotonic())
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled() or turn.exception() is not None:  # cancelled alone, or refused as well
                self._queue.pop(turn, None)
            else:  # admitted and cancelled at the same moment
                self.running -= 1
                self._admit()
            raise

    def _admit(self) -> None:
        limit, _ = self._limits()
        while self._queue and self.running < limit:
            turn, _ = self._queue.popitem(last=False)
            if not turn.done():
                self.running += 1
                turn.set_result(None)


class _Second:
    """What happened in one second, and the clocks when it began."""

    def __init__(self, now: float, cpu: float) -> None:
        self.now = now
        self.cpu = cpu
        self.answers = 0
        self.refused = 0


class LoadMeter:
    """Counts answers, and the CPU time of this process between them, in seconds."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu: Callable[[], float] = time.process_time
    ) -> None:
        self._clock = clock
        self._cpu = cpu
        self._seconds: deque[_Second] = deque()

    def answered(self, *, refused: bool = False) -> None:
        now = self._clock()
        if not self._seconds or now - self._seconds[-1].now >= 1.0:
            self._forget(now)
            self._seconds.append(_Second(now, self._cpu()))
        self._seconds[-1].answers += 1
        self._seconds[-1].refused += refused

    def refused(self) -> float:
        """Share of the answers that were "overloaded", 0 to 1."""
        self._forget(self._clock())
        answers = sum(second.answers for second in self._seconds)
        return sum(second.refused for second in self._seconds) / answers if answers else 0.0

    def cpu(self) -> float:
        """Cores that this process used since the first of these answers; 0 if there was none."""
        now = self._clock()
        self._forget(now)
        if not self._seconds or now - self._seconds[0].now < 1.0:
            return 0.0
        first = self._seconds[0]
        return (self._cpu() - first.cpu) / (now - first.now)

    def _forget(self, now: float) -> None:
        while self._seconds and now - self._seconds[0].now >= _WINDOW_SECONDS:
            self._seconds.popleft()

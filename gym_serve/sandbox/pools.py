"""`BoxPool`: warm boxes, each for one episode, and no more starts at once than the provider keeps up with.

`Plan` decides by counts and times alone which box is started or ended next, and `BoxPool` does it. A box that
was taken never comes back: nothing that an agent wrote is seen by another episode.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from gym_serve.sandbox.boxes import Keeps, Sandbox, SandboxProvider, SandboxSpec
from gym_serve.types.errors import GymError, Retryable, Unavailable

logger = logging.getLogger("gym_serve")

_WINDOW = 30.0  # seconds; so often as boxes were taken in them, they will be taken
_SHORTEST = 5.0  # seconds; what was taken at once is not taken again at once
_AHEAD = 2.0  # boxes are ready for so many times the seconds that one takes to start
_KINDS = 128  # that are remembered without a box
_WARM_SECONDS = 600.0  # an older box is not given away
_LOOK_SECONDS = 0.5

_FIRST, _MOST = 4, 256  # starts under way
_FEW, _MANY = 1.0, 3.0  # of them, those that only wait for others
_BACK_OFF, _LONGEST = 0.5, 16.0  # seconds
_GIVE_UP = 3  # failures in a row


class Ramp:
    """How many boxes may start at the same time.

    The time of the fastest start tells how many of those under way only wait for others (as TCP Vegas does
    for packets, Brakmo and Peterson 1995). One more may start when these are few, one less when they are
    many; half as many after a failure, and none for a while, which doubles with each failure in a row.
    """

    def __init__(self) -> None:
        self.limit = _FIRST
        self.failures = 0
        self.until = 0.0
        self._least = math.inf
        self._found = False  # whether there were too many once; until then each start allows one more

    def allows(self, under_way: int, now: float) -> bool:
        return under_way < self.limit and now >= self.until

    def started(self, seconds: float, under_way: int) -> None:
        """A box has started. ``under_way``: starts at its beginning, itself included."""
        self.failures = 0
        # A start alone says how fast the machine is now; of several, only the fastest does.
        self._least = max(seconds if under_way == 1 else min(seconds, self._least), 1e-6)
        waiting = under_way * (1 - self._least / max(seconds, self._least))
        if waiting > _MANY:
            self._found = True
            self.limit = max(1, self.limit - 1)
        elif under_way >= self.limit and (waiting < _FEW or not self._found):
            self.limit = min(_MOST, self.limit + 1)

    def failed(self, now: float) -> None:
        self._found = True
        self.limit = max(1, self.limit // 2)
        self.until = now + min(_LONGEST, _BACK_OFF * 2.0**self.failures)
        self.failures += 1


@dataclass(eq=False)
class Kind:
    """The boxes of one spec."""

    waiting: deque[float] = field(default_factory=deque)  # since when takes wait, the first one first
    warm: int = 0
    starting: int = 0
    takes: deque[float] = field(default_factory=deque)  # when boxes were asked for, in the window
    seconds: float = 0.0  # that a start takes

    def expected(self, now: float) -> float:
        """How many boxes are taken before others have started, if it goes on like this."""
        while self.takes and self.takes[0] <= now - _WINDOW:
            self.takes.popleft()
        if not self.takes:
            return 0.0
        return len(self.takes) / max(_SHORTEST, now - self.takes[0]) * self.seconds * _AHEAD

    @property
    def short(self) -> int:
        """Takes for which no box starts."""
        return len(self.waiting) - self.starting

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.warm or self.starting)


class Step(NamedTuple):
    """Start a box of a kind, or end a warm one."""

    action: Literal["start", "end"]
    key: str


class Plan:
    """What is done next. ``most`` boxes exist at once; ``most_warm`` of them are warm, or become so."""

    def __init__(self, most: int, most_warm: int) -> None:
        self.kinds: dict[str, Kind] = {}  # the one that was asked for last is the last
        self.ramp = Ramp()
        self.held = 0  # boxes that are taken, or end
        self._most = most
        self._most_warm = most_warm

    @property
    def warm(self) -> int:
        return sum(kind.warm for kind in self.kinds.values())

    @property
    def starting(self) -> int:
        return sum(kind.starting for kind in self.kinds.values())

    @property
    def waiting(self) -> int:
        return sum(len(kind.waiting) for kind in self.kinds.values())

    def ask(self, key: str, now: float) -> bool:
        """Somebody asks for a box. Whether a warm one is theirs; else they wait."""
        kind = self.kinds[key] = self.kinds.pop(key) if key in self.kinds else Kind()
        kind.takes.append(now)
        idle = [other for other, its in self.kinds.items() if its.idle and its is not kind]
        for other in idle[: max(0, len(self.kinds) - _KINDS)]:
            del self.kinds[other]
        if kind.warm:
            kind.warm -= 1
            self.held += 1
            return True
        kind.waiting.append(now)
        return False

    def leave(self, key: str, since: float) -> None:
        """One who has waited since then waits no longer."""
        self.kinds[key].waiting.remove(since)

    def step(self, now: float) -> Step | None:
        """The next thing to do, which counts as begun; None if there is nothing to do now."""
        step = self._step(now)
        if step is not None and step.action == "start":
            self.kinds[step.key].starting += 1
        elif step is not None:
            self.kinds[step.key].warm -= 1
            self.held += 1
        return step

    def _step(self, now: float) -> Step | None:
        warm, starting = self.warm, self.starting
        may_start = self.ramp.allows(starting, now)
        is_full = self.held + warm + starting >= self._most
        short = [key for key, kind in self.kinds.items() if kind.short > 0]
        if short and may_start:
            if not is_full:
                return Step(
                    "start", min(short, key=lambda key: self.kinds[key].waiting[self.kinds[key].starting])
                )
            if warm:
                return Step("end", next(key for key, kind in self.kinds.items() if kind.warm))
        expected = {key: kind.expected(now) for key, kind in self.kinds.items()}
        for key, kind in self.kinds.items():
            if kind.warm > min(math.ceil(expected[key]), self._most_warm):
                return Step("end", key)
        if short or not may_start or is_full or warm + starting - self.waiting >= self._most_warm:
            return None
        lacks = {key: round(expected[key]) - kind.warm + kind.short for key, kind in self.kinds.items()}
        key = max(lacks, key=lambda key: lacks[key], default="")
        return Step("start", key) if lacks.get(key, 0) > 0 else None

    def started(self, key: str, seconds: float, under_way: int) -> None:
        """A box has started; `settle` comes next. ``under_way``: starts when its own began, itself
        included."""
        kind = self.kinds[key]
        kind.starting -= 1
        kind.seconds = 0.8 * kind.seconds + 0.2 * seconds if kind.seconds else seconds
        self.ramp.started(seconds, under_way)
        self.held += 1

    def settle(self, key: str) -> bool:
        """A box that nobody has used. Whether it goes to the first of those that wait; else it is warm."""
        kind = self.kinds[key]
        if kind.waiting:
            kind.waiting.popleft()
            return True
        kind.warm += 1
        self.held -= 1
        return False

    def failed(self, key: str, now: float, *, again: bool) -> int:
        """A box did not start. ``again``: the next one may. How many of those that wait are told, from the
        first: one, or all of them if there is little hope."""
        kind = self.kinds[key]
        kind.starting -= 1
        if again:
            self.ramp.failed(now)
        hope = again and self.ramp.failures < _GIVE_UP
        count = min(1, len(kind.waiting)) if hope else len(kind.waiting)
        for _ in range(count):
            kind.waiting.popleft()
        return count

    def ended(self) -> None:
        """A box that was held is gone."""
        self.held -= 1

    def forget(self, now: float) -> None:
        """Forget the kinds that have no box, and that nobody took in the window."""
        for key, kind in list(self.kinds.items()):
            if kind.idle and not kind.expected(now):
                del self.kinds[key]


class _Warm(NamedTuple):
    box: Sandbox
    since: float


class _Shelf:
    """The boxes of a spec that nobody has, and who waits for one, since when."""

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self.warm: deque[_Warm] = deque()
        self.takers: deque[tuple[float, asyncio.Future[Sandbox]]] = deque()


class BoxPool:
    """Boxes of a provider, for a server: ``self.manage(BoxPool(provider, most=64, warm=8))``.

    Boxes are kept ready for each spec, as many as are taken while one starts, from its use in the last half
    minute. A take waits if there is none, the first one first. Where ``most`` boxes exist, a warm one of
    another spec makes room.

    Args:
        most: boxes that exist at the same time.
        warm: of these, the most that are kept ready.
    """

    def __init__(self, provider: SandboxProvider, *, most: int, warm: int) -> None:
        self.most = most
        self._provider = provider
        self._plan = Plan(most, warm)
        self._shelves: dict[str, _Shelf] = {}
        self._starts: set[asyncio.Task[None]] = set()
        self._ends: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._running = False

    @property
    def counts(self) -> dict[str, int]:
        """Boxes that are ``live`` (taken, or ending), ``warm`` or ``starting``, and takes that are
        ``waiting``."""
        plan = self._plan
        return {"live": plan.held, "warm": plan.warm, "starting": plan.starting, "waiting": plan.waiting}

    async def start(self) -> None:
        """Take boxes from now on; none starts before."""
        self._running = True

    async def stop(self) -> None:
        """End the boxes that nobody took; who waits for one gets `Unavailable`. Safe to call twice."""
        self._running = False
        if self._timer is not None:
            self._timer.cancel()
        for task in self._starts:
            task.cancel()
        shelves, self._shelves = self._shelves, {}
        for shelf in shelves.values():
            for _, taker in shelf.takers:
                taker.set_exception(_stopped())
            for warm in shelf.warm:
                self._in_background(self._ends, warm.box.close())
        await asyncio.gather(*self._starts, *self._ends, return_exceptions=True)
        if isinstance(self._provider, Keeps):
            await self._provider.stop()

    async def take(self, spec: SandboxSpec) -> Sandbox:
        """A box that nobody has used; `end` is for the caller to call.

        Raises what `SandboxProvider.create` raises, and `Unavailable` while the pool does not run.
        """
        if not self._running:
            raise _stopped()
        key, now = spec.model_dump_json(), time.monotonic()
        shelf = self._shelves.setdefault(key, _Shelf(spec))
        while self._plan.ask(key, now):
            box, since = shelf.warm.popleft()
            if box.alive and now - since < _WARM_SECONDS:
                self._move()
                return box
            self._in_background(self._ends, self.end(box))
        taker: asyncio.Future[Sandbox] = asyncio.get_running_loop().create_future()
        shelf.takers.append((now, taker))
        self._move()
        try:
            return await asyncio.shield(taker)
        except asyncio.CancelledError:
            if not taker.done():
                shelf.takers.remove((now, taker))
                self._plan.leave(key, now)
            elif taker.exception() is None:  # it came at the same moment
                if self._running:
                    self._settle(key, shelf, taker.result())
                else:
                    self._in_background(self._ends, taker.result().close())
            self._move()
            raise

    async def end(self, box: Sandbox) -> None:
        """Close a box that was taken. Call it once; another box may take its place then."""
        try:
            await box.close()
        finally:
            self._plan.ended()
            self._move()

    def _move(self) -> None:
        """Do what the plan says now, and look again soon."""
        if not self._running:
            return
        while (step := self._plan.step(time.monotonic())) is not None:
            shelf = self._shelves[step.key]
            if step.action == "start":
                self._in_background(self._starts, self._start(step.key, shelf, self._plan.starting))
            else:
                self._in_background(self._ends, self.end(shelf.warm.popleft().box))
        if self._timer is None and self._shelves:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._timer = None
        self._plan.forget(time.monotonic())
        for key in self._shelves.keys() - self._plan.kinds.keys():
            del self._shelves[key]
        self._move()

    async def _start(self, key: str, shelf: _Shelf, under_way: int) -> None:
        begun = time.monotonic()
        try:
            box = await self._provider.create(shelf.spec)
        except Exception as error:
            again = isinstance(error, Retryable) or not isinstance(error, GymError)
            count = self._plan.failed(key, time.monotonic(), again=again)
            for _ in range(count):
                shelf.takers.popleft()[1].set_exception(error)
            if not count:
                logger.warning("a box that nobody waits for does not start: %s", error)
        else:
            if not self._running:
                await box.close()
                return
            self._plan.started(key, time.monotonic() - begun, under_way)
            self._settle(key, shelf, box)
        self._move()

    def _settle(self, key: str, shelf: _Shelf, box: Sandbox) -> None:
        if self._plan.settle(key):
            shelf.takers.popleft()[1].set_result(box)
        else:
            shelf.warm.append(_Warm(box, time.monotonic()))

    def _in_background(self, tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def _stopped() -> Unavailable:
    return Unavailable("the pool of boxes is stopped, and starts none")

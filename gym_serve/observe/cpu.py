"""The calls of a server and their CPU time, by stage.

The tasks of an event loop take turns, so the CPU time of one call is that of all its turns, and a turn that
runs another server's call in this process (an inline one) is divided between the two. Reading the clock of a
thread is a system call, and a call that is measured costs as much as a tenth of a small rollout. So the first
call of an operation is measured, and then about one in 64, and ever fewer, down to one in `EVERY`. A measured
call counts for all since the one before. The number of calls between two is random, as every n-th might
always be the same turn of an episode. Calls that a measured one makes in this process are timed too, to leave
them out.

What a process uses outside of its calls (connections, garbage collection, metrics, threads of libraries) is
the stage ``other``. Child processes, such as sandboxes, are not counted.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import Any, Generic, NamedTuple, TypeVar

from gym_serve.observe.catalogue import ANSWERS, CPU_SECONDS
from gym_serve.observe.metrics import settle

T = TypeVar("T")

EVERY = 1024
"""At least one call in so many is measured, on average."""

_EVERY_AT_FIRST = 64
_SETTLED = 256  # calls of an operation until values are settled once more

OTHER = "other"
"""The stage of what no call used."""

_dice = random.Random().random  # its own: a trainer's seed stays what it is
_measured: ContextVar[_Measured | None] = ContextVar("gym_serve_cpu_stage", default=None)
"""The measured call that runs here; None if it is none."""


MEASURED: set[object] = set()
"""The calls of this process that are timed now."""


class _Turn(threading.local):
    inner = 0.0
    """CPU seconds of the present turn that belong to calls inside of it."""


_turn = _Turn()


def stage_of(op: str) -> str:
    """The stage of an operation: its name; ``tools`` for all tools."""
    return "tools" if op.startswith("tools/") else op


class CallMeter:
    """Counts the calls of one operation of a server, and their CPU time.

    Args:
        op: the operation, or ``unknown``.

    Attributes:
        left: calls until the next one that is measured, which has 0. Whoever runs a call subtracts 1, and
            gives it to `measured` where 0 are left, or another call is `MEASURED`.
    """

    __slots__ = ("_calls", "_op", "_server", "_succeeded", "_weight", "left")

    def __init__(self, server: str, op: str) -> None:
        self._succeeded = ANSWERS.values(server, op, "200").add
        self.left = self._weight = 1
        self._server = server
        self._op = op
        self._calls = 0  # before those that the next measured one counts for

    def record(self, status: int, seconds: float) -> None:
        """Count a call that the server has answered with any status."""
        if status == 200:
            self._succeeded(seconds)  # as `observe`, which costs twice as much
        else:
            ANSWERS.observe(self._server, self._op, str(status), value=seconds)

    def measured(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """The work of a call, with its CPU time counted if it is one of those that are measured."""
        if self.left:
            return work if _measured.get() is None else _Timed(work, None)
        measure = _Measured((self._server, stage_of(self._op)), self._weight)
        before, self._calls = self._calls, self._calls + self._weight
        if before // _SETTLED != self._calls // _SETTLED:
            settle()
        every = min(EVERY, _EVERY_AT_FIRST + self._calls // 8)
        self.left = self._weight = 1 + int(_dice() * (2 * every - 1))
        return _Timed(work, measure)


class _Measured(NamedTuple):
    """What the time of a measured call is counted under, and how many calls it stands for."""

    labels: tuple[str, str]
    weight: int

    def add(self, seconds: float) -> None:
        if seconds > 0:
            CPU_SECONDS.add(*self.labels, value=seconds * self.weight)


class _Timed(Generic[T]):
    __slots__ = ("_measure", "_work")

    def __init__(self, work: Coroutine[Any, Any, T], measure: _Measured | None) -> None:
        self._work = work
        self._measure = measure

    def __await__(self) -> Generator[Any, Any, T]:
        token = _measured.set(self._measure)
        MEASURED.add(self)
        try:
            return (yield from self._turns())
        finally:
            MEASURED.discard(self)
            _measured.reset(token)

    def _turns(self) -> Generator[Any, Any, T]:
        value: Any = None
        error: BaseException | None = None
        while True:
            before, _turn.inner = _turn.inner, 0.0
            begun = time.thread_time()
            try:
                waits_for = self._work.send(value) if error is None else self._work.throw(error)
            except StopIteration as done:
                result: T = done.value
                return result
            finally:
                seconds = time.thread_time() - begun
                if self._measure is not None:
                    self._measure.add(seconds - _turn.inner)
                _turn.inner = before + seconds
            try:
                value, error = (yield waits_for), None
            except GeneratorExit:
                self._work.close()
                raise
            except BaseException as thrown:
                error = thrown


def measured_in_thread(work: Callable[[], T]) -> T:
    """Run a part of a call that runs in another thread, with a copy of the call's context."""
    measure = _measured.get()
    if measure is None:
        return work()
    begun = time.thread_time()
    try:
        return work()
    finally:
        measure.add(time.thread_time() - begun)


class OtherCpu:
    """Counts what this process uses from now on outside of its calls."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._begun = time.process_time()

    def refresh(self) -> None:
        points = [(point.labels, point.value) for point in CPU_SECONDS.points()]
        used = time.process_time() - self._begun
        rest = used - sum(value for _, value in points)
        if rest > 0:  # what was measured is an estimate, and may be ahead
            CPU_SECONDS.add(self._server, OTHER, value=rest)

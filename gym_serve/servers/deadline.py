"""A limit on the time that a block of a coroutine takes.

`asyncio.wait_for` makes a task for the same, which costs as much as a whole call inside a process, and
`asyncio.timeout` a timer. There are fifteen limits per rollout, hardly one of which ever goes off: so those
of `_COARSE_SECONDS` or more that end within the same second share a timer, and may be up to a second late.
"""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any

__all__ = ["time_limit"]

_COARSE_SECONDS = 5.0

_Task = asyncio.Task[Any]
_cancelling: Callable[[_Task], int]
_cancel: Callable[[_Task], object]
_uncancel: Callable[[_Task], int]
if sys.version_info >= (3, 11):
    _cancelling, _cancel, _uncancel = asyncio.Task.cancelling, asyncio.Task.cancel, asyncio.Task.uncancel
else:  # a task does not know there how often it was cancelled, so at least our own times are counted
    _ends: Counter[_Task] = Counter()
    _cancelling = _ends.__getitem__

    def _cancel(task: _Task) -> None:
        _ends[task] += 1
        task.cancel()

    def _uncancel(task: _Task) -> int:
        left = _ends.pop(task) - 1
        if left:
            _ends[task] = left
        return left


class time_limit:
    """Ends a ``with`` block of a coroutine after a time.

    Args:
        seconds: from now; None for no limit.

    Raises:
        asyncio.TimeoutError: on exit, where the block was ended.
    """

    __slots__ = ("_before", "_over", "_second", "_seconds", "_task", "_timer")

    def __init__(self, seconds: float | None) -> None:
        self._seconds = math.inf if seconds is None else seconds
        self._over = False
        self._timer: asyncio.TimerHandle | None = None
        self._second: set[time_limit] | None = None

    def __enter__(self) -> None:
        if self._seconds == math.inf:
            return
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._before = _cancelling(task)  # by others
        if self._seconds < _COARSE_SECONDS:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._end)
        else:
            self._second = _second_in(self._seconds)
            self._second.add(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        elif self._second is not None:
            self._second.discard(self)
        if self._over and _uncancel(self._task) <= self._before and isinstance(error, asyncio.CancelledError):
            raise asyncio.TimeoutError from error

    def _end(self) -> None:
        self._over = True
        _cancel(self._task)


class _Seconds(threading.local):
    """The limits that end at each second of the monotonic clock, in the loop that runs in this thread."""

    loop: asyncio.AbstractEventLoop | None = None
    ending: dict[int, set[time_limit]]


_seconds = _Seconds()


def _second_in(seconds: float) -> set[time_limit]:
    """What ends at the first full second after so many from now."""
    loop = asyncio.get_running_loop()
    if _seconds.loop is not loop:
        _seconds.loop, _seconds.ending = loop, {}
    now = time.monotonic()
    second = int(now + seconds) + 1
    ending = _seconds.ending
    if (limits := ending.get(second)) is None:
        limits = ending[second] = set()
        loop.call_later(second - now, _end_all, ending, second)
    return limits


def _end_all(ending: dict[int, set[time_limit]], second: int) -> None:
    for limit in ending.pop(second):
        limit._end()

"""A limit on the time that a block of a coroutine takes.

`asyncio.wait_for` makes a task for the same, which costs as much as a whole call inside a process. A timer
costs half of that, and there are ten per rollout, hardly one of which ever goes off: so limits of
`_COARSE_SECONDS` or more that end within the same second share one, and may be up to a second late.
"""

from __future__ import annotations

import asyncio
import math
import sys
from types import TracebackType
from weakref import WeakKeyDictionary

if sys.version_info >= (3, 11):
    from asyncio import Timeout, timeout

    _COARSE_SECONDS = 5.0
else:
    from async_timeout import Timeout, timeout

    _COARSE_SECONDS = math.inf  # these cannot be ended from outside their task

__all__ = ["time_limit"]

_Seconds = dict[int, set[Timeout]]
"""What ends at each second of a loop's clock."""

_of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _Seconds] = WeakKeyDictionary()


class time_limit:
    """Ends an ``async with`` block after a time.

    Args:
        seconds: from now; None for no limit.

    Raises:
        TimeoutError: on exit, where the block was ended. (`asyncio.TimeoutError` on Python 3.10.)
    """

    __slots__ = ("_scope", "_second")

    def __init__(self, seconds: float | None) -> None:
        self._second: set[Timeout] | None = None
        if seconds is not None and _COARSE_SECONDS <= seconds < math.inf:
            self._second, seconds = _second_in(seconds), None
        self._scope = timeout(seconds)

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()
        if self._second is not None:
            self._second.add(self._scope)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._second is not None:
            self._second.discard(self._scope)
        await self._scope.__aexit__(kind, error, trace)


def _second_in(seconds: float) -> set[Timeout]:
    """What ends at the first full second after so many from now."""
    loop = asyncio.get_running_loop()
    due = _of_loop.get(loop)
    if due is None:
        due = _of_loop[loop] = {}
    second = math.ceil(loop.time() + seconds)
    if (ending := due.get(second)) is None:
        ending = due[second] = set()
        loop.call_at(second, _end_all, due, second)
    return ending


def _end_all(due: _Seconds, second: int) -> None:
    for scope in due.pop(second):
        scope.reschedule(0.0)

"""`LoadMeter`: how busy this process was within the last seconds. It owns no task; the clocks are given."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

__all__ = ["LoadMeter"]

_WINDOW_SECONDS = 10


class _Second:
    """What happened in one second, and the clocks when it began."""

    def __init__(self, now: float, cpu: float) -> None:
        self.now = now
        self.cpu = cpu
        self.answers = 0
        self.refused = 0


class LoadMeter:
    """Counts answers, and the CPU time between them.

    Args:
        clock: seconds.
        cpu: CPU seconds of this process.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu: Callable[[], float] = time.process_time
    ) -> None:
        self._clock = clock
        self._cpu = cpu
        self._seconds: deque[_Second] = deque()

    def answered(self, *, refused: bool = False) -> None:
        """Count an answer.

        Args:
            refused: it was "overloaded".
        """
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

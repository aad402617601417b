"""`PULSE` knows when this process was stopped: frozen by a signal, a debugger or the machine below it.

A limit that ends while a process stands still says nothing about what the process ran. A thread that wants to
wake four times a second tells the two apart by the gaps between its turns. It is no task, since a method that
blocks the event loop stops every task, but no thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque

_EVERY = 0.25  # seconds
_LEAST = 1.0  # seconds; a busy machine lets a thread wait for less
_KEPT = 256  # gaps


class Pulse:
    """Notices the gaps in the life of a process."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._gaps: deque[tuple[float, float]] = deque(maxlen=_KEPT)  # from when to when

    def start(self) -> None:
        """Begin to watch; does nothing the second time."""
        if self._last is None:
            self._last = time.monotonic()
            threading.Thread(target=self._watch, name="gym_serve-pulse", daemon=True).start()

    def stopped_since(self, moment: float) -> float:
        """Seconds since a `time.monotonic` moment in which this process stood still."""
        now = time.monotonic()
        gaps = [*self._gaps]
        if self._last is not None and now - self._last >= _LEAST:  # it has just woken, this thread first
            gaps.append((self._last, now))
        return sum(max(0.0, end - max(begin, moment)) for begin, end in gaps)

    def _watch(self) -> None:
        while True:
            time.sleep(_EVERY)
            last, now = self._last, time.monotonic()
            if last is not None and now - last >= _LEAST:
                self._gaps.append((last, now))
            self._last = now


PULSE = Pulse()  # that of this process

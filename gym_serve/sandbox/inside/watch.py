"""`Watch`: how much of its time a process has used, and whether it takes more than its share.

A process has used what it ran, all threads together, or slept. What it waited for a processor does not count,
so that a busy machine makes no right program wrong. Nor may a program make its own threads wait for one
another and call that a busy machine: of a thread's waiting, what the other threads ran is taken off. What
remains is never more than the time in which the process wanted to run and nothing of it did.

A process with one thread runs on any core. One with more is held to a single one.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import Literal

_MAX_THREADS = 256
_MAX_FILES = 20_000  # each takes a kilobyte of memory that no other limit counts

Excess = Literal["time", "threads", "files", "machine"]
"""It ran too long, has too many threads or files, or got at most a tenth of a processor from the machine."""

REASONS: dict[Excess, str] = {
    "threads": f"more than {_MAX_THREADS} threads",
    "files": f"more than {_MAX_FILES} files",
    "machine": "the machine is overloaded",
}

_PATIENCE = 10
_SHORTEST_NAP, _LONGEST_NAP = 0.0005, 0.02
_LINUX = sys.platform == "linux"


class Watch:
    """The time of a process since now, and its files in ``folder``, a file system of its own, if it has
    one."""

    def __init__(self, process: int, folder: str | None = None) -> None:
        self._process = process
        self._folder = folder
        self._started = time.monotonic()
        self._ran = _processor_seconds(process)
        self._times = {thread: _times(process, thread) for thread in _threads(process)}
        self._held: set[int] = set()
        self.used = 0.0  # seconds that it ran or slept until the last look

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    @property
    def nap(self) -> float:
        """Seconds until the next look; few at first, because most programs are short."""
        return min(_LONGEST_NAP, max(_SHORTEST_NAP, self.elapsed / 10))

    def excess(self, seconds: float) -> Excess | None:
        """The limit that the process exceeds, given its seconds; None for none. Also keeps it on one core."""
        elapsed = self.elapsed
        ran = _processor_seconds(self._process) - self._ran
        if _LINUX and os.stat(f"/proc/{self._process}/task").st_nlink > 3:
            threads = _threads(self._process)
            if len(threads) > _MAX_THREADS:
                return "threads"
            self._hold(threads)
        if self._folder is not None:
            system = os.statvfs(self._folder)
            if system.f_files - system.f_ffree > _MAX_FILES:
                return "files"
        self.used = max(ran, elapsed - self._waited(ran))
        if self.used > seconds:
            return "time"
        return "machine" if elapsed > _PATIENCE * seconds else None

    def _hold(self, threads: set[int]) -> None:
        if len(threads) < 2 or threads <= self._held:
            return
        core = _core(self._process)
        for thread in threads - self._held:
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(thread, {core})
        self._held = threads

    def _waited(self, ran: float) -> float:
        """For how long at least the process wanted to run, and nothing of it did."""
        longest = 0.0
        for thread in _threads(self._process):
            own, queued = _times(self._process, thread)
            own_before, queued_before = self._times.get(thread, (0.0, 0.0))
            others = max(0.0, ran - (own - own_before))
            longest = max(longest, queued - queued_before - others)
        return longest


def _processor_seconds(process: int) -> float:
    """What all threads of a process ran, those that have ended included; 0 where the system does not say."""
    return time.clock_gettime(~process << 3 | 2) if _LINUX else 0.0  # Linux' clock of another process


def _threads(process: int) -> set[int]:
    return set(map(int, os.listdir(f"/proc/{process}/task"))) if _LINUX else {process}


def _times(process: int, thread: int) -> tuple[float, float]:
    """For how long a thread ran, and for how long it wanted to; zeros if the kernel does not say."""
    try:
        with open(f"/proc/{process}/task/{thread}/schedstat") as file:
            ran, queued, _ = map(int, file.read().split())
    except (OSError, ValueError):
        return 0.0, 0.0
    return ran / 1e9, queued / 1e9


def _core(process: int) -> int:
    with open(f"/proc/{process}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[36])

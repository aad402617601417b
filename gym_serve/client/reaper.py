"""A process that ends the local Ray of this one, should this one be killed.

Ray's first processes die with the one that started them, but not all of theirs: an agent that a raylet has
just started waits for a dead GCS for minutes, or for ever. What belongs to this Ray, and to nobody else, has
a random mark in its environment, which it inherits.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

__all__ = ["Reaper", "marked"]

_VARIABLE = "GYM_SERVE_LOCAL_RAY"
_LOOK_SECONDS = 0.5
_GRACE_SECONDS = 5.0  # in which Ray's processes notice by themselves that they are alone


class Reaper:
    """Waits for the end of this process. Where there is no ``/proc``, Ray has a reaper of its own.

    Args:
        environment: further variables for what has the mark.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._mark = f"{_VARIABLE}={uuid4().hex}"
        # Ray's processes give themselves titles, which otherwise overwrite their environment.
        self._environment = {**environment, "SPT_NOENV": "1"}
        # -S -E: it needs nothing but the standard library. A session of its own: Ctrl-C is not for it.
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", __file__, str(os.getpid()), self._mark],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    @contextmanager
    def marking(self) -> Iterator[None]:
        """What this process starts in the block has the mark, with all that they start in turn."""
        variables = dict([self._mark.split("=")]) | dict(self._environment)
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value

    def reap(self) -> None:
        """End what has the mark, at once: what is left of a Ray that did not start."""
        while left := marked(self._mark):
            _kill(left)
            time.sleep(0.05)

    def dismiss(self) -> None:
        """End the reaper: this process has stopped its Ray."""
        self._process.kill()
        self._process.wait()


def marked(mark: str) -> dict[int, str]:
    """The processes with a variable in their environment, by id, with their command lines.

    Args:
        mark: ``NAME=value``.
    """
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def _kill(processes: Iterable[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _main(parent: int, mark: str) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    died, misses = time.monotonic(), 0
    while misses < 2:  # the first of a pair may be starting the second while this one looks
        left = marked(mark)
        misses = 0 if left else misses + 1
        if time.monotonic() > died + _GRACE_SECONDS:
            _kill(left)
        time.sleep(_LOOK_SECONDS)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2])

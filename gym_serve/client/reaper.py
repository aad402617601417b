"""A process that ends this process's local Ray if this process is killed.

Ray's first processes die with their parent, but not all of their children do: an agent that a raylet has
just started may wait for a dead GCS for minutes, or for ever. All processes of this Ray, and no others, have
a random mark in their environment, which they inherit.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

_VARIABLE = "GYM_SERVE_LOCAL_RAY"
_LOOK_SECONDS = 0.5
_GRACE_SECONDS = 5.0  # in which Ray's processes notice by themselves that they are alone


class Reaper:
    """Waits for the end of this process. On systems without ``/proc``, Ray's own reaper must do.

    The marked processes get the variables of ``environment``; their files in ``folder`` are removed.
    """

    def __init__(self, environment: Mapping[str, str], folder: Path) -> None:
        self._folder = folder
        self._mark = f"{_VARIABLE}={uuid4().hex}"
        # Ray's processes give themselves titles, which otherwise overwrite their environment.
        self._environment = {**environment, "SPT_NOENV": "1"}
        # -S -E: the standard library is enough. A new session: Ctrl-C must not reach it.
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", __file__, str(os.getpid()), self._mark, str(folder)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    @contextmanager
    def marking(self) -> Iterator[None]:
        """Processes started in the block have the mark, and so do their descendants."""
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
        """Kill all marked processes, e.g. the remains of a Ray that did not start."""
        while left := marked(self._mark):
            _kill(left)
            time.sleep(0.05)

    def dismiss(self) -> None:
        """End the reaper, after this process has stopped its Ray."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def marked(mark: str) -> dict[int, str]:
    """Command lines, by process id, of the processes with a variable in their environment. ``mark``:
    ``NAME=value``."""
    processes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                processes[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return processes


def _kill(processes: Iterable[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _main(parent: int, mark: str, folder: str) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    died, misses = time.monotonic(), 0
    while misses < 2:  # a process may be starting a child during the first look
        left = marked(mark)
        misses = 0 if left else misses + 1
        if time.monotonic() > died + _GRACE_SECONDS:
            _kill(left)
        time.sleep(_LOOK_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _main(int(sys.argv[1]), *sys.argv[2:4])

"""Work for a `WorkerPool` in tests: a request is ``[what, argument]``."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

_kept: list[bytearray] = []


def warm_up() -> None:
    """Nothing to import."""


def work(request: list[Any]) -> Any:
    """Do what the request says."""
    what, argument = request
    if what == "echo":
        return argument
    if what == "sleep":
        time.sleep(argument)
        return argument
    if what == "spin":  # inside C code, where no Python signal handler runs
        return len(str(9 ** (9**9)))
    if what == "burn":
        end = time.process_time() + argument
        while time.process_time() < end:
            pass
        return argument
    if what == "allocate":
        return len(bytearray(argument))
    if what == "keep":
        _kept.append(bytearray(os.urandom(1)) * argument)
        return argument
    if what == "touch":  # memory that is really used, and then the end that the system's OOM killer gives
        kept = bytearray(os.urandom(1)) * argument
        os.kill(os.getpid(), signal.SIGKILL)
        return len(kept)
    if what == "signal":
        os.kill(os.getpid(), argument)
    if what == "exit":
        os._exit(argument)
    if what == "raise":
        raise ValueError(argument)
    if what == "environment":
        return dict(os.environ)
    raise NotImplementedError(what)

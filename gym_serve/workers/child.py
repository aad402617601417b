"""The process of a worker: calls one function again and again, for `WorkerProcess`.

It runs as a script: ``python child.py FILE MEMORY_BYTES``. FILE defines ``work(request)``, which takes and
returns JSON values, and ``warm_up()``. Nothing of gym_serve is imported, unless FILE does.

Messages are lines of ASCII JSON on the standard input, which is a socket. After ``{"result": null}``, which
means that the process is warm, each ``{"cpu_seconds", "request"}`` is answered with ``{"result"}``, or with
``{"error": str}``. Each answer has ``spent``: true if the process holds half of its memory, and should be
replaced. When a request has used up its CPU time, the kernel ends the process with SIGPROF.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import resource
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

_PR_SET_PDEATHSIG = 1
_MAX_REPLY = 1_000_000
_MAX_REASON = 2_000


def main() -> None:
    """Serve requests until the parent closes the socket."""
    path, memory_bytes = sys.argv[1], int(sys.argv[2])
    _confine(memory_bytes)
    spec = importlib.util.spec_from_file_location("gym_serve_work", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)

    def load() -> None:
        spec.loader.exec_module(module)  # type: ignore[union-attr]
        module.warm_up()

    with socket.socket(fileno=0) as connection, connection.makefile("rb") as lines:
        connection.sendall(_reply(load, memory_bytes))
        for line in lines:
            message = json.loads(line)
            # The CPU time of all threads, in the kernel too; how busy the machine is does not matter.
            signal.setitimer(signal.ITIMER_PROF, message["cpu_seconds"])
            reply = _reply(partial(module.work, message["request"]), memory_bytes)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.sendall(reply)


def _confine(memory_bytes: int) -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a parent that ignores it would have us ignore it too
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        # A busy worker does not see the end of file when its parent dies; the kernel does.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _reply(work: Callable[[], Any], memory_bytes: int) -> bytes:
    spent = False
    try:
        text = json.dumps(work())
        message = f'"result": {text}' if len(text) < _MAX_REPLY else '"error": "its result is too long"'
    except Exception as error:
        spent = isinstance(error, MemoryError)
        reason = "it takes too much memory" if spent else f"{type(error).__name__}: {error}"[:_MAX_REASON]
        message = f'"error": {json.dumps(reason)}'
    spent = spent or _resident_bytes() > memory_bytes // 2
    return f'{{{message}, "spent": {json.dumps(spent)}}}\n'.encode()


def _resident_bytes() -> int:
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # On Linux that would be the peak of the parent, whose memory a new process begins with.
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main()

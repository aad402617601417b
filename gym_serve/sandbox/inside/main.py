"""The supervisor: it answers the requests of the process outside, and runs none of the code that they bring.

Messages are lines of ASCII JSON on the socket that is the standard input, each followed by as many bytes as
it says in ``sizes``. The first one is the configuration, answered by ``{"ready": true}``. Then come requests,
each answered once: ``execute``, code in a namespace and a child that last (`Session`); ``run``, a program in
a child of its own (`Program`). A child is confined before any of its code runs.
"""

from __future__ import annotations

import builtins
import gc
import json
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from .confinement import die_with_parent, protect
from .output import describe
from .program import Program
from .session import Session

Reply = tuple[dict[str, Any], list[bytes]]


def main() -> None:
    """Serve until the socket ends; in a process that is forked for code, run that."""
    control = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    try:
        task = _serve(control)
    except Exception as error:
        _send(control, {"failure": describe(error)}, [])
        raise
    if task is not None:
        task()


def _serve(control: socket.socket) -> Callable[[], None] | None:
    """Answer requests until the socket ends; in a forked process, return what it has to run."""
    lines = control.makefile("rb")
    config = json.loads(lines.readline())
    die_with_parent()
    protect()
    sys.path += config["path"]
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment] # what `site` would do
    namespace: dict[str, Any] = {}
    exec(compile(config["prelude"], "<prelude>", "exec", dont_inherit=True), namespace)
    folder = "/tmp" if config["filter"] else None  # which is the sandbox's own only where there is one
    session: Session | None = None
    gc.freeze()  # a collection in a child would copy what it shares with this process
    _send(control, {"ready": True}, [])
    while line := lines.readline():
        request = json.loads(line)
        task: Program | Session
        if request["op"] == "execute":
            if session is not None:
                _send(control, *session.execute(request))
                continue
            task = session = Session(namespace)
        else:
            task = Program(request, lines.read(request["sizes"][0]), namespace)
        child = os.fork()
        if child == 0:
            lines.close()
            control.close()
            task.prepare(config)
            return task.run
        task.started(child, folder)
        _send(control, *(task.execute(request) if isinstance(task, Session) else task.outcome()))
    return None


def _send(control: socket.socket, message: dict[str, Any], texts: list[bytes]) -> None:
    message["sizes"] = [len(text) for text in texts]
    control.sendall(b"".join((json.dumps(message).encode(), b"\n", *texts)))

"""`end_orphans`: of sandboxes whose owner was killed in the very moment in which they started.

``bwrap`` ends with its owner, and its child with it; but that child first waits for a word of ``bwrap``. If
the owner is killed in the microseconds before, the word never comes, and it would wait for ever.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

FIRST = ("--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox", "--clearenv")
"""Options of every ``bwrap`` of gym_serve, by which its processes are known."""

_MARK = "\0".join(FIRST).encode()


def end_orphans() -> None:
    """Kill the children of ``bwrap`` that are without it, of any gym_serve of this user on this machine."""
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError):  # it has ended, or is another user's
                _end_if_orphan(int(name))


def _end_if_orphan(process: int) -> None:
    command = _command(process)
    if _MARK not in command:
        return
    file = os.pidfd_open(process)
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines)
        # The child is the first process of its namespace; until it becomes another program, it has bwrap's
        # own command line.
        if status["NSpid"].split()[-1] == "1" and _command(int(status["PPid"])) != command:
            signal.pidfd_send_signal(file, signal.SIGKILL)
    finally:
        os.close(file)


def _command(process: int) -> bytes:
    return Path(f"/proc/{process}/cmdline").read_bytes()

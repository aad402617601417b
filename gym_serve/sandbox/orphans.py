"""What an owner of sandboxes that was killed leaves, and its next one removes.

`end_orphans`: ``bwrap`` ends with its owner, and its child with it; but that child first waits for a word
of ``bwrap``. If the owner is killed in the microseconds before, the word never comes, and it would wait for
ever.

`remove_folders`: of processes that are not confined, whose folder is one of this machine (`OwnFolder`).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

FIRST = ("--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox", "--clearenv")
"""Options of every ``bwrap`` of gym_serve, by which its processes are known."""

_FOLDERS = "gym-serve-sandbox-"

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


class OwnFolder:
    """A new folder of this process, until `remove`; ``path`` is its path.

    A lock, which the kernel drops with this process, says that it is in use.
    """

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix=_FOLDERS)
        lock = os.open(self.path, os.O_RDONLY)
        self._unlock = weakref.finalize(self, os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Safe to call again."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()


def remove_folders() -> None:
    """Remove the folders of this user whose owner is gone."""
    for path in Path(tempfile.gettempdir()).glob(f"{_FOLDERS}*"):
        with suppress(OSError):  # it is in use, or not a folder
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(folder).st_uid == os.geteuid():
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path)
            finally:
                os.close(folder)

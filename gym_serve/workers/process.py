"""`ChildProcess`: a child process and the socket to it, which is its standard input.

It is a plain `subprocess.Popen` with a socket pair, not an asyncio subprocess: those need a child watcher,
which differs between Python versions, uvloop and loops outside the main thread (a Serve replica's is one).
Here, whoever ends the process collects its exit status.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

_LOOK_SECONDS = 1.0
_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}


@dataclass(frozen=True)
class End:
    """How a process ended: its exit status (a signal negated), and the most memory that it ever had, 0 if
    unknown.
    """

    status: int
    peak_bytes: int

    @property
    def out_of_time(self) -> bool:
        return self.status == -signal.SIGPROF

    @property
    def by_itself(self) -> bool:
        """Whether it crashed or exited, rather than being killed from outside."""
        return self.status >= 0 or -self.status in _CRASHES

    def __str__(self) -> str:
        return f"signal {-self.status}" if self.status < 0 else f"exit status {self.status}"


class ChildProcess:
    """A child process, made by `start`, and the socket to it."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.reader = reader
        self.writer = writer
        self._process = process
        self._ending: asyncio.Task[End] | None = None

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        max_line: int,
        folder: str | None = None,
    ) -> ChildProcess:
        """Start a process with these environment variables only, no output, and a process group of its own;
        ``reader`` takes lines of ``max_line`` bytes. Raises OSError: the program cannot be started.
        """
        # On the event loop's thread: the kernel ties the life of a child with a "parent death signal" to the
        # thread that starts it.
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(  # noqa: ASYNC220 - a millisecond
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd=folder,
                    env=dict(environment),
                    start_new_session=True,  # Ctrl-C in a terminal is for the parent
                )
            except OSError:
                ours.close()
                raise
        try:
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=max_line)
        except BaseException:  # a cancellation, mostly
            ours.close()
            process.kill()
            process.wait()
            raise
        return cls(process, reader, writer)

    async def end(self, grace: float = 0.0) -> End:
        """Kill the process and its group, after ``grace`` seconds for one that has closed its socket, and
        collect it. Safe to call again, also after a cancellation.
        """
        if self._ending is None:
            if not grace:  # first of all: the end of its socket would be another reason to end
                _kill(self._process)
            self.writer.close()
            self._ending = asyncio.create_task(asyncio.to_thread(_collect, self._process, grace))
        return await asyncio.shield(self._ending)


async def end_with_parent(parent: int) -> None:
    """Kill this process once its parent, of this id, is gone.

    A worker of Ray outlives a raylet that was killed, with all that it has, though Ray takes it for dead.
    """
    while os.getppid() == parent:  # noqa: ASYNC110 - the kernel tells nobody
        await asyncio.sleep(_LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _kill(process: subprocess.Popen[bytes]) -> None:
    os.kill(process.pid, signal.SIGKILL)  # not `Popen.kill`, which may collect it
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _collect(process: subprocess.Popen[bytes], grace: float) -> End:
    # Not by `Popen.wait`, which does not tell how much memory it took.
    give_up = time.monotonic() + grace
    pid, status, usage = os.wait4(process.pid, os.WNOHANG)
    while pid == 0 and time.monotonic() < give_up:
        time.sleep(0.002)
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
    if pid == 0:
        _kill(process)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    # A new process begins with the memory of its parent, which counts as its own peak.
    is_peak = usage.ru_maxrss > resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return End(process.returncode, is_peak * usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))

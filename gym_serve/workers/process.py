"""`WorkerProcess`: one process that runs child.py, and the socket to it.

A plain `subprocess.Popen` with a socket pair, rather than asyncio's own subprocesses: those need a
child watcher, which differs between Python versions, uvloop and loops outside the main thread (a
Serve replica's is one); here the exit status is collected by whoever killed the process.

The process gets no environment variables except those that Python needs to run: hostile input comes
near no API key.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gym_serve.types.errors import VerifierFailed

__all__ = ["End", "WorkerProcess"]

_SCRIPT = Path(__file__).with_name("child.py")
_WARM_UP_SECONDS = 300.0
_LAST_SECONDS = 10.0
_MAX_LINE = 1 << 21
_ENVIRONMENT = ("PATH", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TMPDIR")
_THREADS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
)  # each reserves memory for its stack
_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}


@dataclass(frozen=True)
class End:
    """How a process ended.

    Attributes:
        status: its exit status; a signal negated.
        peak_bytes: the most memory that it ever had; 0 if that is less than its parent's, and so not known.
    """

    status: int
    peak_bytes: int

    @property
    def out_of_time(self) -> bool:
        """Whether it had used up its CPU time."""
        return self.status == -signal.SIGPROF

    @property
    def by_itself(self) -> bool:
        """Whether it crashed or exited, rather than being killed from outside."""
        return self.status >= 0 or -self.status in _CRASHES

    def __str__(self) -> str:
        return f"signal {-self.status}" if self.status < 0 else f"exit status {self.status}"


class _Live(NamedTuple):
    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class WorkerProcess:
    """A worker that can be started, asked, stopped, and started again.

    Args:
        name: what it runs, for messages: ``"math-verify"``.
        path: the file with the work, see child.py.
        memory_bytes: address space that it may use.
    """

    def __init__(self, name: str, path: Path, memory_bytes: int) -> None:
        self._name = name
        self._path = path
        self._memory_bytes = memory_bytes
        self._live: _Live | None = None
        self._ending: asyncio.Task[End] | None = None

    @property
    def running(self) -> bool:
        """Between `start` and `stop`; the process may have died since."""
        return self._live is not None

    async def start(self) -> None:
        """Start the process and wait until it is warm.

        Raises:
            VerifierFailed: it does not start, with its reason.
        """
        reason = None
        try:
            await self._connect()
            reason = (await asyncio.wait_for(self._receive(), _WARM_UP_SECONDS)).get("error")
        except asyncio.TimeoutError:
            await self.stop()
            reason = f"it was not ready in {_WARM_UP_SECONDS:g} s"
        except OSError as error:
            end = await self.collect()
            reason = f"{error} ({end})" if end else str(error)
        except BaseException:
            await self.stop()
            raise
        if reason is not None:
            await self.stop()
            raise VerifierFailed(f"a {self._name} worker does not start: {reason}")

    async def ask(self, request: bytes) -> dict[str, Any]:
        """Send a line and wait for its answer.

        Raises:
            ConnectionError: the process died, or was not started.
        """
        if self._live is not None:
            self._live.writer.write(request)
            await self._live.writer.drain()
        return await self._receive()

    async def collect(self) -> End | None:
        """`stop`, for a process that has closed its socket: it is given time to end by itself."""
        return await self._end(_LAST_SECONDS)

    async def stop(self) -> End | None:
        """Kill the process and collect it.

        Returns:
            how it ended; None if there was none.
        """
        return await self._end(0)

    async def _end(self, grace: float) -> End | None:
        if self._live is None:
            return None
        process, _, writer = self._live
        if self._ending is None:
            writer.close()
            self._ending = asyncio.create_task(asyncio.to_thread(_collect, process, grace))
        end = await asyncio.shield(self._ending)
        self._live = self._ending = None  # not before: a `stop` that is cancelled can be repeated
        return end

    async def _connect(self) -> None:
        # On the event loop's thread, as the kernel ties the worker's life to the thread that starts it.
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = _spawn(theirs, self._path, self._memory_bytes)
            except OSError:
                ours.close()
                raise
        try:
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=_MAX_LINE)
        except BaseException:  # a cancellation, mostly
            ours.close()
            process.kill()
            process.wait()
            raise
        self._live = _Live(process, reader, writer)

    async def _receive(self) -> dict[str, Any]:
        line = await self._live.reader.readline() if self._live is not None else b""
        if not line.endswith(b"\n"):
            raise ConnectionResetError("the worker closed its socket")
        message: dict[str, Any] = json.loads(line)
        return message


def _spawn(connection: socket.socket, path: Path, memory_bytes: int) -> subprocess.Popen[bytes]:
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    environment |= dict.fromkeys(_THREADS, "1")
    environment["PYTHONHASHSEED"] = "0"  # SymPy's ways depend on it: one answer, one verdict, always
    return subprocess.Popen(
        [sys.executable, str(_SCRIPT), str(path), str(memory_bytes)],
        stdin=connection.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # Ctrl-C in a terminal is for the parent
    )


def _collect(process: subprocess.Popen[bytes], grace: float) -> End:
    # Not by `Popen.wait`, which does not tell how much memory it took.
    give_up = time.monotonic() + grace
    while (waited := os.wait4(process.pid, os.WNOHANG))[0] == 0:
        if time.monotonic() >= give_up:
            os.kill(process.pid, signal.SIGKILL)
            waited = os.wait4(process.pid, 0)
            break
        time.sleep(0.002)
    _, status, usage = waited
    process.returncode = os.waitstatus_to_exitcode(status)
    # A new process begins with the memory of its parent, which counts as its own peak.
    known = usage.ru_maxrss > resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return End(process.returncode, known * usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))

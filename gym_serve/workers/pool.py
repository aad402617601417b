"""`WorkerPool`: warm processes that do bounded work on hostile input.

- CPU time counts, measured by the kernel in the worker. A request that exceeds it, crashes its worker or
  fills its memory is at fault: `WorkFailed`.
- The machine's faults are never blamed on a request: a worker that is killed from outside, or gets no CPU
  time, raises `VerifierFailed`. A request whose worker died is tried once more in a new one before either.
- No request waits for a long one. Each runs for `SLICE_SECONDS` at first, first in, first out. One that needs
  more starts again behind them, with all of its CPU time, and never in the first worker.
- A request that has used up its slice may be given up when its caller has no more time (``until``).
- Nothing is left after `stop`, nor when the parent dies: no process, no zombie, no waiting request.

A worker gets no environment variables except those that Python needs: hostile input comes near no API key.

`ChildProcess`: a child process and the socket to it, which is its standard input.

It is a plain `subprocess.Popen` with a socket pair, not an asyncio subprocess: those need a child watcher,
which differs between Python versions, uvloop and loops outside the main thread (a Serve replica's is one).
Here, whoever ends the process collects its exit status.
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
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_serve.types.errors import Unavailable, VerifierFailed

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
        stdout: int = subprocess.DEVNULL,
    ) -> ChildProcess:
        """Start a process with these environment variables only, no output unless ``stdout`` is a file, and a
        process group of its own; ``reader`` takes lines of ``max_line`` bytes. Raises OSError: the program
        cannot be started.
        """
        # On the event loop's thread: the kernel ties the life of a child with a "parent death signal" to the
        # thread that starts it.
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(  # noqa: ASYNC220 - a millisecond
                    command,
                    stdin=theirs.fileno(),
                    stdout=stdout,
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
            kill_group(process)
            process.wait()
            raise
        return cls(process, reader, writer)

    async def end(self, grace: float = 0.0) -> End:
        """Kill the process and its group, after ``grace`` seconds for one that has closed its socket, and
        collect it. Safe to call again, also after a cancellation.
        """
        if self._ending is None:
            if not grace:  # first of all: the end of its socket would be another reason to end
                kill_group(self._process)
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


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that nobody has collected, with its group."""
    # The child of a `bwrap` that is killed as it starts would wait for it for ever.
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
        kill_group(process)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    # A new process begins with the memory of its parent, which counts as its own peak.
    is_peak = usage.ru_maxrss > resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return End(process.returncode, is_peak * usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))


_SCRIPT = Path(__file__).with_name("child.py")
_WARM_UP_SECONDS = 300.0
_LAST_SECONDS = 10.0
_MAX_LINE = 1 << 21
_ENVIRONMENT = ("PATH", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TMPDIR")
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # more reserve memory for stacks
SLICE_SECONDS = 0.5  # CPU time of a request that others wait for
_SHARE = 0.8  # of the time until a caller's deadline, for work that takes long
_PATIENCE = 20  # times the CPU time; a worker that needs more gets too little of the machine


class WorkerProcess:
    """A worker that can be started, asked, stopped, and started again; ``name`` is for messages."""

    def __init__(self, name: str, path: Path, memory_bytes: int) -> None:
        self._name = name
        self._path = path
        self._memory_bytes = memory_bytes
        self._live: ChildProcess | None = None

    @property
    def running(self) -> bool:
        return self._live is not None

    async def start(self) -> None:
        """Start the process and wait until it is warm. Raises VerifierFailed: it does not start; gives the
        reason.
        """
        reason = None
        try:
            command = (sys.executable, str(_SCRIPT), str(self._path), str(self._memory_bytes))
            self._live = await ChildProcess.start(command, _environment(), max_line=_MAX_LINE)
            reason = (await asyncio.wait_for(self._receive(), _WARM_UP_SECONDS)).get("error")
        except asyncio.TimeoutError:
            await self.stop()
            reason = f"it was not ready after {_WARM_UP_SECONDS:g} s"
        except OSError as error:
            end = await self.stop(_LAST_SECONDS)
            reason = f"{error} ({end})" if end else str(error)
        except BaseException:
            await self.stop()
            raise
        if reason is not None:
            await self.stop()
            raise VerifierFailed(f"a {self._name} worker does not start: {reason}")

    async def ask(self, request: bytes) -> dict[str, Any]:
        """Send a line and wait for its answer. Raises ConnectionError: the process died or did not start."""
        if self._live is not None:
            self._live.writer.write(request)
            await self._live.writer.drain()
        return await self._receive()

    async def stop(self, grace: float = 0) -> End | None:
        """Kill the process, after so many seconds for one that has closed its socket, and collect it. Returns
        how it ended; None if there was none.
        """
        if self._live is None:
            return None
        end = await self._live.end(grace)
        self._live = None  # not before: a `stop` that is cancelled can be repeated
        return end

    async def _receive(self) -> dict[str, Any]:
        line = await self._live.reader.readline() if self._live is not None else b""
        if not line.endswith(b"\n"):
            raise ConnectionResetError("the worker closed its socket")
        message: dict[str, Any] = json.loads(line)
        return message


def _environment() -> dict[str, str]:
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    environment |= dict.fromkeys(_THREADS, "1")
    environment["PYTHONHASHSEED"] = "0"  # SymPy's ways depend on it: one answer, one verdict, always
    return environment


class WorkFailed(Exception):
    """The request is at fault: it exceeded its CPU time or memory, crashed the process, or raised."""


@dataclass
class _Task:
    request: Any
    cpu_seconds: float
    outcome: asyncio.Future[Any]
    is_long: bool = False

    @property
    def limit(self) -> float:
        """Seconds of CPU time that it may take this time."""
        return self.cpu_seconds if self.is_long else min(self.cpu_seconds, SLICE_SECONDS)

    def line(self) -> bytes:
        """The request as the worker reads it."""
        return json.dumps({"cpu_seconds": self.limit, "request": self.request}).encode() + b"\n"


class _OutOfTime(Exception):
    """The CPU time of this run is used up."""


def give_up_at(deadline: float | None) -> float | None:
    """When to give up work that has had its share, so that its caller still hears of it by its deadline."""
    now = time.monotonic()
    return None if deadline is None else now + _SHARE * (deadline - now)


def _too_long(seconds: float) -> str:
    return f"it takes more than {seconds:g} s of CPU time"


class WorkerPool:
    """Workers that share two queues: one for requests, one for those that take long. The file at ``path``
    defines ``work(request)`` and ``warm_up()``; each worker uses one core while it works.
    """

    def __init__(self, name: str, path: Path, num_workers: int, *, memory_bytes: int) -> None:
        self._name = name
        self._memory_bytes = memory_bytes
        self._short: deque[_Task] = deque()
        self._long: deque[_Task] = deque()
        self._changed: asyncio.Condition
        self._outcomes: set[asyncio.Future[Any]] = set()
        # The first worker takes no long request, so there is another one in any case.
        self._workers = [WorkerProcess(name, path, memory_bytes) for _ in range(max(2, num_workers))]
        self._num_workers = num_workers
        self._slots: list[asyncio.Task[None]] = []
        self._running = False

    async def start(self) -> None:
        """Start the workers; returns when all are warm. Raises VerifierFailed: a worker did not start; gives
        the reason, such as a missing package.
        """
        try:
            starts = (worker.start() for worker in self._workers[: self._num_workers])
            for error in filter(None, await asyncio.gather(*starts, return_exceptions=True)):
                raise error
        except BaseException:
            await self.stop()
            raise
        self._changed = asyncio.Condition()
        self._running = True
        self._slots = [
            asyncio.create_task(self._serve(worker, short=n < self._num_workers, long=n > 0))
            for n, worker in enumerate(self._workers)
        ]

    async def stop(self) -> None:
        self._running = False
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in self._workers))
        for outcome in self._outcomes:
            if not outcome.done():
                outcome.set_exception(Unavailable("the verifier was stopped"))

    async def run(
        self, request: Any, *, cpu_seconds: float, until: float | None = None, urgent: bool = False
    ) -> Any:
        """Run ``work(request)`` in the next free worker and return its result; waiting does not count as CPU
        time. A request that has used up its slice is given up at ``until``; an ``urgent`` one is served
        before others. A worker finishes a call that is cancelled, which is cheaper than a new process.

        Raises WorkFailed: the request is at fault; VerifierFailed: the machine is; Unavailable: the pool is
        not running.
        """
        if not self._running:
            raise Unavailable("the verifier is not running")
        loop = asyncio.get_running_loop()
        task = _Task(request, cpu_seconds, loop.create_future())
        self._outcomes.add(task.outcome)
        timer = None if until is None else loop.call_later(until - time.monotonic(), self._give_up, task)
        try:
            async with self._changed:
                self._short.insert(0 if urgent else len(self._short), task)
                self._changed.notify_all()
            return await task.outcome
        finally:
            self._outcomes.discard(task.outcome)
            if timer is not None:
                timer.cancel()

    def _give_up(self, task: _Task) -> None:
        if task.is_long and not task.outcome.done():
            reason = f"{_too_long(SLICE_SECONDS)}, and there was no time for more"
            task.outcome.set_exception(WorkFailed(reason))
        task.cpu_seconds = min(task.cpu_seconds, SLICE_SECONDS)  # if it has not begun yet

    async def _serve(self, worker: WorkerProcess, *, short: bool, long: bool) -> None:
        # Not `while True`: before Python 3.12, `wait_for` may lose a cancellation.
        while self._running:
            async with self._changed:
                await self._changed.wait_for(lambda: (short and self._short) or (long and self._long))
                task = self._short.popleft() if short and self._short else self._long.popleft()
            if task.outcome.done():  # cancelled in the queue
                continue
            try:
                result = await self._run(worker, task)
            except _OutOfTime:
                async with self._changed:
                    if task.limit < task.cpu_seconds:
                        task.is_long = True
                        self._long.append(task)
                        self._changed.notify_all()
                    elif not task.outcome.done():
                        task.outcome.set_exception(WorkFailed(_too_long(task.limit)))
            except Exception as error:
                if not task.outcome.done():
                    task.outcome.set_exception(error)
            else:
                if not task.outcome.done():
                    task.outcome.set_result(result)
            if short and not worker.running:
                # Replace it now, so that the next task finds it warm. If that fails, the next task tries
                # again and reports it.
                with suppress(VerifierFailed):
                    await worker.start()

    async def _run(self, worker: WorkerProcess, task: _Task) -> Any:
        ends = []
        for _ in range(2):
            if not worker.running:
                await worker.start()
            patience = 60 + _PATIENCE * task.limit
            try:
                reply = await asyncio.wait_for(worker.ask(task.line()), patience)
            except asyncio.TimeoutError:
                await worker.stop()
                lack = f"did not get {task.limit:g} s of CPU time in {patience:g} s"
                raise VerifierFailed(f"the machine is overloaded: a {self._name} worker {lack}") from None
            except ConnectionError:
                end = await worker.stop(_LAST_SECONDS)
                assert end is not None  # it was running
                if end.out_of_time:
                    raise _OutOfTime from None
                ends.append(end)
                continue
            if reply["spent"]:
                await worker.stop()
            if "error" in reply:
                raise WorkFailed(reply["error"])
            return reply["result"]
        raise self._blame(ends)

    def _blame(self, ends: list[End]) -> Exception:
        how = f"two {self._name} workers died of it, the last one with {ends[-1]}"
        if all(end.by_itself for end in ends):
            return WorkFailed(how)
        # If memory is short, the system kills processes with much memory, even below the limit.
        if all(end.by_itself or end.peak_bytes > self._memory_bytes // 2 for end in ends):
            return WorkFailed(f"it takes too much memory: {how}")
        return VerifierFailed(how)

"""`SandboxedPython`: one Python process in a sandbox, and the socket to it; `SandboxPool`: warm ones.

What the process reports is not trusted: a message that is too long, is no JSON, or has another form ends it,
as if it had died. A sandbox of the pool is given out once and never returned; then the next one starts.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gym_serve.sandbox.confined import ConfinedProcess
from gym_serve.sandbox.providers import Confinement, Limits, configuration
from gym_serve.types.errors import GymError, Unavailable, VerifierFailed

_START_SECONDS = 60.0
_GRACE_SECONDS = 5.0
_PATIENCE = 10  # as the supervisor's own, which answers before this process gives up
_END_SECONDS = 1.0
_MAX_MESSAGE = 1 << 16
_MAX_NOTES = 1 << 17  # bytes that a text may have beside what was asked for: a traceback, say
_LONG = 1 << 16  # bytes that take longer to decode than another thread to be called


class SandboxDied(Exception):
    """The process in the sandbox is gone: it ended itself, was killed, or broke the protocol; says how."""


class Execution(BaseModel):
    """The outcome of code in the lasting namespace."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    stdout: str
    stderr: str
    result: str | None
    """``str`` of the last expression; None without one, or if its value is None."""
    error: str | None
    """The exception that ended it, e.g. ``"ZeroDivisionError: division by zero"``."""


class ProgramRun(BaseModel):
    """How a program ended."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    status: int
    """Exit status: 0 if it ended by itself or by `sys.exit`, 1 after an exception; a signal negated."""
    timed_out: bool
    """It was killed at its time limit."""
    starved: bool
    """It was killed before it had used its time: the machine is overloaded, and the program not at fault."""
    stdout: str
    stderr: str
    """The end of standard error, with the exception as the last line."""
    value: str | None
    """JSON of the function's result; None if JSON cannot hold it, or for a whole program."""
    cut: bool
    """The output or the value was longer than ``output_limit``."""
    seconds: float = Field(0.0, ge=0.0, allow_inf_nan=False)
    """How long it ran or slept, at least: until the last look at it."""


_Form = TypeVar("_Form", Execution, ProgramRun)
_T = TypeVar("_T")


class _Reply(NamedTuple):
    message: dict[str, Any]
    texts: list[bytes]


class SandboxedPython:
    """A Python process in a sandbox: `start`, then `execute` or `run`, then `stop`."""

    def __init__(self, sandbox: Confinement, limits: Limits, prelude: str = "") -> None:
        self._sandbox = sandbox
        self._limits = limits
        self._prelude = prelude
        self._live: ConfinedProcess | None = None

    @property
    def running(self) -> bool:
        """Between `start` and `stop`; the process may have died since."""
        return self._live is not None

    async def start(self) -> None:
        """Start the process; returns when it is ready for code. Raises `Unavailable` with the reason."""
        try:
            await self._connect()
            config = {**configuration(self._sandbox, self._limits), "prelude": self._prelude}
            hello, _ = await asyncio.wait_for(self._exchange(config), _START_SECONDS)
        except (SandboxDied, OSError, asyncio.TimeoutError) as error:
            reason = str(error) or f"not ready in {_START_SECONDS:g} s"
            await self.stop()
            raise Unavailable(f"a sandbox does not start: {reason}") from error
        except BaseException:
            await self.stop()
            raise
        if "failure" in hello:
            await self.stop()
            raise Unavailable(f"a sandbox does not start: {hello['failure']}")

    async def execute(self, code: str, *, timeout: float, output_limit: int) -> Execution:
        """Execute code in the namespace of this process, which lasts until it ends.

        The code is interrupted after ``timeout`` seconds that it runs or sleeps; if it ignores that, the
        process is killed. ``output_limit`` is in characters of the result, and bytes of each output.

        Raises:
            SandboxDied: the process did not survive the code; no further call is possible.
            Unavailable: the machine is overloaded; no further call is possible.
        """
        request = {"op": "execute", "code": code, "timeout": timeout, "output_limit": output_limit}
        request["grace"] = _GRACE_SECONDS
        reply = await self._ask(request, _PATIENCE * (timeout + _GRACE_SECONDS) + _START_SECONDS)
        if reply.message.get("starved"):
            await self.stop()
            raise Unavailable("the machine is overloaded: the code got less than a tenth of a processor")
        if ended := reply.message.get("ended"):
            await self.stop()
            raise SandboxDied(str(ended))
        fields = {}
        if len(reply.texts) == 4:
            stdout, stderr, error, result = await _decoded(reply.texts)
            fields = {"stdout": stdout, "stderr": stderr, "error": error or None}
            fields["result"] = result[1:] if result else None
        return await self._checked(Execution, fields)

    async def run(
        self,
        code: str,
        *,
        timeout: float,
        output_limit: int,
        stdin: str = "",
        function: str | None = None,
        arguments: list[Any] | None = None,
    ) -> ProgramRun:
        """Run a program in a process of its own, for ``timeout`` seconds that it runs or sleeps.

        ``output_limit`` is in bytes of its output, and of its value: that of ``function``, a function of the
        program or a method of its class ``Solution``; the program is not ``__main__`` then. Raises
        `SandboxDied` if the process did not survive it; no further call is possible.
        """
        request = {"op": "run", "code": code, "timeout": timeout, "output_limit": output_limit}
        request |= {"function": function, "arguments": arguments or []}
        text = stdin.encode("utf-8", "surrogatepass")
        reply = await self._ask(request, _PATIENCE * timeout + _START_SECONDS, text)
        fields = {key: value for key, value in reply.message.items() if key != "sizes"}
        if len(reply.texts) == 3:
            stdout, stderr, value = await _decoded(reply.texts)
            fields |= {"stdout": stdout, "stderr": stderr, "value": value or None}
        return await self._checked(ProgramRun, fields)

    async def stop(self, grace: float = 0.0) -> str:
        """Kill the process, collect it and remove its folder; returns how it ended, for messages.

        ``grace``: seconds that it is given to end by itself, for one that has closed its socket.
        """
        if self._live is None:
            return "no process"
        end = await self._live.stop(grace)
        self._live = None  # not before: a `stop` that is cancelled can be repeated
        return end

    async def _ask(self, request: dict[str, Any], timeout: float, text: bytes = b"") -> _Reply:
        try:
            exchange = self._exchange(request, text, limit=request["output_limit"])
            reply = await asyncio.wait_for(exchange, timeout)
        except asyncio.TimeoutError:
            await self.stop()
            raise SandboxDied(f"no answer in {timeout:g} s") from None
        except SandboxDied as error:
            raise SandboxDied(f"{error}: {await self.stop(_END_SECONDS)}") from None
        except BaseException:  # cancelled: an answer may still come, and would be taken for the next one
            await self.stop()
            raise
        if "failure" in reply.message:
            await self.stop()
            raise SandboxDied(str(reply.message["failure"]))
        return reply

    async def _exchange(self, request: dict[str, Any], text: bytes = b"", *, limit: int = 0) -> _Reply:
        if self._live is None:
            raise SandboxDied("the process was not started, or has ended")
        reader, writer = self._live.reader, self._live.writer
        try:
            writer.write(json.dumps({**request, "sizes": [len(text)]}).encode() + b"\n")
            writer.write(text)
            await writer.drain()
            line = await reader.readuntil()
            message = _message(line)
            texts = [await reader.readexactly(size) for size in _sizes(message, limit)]
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            raise SandboxDied("the process ended") from error
        except asyncio.LimitOverrunError:
            raise SandboxDied("the process sent a message that is too long") from None
        return _Reply(message, texts)

    async def _checked(self, form: type[_Form], fields: dict[str, Any]) -> _Form:
        try:
            return form.model_validate(fields)
        except ValidationError:
            await self.stop()
            raise SandboxDied("the process sent an unexpected message") from None

    async def _connect(self) -> None:
        command = self._sandbox.command(self._limits)
        self._live = await ConfinedProcess.start(self._sandbox, command, max_line=_MAX_MESSAGE)


def _message(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise SandboxDied("the process sent a malformed message")
    return message


def _sizes(message: dict[str, Any], limit: int) -> list[int]:
    sizes = message.get("sizes")
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise SandboxDied("the process sent a malformed message")
    if any(size > 4 * limit + _MAX_NOTES for size in sizes):
        raise SandboxDied("the process sent a message that is too long")
    return sizes


async def _decoded(texts: list[bytes]) -> list[str]:
    def decode() -> list[str]:
        return [text.decode("utf-8", "replace") for text in texts]

    return decode() if sum(map(len, texts)) < _LONG else await asyncio.to_thread(decode)


class _Turns:
    """A semaphore that lets those in first who have used least."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._order = itertools.count()
        self.waiting: list[tuple[float, int, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def turn(self, used: float) -> AsyncIterator[None]:
        if self._free and not self.waiting:
            self._free -= 1
        else:
            entry = (used, next(self._order), asyncio.get_running_loop().create_future())
            heapq.heappush(self.waiting, entry)
            try:
                await entry[2]
            except asyncio.CancelledError:
                if entry in self.waiting:
                    self.waiting.remove(entry)
                    heapq.heapify(self.waiting)
                else:  # it was let in at the same moment
                    self._leave()
                raise
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        self._free += 1
        while self._free and self.waiting:
            _, _, entered = heapq.heappop(self.waiting)
            if not entered.done():
                self._free -= 1
                entered.set_result(None)


class SandboxPool:
    """Warm sandboxes of one kind."""

    def __init__(self, sandbox: Confinement, limits: Limits, *, size: int, prelude: str = "") -> None:
        self._sandbox = sandbox
        self._limits = limits
        self._size = size
        self._prelude = prelude
        self._ready: deque[SandboxedPython] = deque()
        self._starting: set[asyncio.Task[None]] = set()
        self._running = False
        self._turns = _Turns(size)

    @property
    def crowded(self) -> bool:
        return bool(self._turns.waiting)

    async def start(self) -> None:
        """Start all of them; returns when they are ready. Raises `Unavailable` with the reason."""
        self._running = True
        try:
            outcomes = await asyncio.gather(*(self._add() for _ in range(self._size)), return_exceptions=True)
            for error in outcomes:
                if error is not None:
                    raise error
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the processes that were not taken. Safe to call twice."""
        self._running = False
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(python.stop() for python in self._ready))
        self._ready.clear()

    async def take(self) -> SandboxedPython:
        """Take a started process; the caller stops it. Raises `Unavailable`: the pool is not running, or a
        sandbox does not start."""
        if not self._running:
            raise Unavailable("the pool of sandboxes is not running")
        python = self._ready.popleft() if self._ready else await self._started()
        self._refill()
        return python

    async def grade(
        self, work: Callable[[SandboxedPython], Awaitable[_T]], what: str, *, used: float = 0.0
    ) -> _T:
        """Run ``work`` with a fresh process; as many at the same time as the pool keeps ready.

        Work that has ``used`` the fewest seconds goes first. So long work should be done in several turns, at
        whose ends it asks whether others wait (`crowded`). Nothing that runs in a sandbox can end its first
        process, so if that dies, the work is repeated once. Raises `VerifierFailed` if both died.
        """
        async with self._turns.turn(used):
            for _ in range(2):
                python = await self.take()
                try:
                    return await work(python)
                except SandboxDied as error:
                    end = error
                finally:
                    await python.stop()
        raise VerifierFailed(f"two sandboxes died on this {what}: {end}") from end

    async def _started(self) -> SandboxedPython:
        python = SandboxedPython(self._sandbox, self._limits, self._prelude)
        await python.start()
        return python

    async def _add(self) -> None:
        self._ready.append(await self._started())

    def _refill(self) -> None:
        for _ in range(self._size - len(self._ready) - len(self._starting)):
            task = asyncio.create_task(self._try_to_add())
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _try_to_add(self) -> None:
        try:
            await self._add()
        except GymError:
            return  # the next call starts one itself, and reports a failure

"""`SandboxedPython`: one Python process in a sandbox, and the socket to it.

A plain `subprocess.Popen` with a socket pair, rather than asyncio's own subprocesses: those need a
child watcher, which differs between Python versions, uvloop and loops outside the main thread (a
Serve replica's is one); here the exit status is collected by whoever killed the process.

What the process says is its supervisor's word, and the texts in it are cut there. Even so it is not trusted:
a message that is too long, no JSON, or of another form ends it, as if it had died.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from gym_serve.sandbox.limits import Limits
from gym_serve.sandbox.providers import VARIABLES, Sandbox, configuration
from gym_serve.types.errors import Unavailable

__all__ = ["Execution", "ProgramRun", "SandboxDied", "SandboxedPython"]

_START_SECONDS = 60.0
_GRACE_SECONDS = 5.0
_PATIENCE = 10  # as the supervisor's own, which answers before this process gives up
_END_SECONDS = 1.0
_MAX_MESSAGE = 1 << 16
_MAX_NOTES = 1 << 17  # bytes that a text may have beside what was asked for: a traceback, say
_LONG = 1 << 16  # bytes that take longer to decode than another thread to be called


class SandboxDied(Exception):
    """The process in the sandbox is gone: it ended itself, was killed, or broke the protocol.

    Its message says how it ended, e.g. ``"signal 9"``.
    """


class Execution(BaseModel):
    """What came of code in the lasting namespace."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    stdout: str
    stderr: str
    result: str | None
    """``str`` of the last expression; None if there is none, or its value is None."""
    error: str | None
    """The exception that ended it, e.g. ``"ZeroDivisionError: division by zero"``."""


class ProgramRun(BaseModel):
    """How a program ended."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    status: int
    """Exit status: 0 if it ended by itself or by `sys.exit`, 1 after an exception; a signal negated."""
    timed_out: bool
    """It was killed as its time was over."""
    starved: bool
    """It was killed before it had used its time: the machine is overloaded, the program not at fault."""
    stdout: str
    stderr: str
    """The end of it, with the exception as the last line."""
    value: str | None
    """JSON of what the function returned; None if that is none, or for a whole program."""
    cut: bool
    """The output or the value was longer than ``output_limit``."""


_Form = TypeVar("_Form", Execution, ProgramRun)


class _Live(NamedTuple):
    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    folder: str | None
    group: Path | None


class _Reply(NamedTuple):
    message: dict[str, Any]
    texts: list[bytes]


class SandboxedPython:
    """A Python process in a sandbox: `start`, then `execute` or `run`, then `stop`.

    Args:
        sandbox: how it is confined.
        limits: what it may use.
        prelude: trusted code that is run first; its names are there for all code.
    """

    def __init__(self, sandbox: Sandbox, limits: Limits, prelude: str = "") -> None:
        self._sandbox = sandbox
        self._limits = limits
        self._prelude = prelude
        self._live: _Live | None = None

    @property
    def running(self) -> bool:
        """Between `start` and `stop`; the process may have died since."""
        return self._live is not None

    async def start(self) -> None:
        """Start the process; returns when it is ready for code.

        Raises:
            Unavailable: it does not start, with its reason.
        """
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

        The code is interrupted when its time is over; if it does not take notice, the process is killed.

        Args:
            code: Python statements; the value of a last expression is the result.
            timeout: seconds that it may run or sleep; waiting for a processor does not count.
            output_limit: characters of the result that are returned, and bytes of each output.

        Raises:
            SandboxDied: it did not survive the code; no further call is possible.
            Unavailable: the machine is too busy to tell; no further call is possible.
        """
        request = {
            "op": "execute",
            "code": code,
            "timeout": timeout,
            "grace": _GRACE_SECONDS,
            "output_limit": output_limit,
        }
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
            fields = {
                "stdout": stdout,
                "stderr": stderr,
                "error": error or None,
                "result": result[1:] if result else None,
            }
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
        """Run a program in a process of its own.

        Args:
            code: the program.
            timeout: seconds that it may run or sleep; waiting for a processor does not count.
            output_limit: bytes of its output, and of its value, that are returned.
            stdin: its standard input.
            function: a function of the program, or a method of its class ``Solution``, to be called;
                the program is not ``__main__`` then.
            arguments: what the function is called with; values of JSON.

        Raises:
            SandboxDied: the sandbox did not survive it; no further call is possible.
        """
        request = {
            "op": "run",
            "code": code,
            "function": function,
            "arguments": arguments or [],
            "timeout": timeout,
            "output_limit": output_limit,
        }
        given = stdin.encode("utf-8", "surrogatepass")
        reply = await self._ask(request, _PATIENCE * timeout + _START_SECONDS, given)
        fields = {key: value for key, value in reply.message.items() if key != "sizes"}
        if len(reply.texts) == 3:
            stdout, stderr, value = await _decoded(reply.texts)
            fields |= {"stdout": stdout, "stderr": stderr, "value": value or None}
        return await self._checked(ProgramRun, fields)

    async def stop(self) -> str:
        """Kill the process, collect it and remove its folder; does nothing if there is none.

        Returns:
            how it ended, for messages: ``"signal 11"``, ``"exit status 1"``, ``"no process"``.
        """
        if self._live is None:
            return "no process"
        process, _, writer, folder, group = self._live
        with suppress(ProcessLookupError):  # collected before, by a `stop` that was cancelled
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        writer.close()
        status = await asyncio.to_thread(process.wait)
        await asyncio.to_thread(self._remove, folder, group)
        self._live = None  # not before: a `stop` that is cancelled can be repeated
        # bwrap ends with 128 + n when the process in it was ended by signal n.
        status = 128 - status if self._sandbox.confines and status > 128 else status
        return f"signal {-status}" if status < 0 else f"exit status {status}"

    async def _ask(self, request: dict[str, Any], timeout: float, text: bytes = b"") -> _Reply:
        try:
            exchange = self._exchange(request, text, limit=request["output_limit"])
            reply = await asyncio.wait_for(exchange, timeout)
        except asyncio.TimeoutError:
            await self.stop()
            raise SandboxDied(f"no answer in {timeout:g} s") from None
        except SandboxDied as error:
            await self._wait_for_end()
            raise SandboxDied(f"{error}: {await self.stop()}") from None
        except BaseException:  # cancelled: an answer may still come, and would be taken for the next one
            await self.stop()
            raise
        if "failure" in reply.message:
            await self.stop()
            raise SandboxDied(str(reply.message["failure"]))
        return reply

    async def _wait_for_end(self) -> None:
        """Let a process that closed its socket come to its end, which `stop` then tells."""
        if self._live is not None:
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._live.process.wait, _END_SECONDS)

    async def _exchange(self, request: dict[str, Any], text: bytes = b"", *, limit: int = 0) -> _Reply:
        if self._live is None:
            raise SandboxDied("it was not started, or has ended")
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
            raise SandboxDied("the process sent another message than was asked for") from None

    async def _connect(self) -> None:
        # On the event loop's thread, as the kernel ties the process's life to the thread that starts it.
        groups = self._sandbox.groups
        folder = None if self._sandbox.confines else tempfile.mkdtemp(prefix="gym-serve-sandbox-")
        group = None if groups is None else groups.create()
        command = _prepared(self._sandbox.command(self._limits), group)
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = subprocess.Popen(  # noqa: ASYNC220 - a millisecond
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd=folder or "/",
                    env={**VARIABLES, "HOME": folder or "/"},
                    start_new_session=True,  # Ctrl-C in a terminal is for the parent
                )
        except OSError:
            ours.close()
            self._remove(folder, group)
            raise
        try:
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=_MAX_MESSAGE)
        except BaseException:  # a cancellation, mostly
            ours.close()
            process.kill()
            process.wait()
            self._remove(folder, group)
            raise
        self._live = _Live(process, reader, writer, folder, group)

    def _remove(self, folder: str | None, group: Path | None) -> None:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if group is not None and self._sandbox.groups is not None:
            self._sandbox.groups.remove(group)


def _prepared(command: list[str], group: Path | None) -> list[str]:
    """A command that joins a control group, and is ended before others for lack of memory.

    Raises:
        OSError: there is no such program.
    """
    os.stat(command[0])  # the shell would end as the program might
    if sys.platform != "linux":
        return command
    steps = ["echo 1000 > /proc/self/oom_score_adj", 'exec "$@"']
    if group is not None:
        steps.insert(1, f"echo 0 > {shlex.quote(str(group))}/cgroup.procs")
    return ["/bin/sh", "-c", " && ".join(steps), "sh", *command]


def _message(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise SandboxDied("the process sent no message")
    return message


def _sizes(message: dict[str, Any], limit: int) -> list[int]:
    """Of the texts that follow a message."""
    sizes = message.get("sizes")
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise SandboxDied("the process sent no message")
    if any(size > 4 * limit + _MAX_NOTES for size in sizes):
        raise SandboxDied("the process sent a message that is too long")
    return sizes


async def _decoded(texts: list[bytes]) -> list[str]:
    """Texts, whatever their bytes; long ones in another thread, as the event loop has others to serve."""

    def decode() -> list[str]:
        return [text.decode("utf-8", "replace") for text in texts]

    return decode() if sum(map(len, texts)) < _LONG else await asyncio.to_thread(decode)

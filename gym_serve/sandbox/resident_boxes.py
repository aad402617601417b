"""`ResidentBox`: a box whose first process is `inside.resident`, whatever machine it is on.

The connection to that process is the box's lease: when it ends, the first process ends, and all others with
it.
"""

from __future__ import annotations

import asyncio
import itertools
import marshal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol

from gym_serve.sandbox.boxes import ExecResult, Sandbox, SandboxRefused, SandboxSpec, words_of
from gym_serve.sandbox.inside import resident
from gym_serve.sandbox.timed_box import TimedBox
from gym_serve.types.errors import SessionLost, Unavailable

_START_SECONDS = 60.0
_FILE_SECONDS = 60.0
_ENDED: dict[int, Literal["exit", "timeout", "memory"]] = {
    resident.EXITED: "exit",
    resident.OUT_OF_TIME: "timeout",
    resident.OUT_OF_MEMORY: "memory",
}
_NOTES = 1 << 10  # bytes that a text may have beside what was asked for: how much is left out


class FirstProcess(Protocol):
    """What a box needs of its first process (`inside.resident`): the way to it, and its end."""

    @property
    def reader(self) -> asyncio.StreamReader: ...

    @property
    def writer(self) -> Any: ...

    async def stop(self) -> object: ...


class ResidentBox(TimedBox):
    """A box whose first process (`inside.resident`) does what it is asked for; see `Sandbox`."""

    def __init__(self, process: FirstProcess, spec: SandboxSpec) -> None:
        super().__init__(spec)
        self._process = process
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[asyncio.Future[tuple[int, int, bytes, bytes]], int]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._sending = asyncio.Lock()

    async def begin(self, config: Mapping[str, Any], program: bytes | None = None) -> None:
        """Have the first process make the box. ``program``: the source of its own, if it has none yet. Raises
        `Unavailable` if it does not."""
        reply = self._expect(0, _NOTES)
        self._reading = asyncio.create_task(self._read())
        if program is not None:
            self._write(program)
        await self._send(config)
        try:
            ended, _, _, errors = await asyncio.wait_for(reply, _START_SECONDS)
        except (SessionLost, asyncio.TimeoutError) as error:
            raise Unavailable(f"a box does not start: {str(error) or 'not in time'}") from error
        if ended != resident.EXITED:
            raise Unavailable(f"a box does not start: {errors.decode('utf-8', 'replace')}")
        self._begin_to_live()

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        stdin: bytes = b"",
        output_limit: int = 1 << 20,
    ) -> ExecResult:
        argv = words_of(command)
        request = {"op": "exec", "argv": argv, "cwd": cwd, "env": dict(env or {}), "user": user}
        return await self._ask(request, stdin, timeout, output_limit)

    async def read(self, path: str, *, limit: int = 1 << 24) -> bytes:
        return await self._file("read", path, limit=limit)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await self._file("write", path, data, mode=mode)

    async def get(self, path: str, *, limit: int = 1 << 26) -> bytes:
        return await self._file("get", path, limit=limit)

    async def put(self, path: str, archive: bytes, *, clear: bool = False) -> None:
        await self._file("put", path, archive, clear=clear)

    async def close(self) -> None:
        self._end("it was closed")
        await self._process.stop()
        if self._reading is not None:
            self._reading.cancel()

    async def _file(
        self,
        op: str,
        path: str,
        data: bytes = b"",
        *,
        limit: int = 1 << 12,
        mode: int = 0,
        clear: bool = False,
    ) -> bytes:
        if "\0" in path:
            raise SandboxRefused("a path has no NUL character")
        request = {"op": op, "path": path, "mode": mode, "clear": clear, "cwd": None, "env": {}, "user": 0}
        done = await self._ask(request, data, _FILE_SECONDS, limit)
        if done.cut:
            raise SandboxRefused(f"{path} has more than {limit} bytes")
        if not done.ok:
            problem = (
                done.stderr.decode("utf-8", "replace")[-500:] or f"it took more than {_FILE_SECONDS:g} s"
            )
            raise SandboxRefused(f"cannot {op} {path}: {problem}")
        return done.stdout

    async def _ask(self, request: dict[str, Any], stdin: bytes, timeout: float, limit: int) -> ExecResult:
        number = next(self._numbers)
        reply = self._expect(number, limit)
        try:
            await self._send({**request, "id": number, "stdin": stdin, "timeout": timeout, "limit": limit})
            ended, status, stdout, stderr = await reply
        except asyncio.CancelledError:
            if self._over is None:
                self._write({"op": "cancel", "id": number})
            raise
        if ended == resident.NOT_STARTED:
            raise SandboxRefused(stderr.decode("utf-8", "replace"))
        cut = max(len(stdout), len(stderr)) > limit
        return ExecResult(status=status, stdout=stdout, stderr=stderr, ended=_ENDED[ended], cut=cut)

    def _expect(self, number: int, limit: int) -> asyncio.Future[tuple[int, int, bytes, bytes]]:
        if self._over is not None:
            raise SessionLost(f"the box is gone: {self._over}")
        future: asyncio.Future[tuple[int, int, bytes, bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future, limit
        return future

    async def _send(self, message: Mapping[str, Any]) -> None:
        self._write(message)
        async with self._sending:
            with suppress(ConnectionError):  # `_read` sees it as well
                await self._process.writer.drain()

    def _write(self, message: Any) -> None:
        data = marshal.dumps(message)
        self._process.writer.write(len(data).to_bytes(8, "little") + data)

    async def _read(self) -> None:
        reason = "its first process ended"
        reader = self._process.reader
        try:
            while True:
                head = await reader.readexactly(resident.REPLY.size)
                number, status, ended, *sizes = resident.REPLY.unpack(head)
                future, limit = self._waiting.pop(number)
                if any(size > limit + _NOTES for size in sizes) or ended > resident.NOT_STARTED:
                    break
                texts = [await reader.readexactly(size) for size in sizes]
                if not future.done():
                    future.set_result((ended, status, *texts))
            reason = "its first process broke the protocol"
        except KeyError:
            reason = "its first process broke the protocol"
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        self._end(reason)

    def _end(self, reason: str) -> None:
        super()._end(reason)
        for future, _ in self._waiting.values():
            if not future.done():
                future.set_exception(SessionLost(f"the box is gone: {self._over}"))
        self._waiting.clear()


_: type[Sandbox] = ResidentBox

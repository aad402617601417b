"""`Channel`: to the first process of a container, by the stream that is attached to its input and output.

The container runs `FIRST`. It waits for a line, so that nothing that it writes is lost, and becomes
`inside.resident` where the image has a Python. Its input ends with the stream, and the container with that.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from aiohttp import ClientError

from gym_serve.sandbox.boxes import SandboxSpec
from gym_serve.sandbox.inside import resident
from gym_serve.sandbox.inside.confinement import box_filters
from gym_serve.sandbox.providers import RESIDENT

STDOUT = 1
CHUNK = 1 << 16
FIRST = """read -r _
command -v python3 >/dev/null 2>&1 && exec python3 -I -S -X utf8 -c "$1"; printf c; exec cat"""
PYTHON = f"""import os, sys
if sys.version_info < (3, 9): os.write(1, b'c'); os.execvp('cat', ['cat'])
os.write(1, b'r')
{RESIDENT}"""
SOURCE = Path(resident.__file__).read_bytes()
"""Arguments of ``sh -c``: with it, what `FIRST` runs in Python. It writes ``r`` before that, else ``c``."""


class Message(NamedTuple):
    """What a container wrote, and to which of its files."""

    stream: int
    data: bytes


class Attached(Protocol):
    """Input and output of a container."""

    async def read_out(self) -> Any:
        """A `Message`; None at the end."""
        ...

    async def write_in(self, data: bytes) -> None: ...


def settings_of(spec: SandboxSpec, *, machine: bool = False) -> dict[str, Any]:
    """What the first process is told: what runs the container has done the rest.

    ``machine``: it is no container but a machine of its own, whose program's output is taken as text. Its
    commands then have the rights of those in a container, and as many processors as the box.
    """
    user = spec.user.partition(":")[0] if isinstance(spec.user, str) else spec.user
    return {
        "overlays": [],
        "workdir": spec.workdir,
        "made": spec.folders,
        "pids": spec.pids,
        "memory": spec.memory_mb << 20,
        "env": dict(spec.env),
        "user": user or None,
        "cores": list(range(spec.cpus)) if machine else [],
        "machine": machine,
        "filters": box_filters(),
        "replies": 1,
    }


class Channel:
    """Standard input and output of a container, as the streams of a process."""

    def __init__(self, held: Attached) -> None:
        self.reader = asyncio.StreamReader()
        self.writer = self
        self.stack = AsyncExitStack()
        self._held = held
        self._waiting = bytearray()
        self._written = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Channel:
        self._tasks = [asyncio.create_task(work()) for work in (self._read, self._send)]
        self.write(b"\n")  # the container's first process waits for it
        return self

    async def __aexit__(self, *failure: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def write(self, data: bytes) -> None:
        self._waiting += data
        self._written.set()

    async def drain(self) -> None:
        """Nothing is to be waited for: who asks waits for the answer."""

    async def stop(self) -> None:
        await self.stack.aclose()

    async def _read(self) -> None:
        with suppress(OSError, ClientError):
            while (message := await self._held.read_out()) is not None:
                if message.stream == STDOUT:
                    self.reader.feed_data(message.data)
        self.reader.feed_eof()

    async def _send(self) -> None:
        with suppress(OSError, ClientError, RuntimeError):  # the reader sees it as well
            while True:
                await self._written.wait()
                self._written.clear()
                data, self._waiting = bytes(self._waiting), bytearray()
                for start in range(0, len(data), CHUNK):
                    await self._held.write_in(data[start : start + CHUNK])

"""`Template`: a process in ``bwrap`` of which the first process of each box is a copy (`inside.resident`).

A copy takes milliseconds where a start of ``bwrap`` and Python takes tens of them. The template has
namespaces of its own, and each copy has further ones within. So when the template ends, the kernel ends all
copies and what they started. It ends with the socket to this process, and with ``bwrap``, which the kernel
ends with this process.
"""

from __future__ import annotations

import asyncio
import marshal
import os
import signal
import socket
import subprocess
import weakref
from contextlib import suppress
from functools import cache
from pathlib import Path

from gym_serve.observe.catalogue import SANDBOX_RUNNING
from gym_serve.sandbox.confined import prepared
from gym_serve.sandbox.inside import resident
from gym_serve.sandbox.providers import VARIABLES, Bubblewrap
from gym_serve.workers.pool import kill_group

_MOST_FILES = 3  # that the first process sends
_MAX_LINE = 1 << 16
_END_SECONDS = 10.0


class Template:
    """A template that runs until the provider that made it, and each of its copies, has left it."""

    def __init__(self, bubblewrap: Bubblewrap) -> None:
        self.groups = bubblewrap.groups
        self.stalled = False
        self._users = 1
        self._socket, theirs = socket.socketpair()
        with theirs:
            # On the event loop's thread: the kernel ends a child with the thread that started it.
            self._process = subprocess.Popen(
                prepared(bubblewrap.template(), None),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=VARIABLES,
                start_new_session=True,  # Ctrl-C in a terminal is for the parent
            )
        self._socket.sendall(_program())
        # For a provider that nobody stops.
        self._end = weakref.finalize(self, _end, self._process, self._socket)

    @property
    def alive(self) -> bool:
        """Whether it makes further copies."""
        return self._process.poll() is None and not self.stalled

    async def copy(self, cpus: int) -> Copy:
        """Make a copy, of the processors ``cpus`` where there are control groups. Raises `OSError`."""
        (ours, theirs), (out, their_out) = socket.socketpair(), socket.socketpair()
        try:
            with theirs, their_out:
                files = [theirs.fileno(), their_out.fileno()]
                socket.send_fds(self._socket, [b"."], files, socket.MSG_DONTWAIT)
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=_MAX_LINE)
        except BaseException:
            ours.close()
            out.close()
            raise
        self._users += 1
        return Copy(self, reader, writer, out, cpus)

    async def leave(self) -> None:
        """One who used it does so no longer."""
        self._users -= 1
        if not self._users:
            await asyncio.to_thread(self._end)


@cache
def _program() -> bytes:
    source = Path(resident.__file__).read_bytes()
    code = marshal.dumps(compile(source, "<resident>", "exec", dont_inherit=True))
    return len(code).to_bytes(8, "little") + code


def _end(process: subprocess.Popen[bytes], way_in: socket.socket) -> None:
    way_in.close()
    if process.poll() is None:
        kill_group(process)
        process.wait()


class Copy:
    """The first process of a box, until `stop`."""

    def __init__(
        self,
        template: Template,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        out: socket.socket,
        cpus: int,
    ) -> None:
        self.reader = reader
        self.writer = writer
        self._template = template
        self._out = out
        self._cpus = cpus
        self._process: int | None = None  # a handle of it
        self._group: Path | None = None
        self._ending: asyncio.Task[None] | None = None
        SANDBOX_RUNNING.add(value=1)

    def taken(self) -> list[int]:
        """Take its handle, which it has sent, and return the other files that it sent with it."""
        files = socket.recv_fds(self._out, 1, _MOST_FILES)[1]
        self._process = files[0] if files else None
        return files[1:]

    def join_group(self) -> None:
        """Have it join a control group, where there are such. Raises `OSError`."""
        if self._process is not None and self._template.groups is not None:
            self._group = self._template.groups.create(self._cpus)
            (self._group / "cgroup.procs").write_text(_number(self._process))

    async def stop(self) -> None:
        """Kill it, and wait until it is gone, and with it all of its box. Safe to call again, also after a
        cancellation."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._stop())
        await asyncio.shield(self._ending)

    async def _stop(self) -> None:
        if self._process is None:  # it has not begun: it ends with its socket, or sends its handle first
            self.writer.close()
            try:
                await asyncio.wait_for(_readable(self._out), _END_SECONDS)
            except asyncio.TimeoutError:
                self._template.stalled = True  # somebody has stopped it; its copy will find nobody
            else:
                for file in self.taken():
                    os.close(file)
        if self._process is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            await _readable(self._process)
            os.close(self._process)
        self.writer.close()
        self._out.close()
        if self._group is not None and self._template.groups is not None:
            await asyncio.to_thread(self._template.groups.remove, self._group)
        SANDBOX_RUNNING.add(value=-1)
        await self._template.leave()


def _number(handle: int) -> str:
    """The number of a process, by its handle."""
    lines = Path(f"/proc/self/fdinfo/{handle}").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith("Pid:"))


async def _readable(file: int | socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()

    def found() -> None:
        loop.remove_reader(file)
        readable.set_result(None)

    loop.add_reader(file, found)
    try:
        await readable
    finally:
        loop.remove_reader(file)

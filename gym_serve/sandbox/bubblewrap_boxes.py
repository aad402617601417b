"""`BubblewrapBoxes`: boxes without a daemon, an image or a right that an ordinary user lacks.

The root of a box is a copy-on-write view, an overlay in memory, of a folder or of this machine: of the
system's folders, not of homes, data and services, and without the files that not every user may read.

Nothing is to be swept: processes, mounts and files exist in the box's namespaces alone, which end with its
first process (`inside.resident`). That ends with the socket to this process, whatever ends this process.
"""

from __future__ import annotations

import asyncio
import itertools
import marshal
import os
import random
import shutil
import socket
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, Literal, Protocol

from gym_serve.sandbox.boxes import ExecResult, Listens, Sandbox, SandboxRefused, SandboxSpec, words_of
from gym_serve.sandbox.confined import ConfinedProcess
from gym_serve.sandbox.inside import resident
from gym_serve.sandbox.inside.confinement import box_filter
from gym_serve.sandbox.providers import Bubblewrap, find_sandbox
from gym_serve.types.errors import GraphError, SessionLost, Unavailable

_START_SECONDS = 60.0
_FILE_SECONDS = 60.0
_ENDED: dict[int, Literal["exit", "timeout", "memory"]] = {
    resident.EXITED: "exit",
    resident.OUT_OF_TIME: "timeout",
    resident.OUT_OF_MEMORY: "memory",
}
_NOTES = 1 << 10  # bytes that a text may have beside what was asked for: how much is left out

_MACHINE = ("etc", "usr", "var/lib/apt", "var/lib/dpkg")
_FOLDERS = {
    **dict.fromkeys(("home", "mnt", "opt", "run", "srv", "var/cache", "var/lib", "var/log"), 0o755),
    **{"root": 0o700, "tmp": 0o1777, "var/tmp": 0o1777},
}
_VARIABLES = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
_RESOLVER = Path("/etc/resolv.conf")


class BubblewrapBoxes:
    """Makes boxes with ``bwrap``; see the module."""

    def __init__(self) -> None:
        self._bubblewrap: Bubblewrap | None = None

    def problems(self) -> list[str]:
        try:
            self._confinement()
        except GraphError as error:
            return error.problems
        return []

    def _confinement(self) -> Bubblewrap:
        if self._bubblewrap is None:
            confinement = find_sandbox("bubblewrap")
            assert isinstance(confinement, Bubblewrap)
            self._bubblewrap = confinement
        return self._bubblewrap

    async def create(self, spec: SandboxSpec, *, layer: Path | None = None) -> BubblewrapBox:
        bubblewrap = await asyncio.to_thread(self._confinement)
        plan = _Plan(spec, bubblewrap, layer)
        ours, theirs = socket.socketpair()  # for the socket that it listens at, if it does
        with ours, theirs:
            try:
                process = await ConfinedProcess.start(
                    bubblewrap, plan.command(), max_line=1 << 16, cpus=spec.cpus, stdout=theirs.fileno()
                )
            except OSError as error:
                raise Unavailable(f"a box does not start: {error}") from error
            box = BubblewrapBox(process, spec, layer)
            try:
                await box.begin(plan.config(), ours)
            except BaseException:
                await box.close()
                raise
        return box


class _Plan:
    """What ``bwrap`` is asked for, and what the first process is told."""

    def __init__(self, spec: SandboxSpec, bubblewrap: Bubblewrap, layer: Path | None) -> None:
        self._spec = spec
        self._bubblewrap = bubblewrap
        self._layer = layer
        self._shown: list[str] = []
        self._overlays = list(self._roots())

    def _roots(self) -> Iterator[tuple[str, str, list[str]]]:
        """Of each overlay: its place in the box, its key, and where its lower folders are shown."""
        root = self._spec.root
        bases: dict[str, str | None] = {"": None if root is None else str(root)}
        bases |= {name: f"/{name}" for name in _MACHINE if root is None}
        for name, base in bases.items():
            key = name.replace("/", "-") or "root"
            lowers = [str(layer / "upper" / key) for layer in self._spec.layers]
            places = [f"/lower/{number}-{key}" for number, _ in enumerate(lowers)]
            shown = [pair for pair in zip(lowers, places, strict=True) if os.path.isdir(pair[0])]
            shown += [] if base is None else [(base, f"/lower/{key}")]
            self._shown += [word for source, place in shown for word in ("--ro-bind", source, place)]
            yield f"/{name}", key, [place for _, place in shown] + (["/lower/root"] if base is None else [])

    def command(self) -> list[str]:
        spec = self._spec
        if self._layer is None:
            written = ["--size", str(spec.disk_mb << 20), "--tmpfs", "/rw"]
        else:
            written = ["--bind", str(self._layer), "/rw"]
        return self._bubblewrap.resident([*written, *self._shown], network=spec.network == "full")

    def config(self) -> dict[str, Any]:
        spec, machine = self._spec, self._spec.root is None
        cores, hidden = sorted(os.sched_getaffinity(0)), _hidden() if machine else []
        return {
            "overlays": self._overlays,
            "options": "" if self._bubblewrap.user is not None else ",userxattr",
            "folders": sorted(_FOLDERS.items()) if machine else [],
            "links": _links() if machine else [],
            "mounts": ["tmp"],
            "listens": spec.network == "model",
            "workdir": spec.workdir,
            "made": spec.folders,
            "covered": [*hidden, *_files(machine=machine, network=spec.network == "full")],
            "pids": spec.pids,
            "memory": spec.memory_mb << 20,
            "env": {**_VARIABLES, **spec.env},
            "user": spec.user,
            "cores": random.sample(cores, spec.cpus) if spec.cpus < len(cores) else [],
            "filter": box_filter(os.uname().machine),
            "replies": 0,
        }


@cache
def _resident() -> CodeType:
    return compile(Path(resident.__file__).read_bytes(), "<resident>", "exec", dont_inherit=True)


@cache
def _links() -> list[tuple[str, str]]:
    return [(name, os.readlink(f"/{name}")) for name in os.listdir("/") if os.path.islink(f"/{name}")]


@cache
def _hidden() -> list[tuple[str, str, None]]:
    """Files and folders of ``/etc`` that not every user may read."""
    hidden: list[str] = []
    for folder, folders, files in os.walk("/etc"):
        hidden += [path for name in (*folders, *files) if not _public(path := os.path.join(folder, name))]
        folders[:] = [name for name in folders if os.path.join(folder, name) not in hidden]
    return [("etc", os.path.relpath(path, "/etc"), None) for path in hidden]


def _public(path: str) -> bool:
    mode = os.lstat(path).st_mode
    needed = stat.S_IROTH | stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IROTH
    return stat.S_ISLNK(mode) or mode & needed == needed


def _files(*, machine: bool, network: bool) -> list[tuple[str, str, bytes]]:
    names = [("hostname", b"sandbox\n"), ("hosts", b"127.0.0.1 localhost sandbox\n::1 localhost\n")]
    if network and _RESOLVER.exists():
        names.append(("resolv.conf", _RESOLVER.read_bytes()))
    return [("etc", name, data) if machine else ("root", f"etc/{name}", data) for name, data in names]


class FirstProcess(Protocol):
    """What a box needs of its first process (`inside.resident`): the way to it, and its end."""

    @property
    def reader(self) -> asyncio.StreamReader: ...

    @property
    def writer(self) -> Any: ...

    async def stop(self) -> object: ...


class BubblewrapBox:
    """A box with its own first process; see `Sandbox`."""

    def __init__(self, process: FirstProcess, spec: SandboxSpec, layer: Path | None) -> None:
        self._process = process
        self._network = spec.network
        self._ttl = spec.ttl
        self._listener: socket.socket | None = None
        self._layer = layer
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[asyncio.Future[tuple[int, int, bytes, bytes]], int]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._sending = asyncio.Lock()
        self._over: str | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return self._over is None

    async def begin(
        self, config: Mapping[str, Any], out: socket.socket | None = None, *, source: bytes | None = None
    ) -> None:
        """Have the first process make the root. ``out``: what it hands a socket to, if it listens;
        ``source``: its program, for a Python that is not this one. Raises `Unavailable` if it does not."""
        reply = self._expect(0, _NOTES)
        self._reading = asyncio.create_task(self._read())
        self._write(source or _resident())
        await self._send(config)
        try:
            ended, _, _, errors = await asyncio.wait_for(reply, _START_SECONDS)
        except (SessionLost, asyncio.TimeoutError) as error:
            raise Unavailable(f"a box does not start: {error or 'not in time'}") from error
        if ended != resident.EXITED:
            raise Unavailable(f"a box does not start: {errors.decode('utf-8', 'replace')}")
        if out is not None and config["listens"]:
            out.setblocking(False)  # it was sent before the reply
            self._listener = socket.socket(fileno=socket.recv_fds(out, 1, 1)[1][0])
        if self._ttl is not None:
            self._timer = asyncio.get_running_loop().call_later(self._ttl, self._expire)

    def _expire(self) -> None:
        self._end(f"its time to live, {self._ttl:g} s, is over")
        self._closing = asyncio.create_task(self.close())

    async def listen(self) -> socket.socket:
        if self._network == "full":
            return socket.create_server(("127.0.0.1", 0))
        if self._listener is None or self._over is not None:
            raise SandboxRefused("the network of the box is none: its programs reach nobody")
        return self._listener.dup()

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
        if self._timer is not None:
            self._timer.cancel()
        await self._process.stop()
        if self._reading is not None:
            self._reading.cancel()
        if self._listener is not None:
            self._listener.close()
        if self._layer is not None:
            await asyncio.to_thread(shutil.rmtree, self._layer / "work", ignore_errors=True)

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
        self._over = self._over or reason
        for future, _ in self._waiting.values():
            if not future.done():
                future.set_exception(SessionLost(f"the box is gone: {self._over}"))
        self._waiting.clear()


_: tuple[type[Sandbox], type[Listens]] = BubblewrapBox, BubblewrapBox

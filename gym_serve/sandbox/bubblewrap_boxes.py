"""`BubblewrapBoxes`: boxes without a daemon, an image or a right that an ordinary user lacks.

The root of a box is a copy-on-write view, an overlay in memory, of a folder or of this machine: of the
system's folders, not of homes, data and services, and without the files that not every user may read.

Nothing of a box is to be swept: processes, mounts and files exist in its namespaces alone, which end with its
first process (`inside.resident`). That ends with the socket to this process, whatever ends this process. For
one that has not begun, see `gym_serve.sandbox.orphans`.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

from gym_serve.sandbox.boxes import Listens, Sandbox, SandboxRefused, SandboxSpec
from gym_serve.sandbox.confined import ConfinedProcess
from gym_serve.sandbox.egress import PORT, EgressProxy, proxy_variables
from gym_serve.sandbox.inside import resident
from gym_serve.sandbox.inside.confinement import box_filter
from gym_serve.sandbox.providers import Bubblewrap, find_sandbox
from gym_serve.sandbox.resident_boxes import FirstProcess, ResidentBox
from gym_serve.types.errors import GraphError, Unavailable

_MACHINE = ("etc", "usr", "var/lib/apt", "var/lib/dpkg")
_FOLDERS = {
    **dict.fromkeys(("home", "mnt", "opt", "run", "srv", "var/cache", "var/lib", "var/log"), 0o755),
    **{"root": 0o700, "tmp": 0o1777, "var/tmp": 0o1777},
}
_VARIABLES = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    # Debian keeps them out of its Python, which is the box's own here.
    "PIP_BREAK_SYSTEM_PACKAGES": "1",
    "UV_BREAK_SYSTEM_PACKAGES": "1",
    "UV_NATIVE_TLS": "1",  # the certificates are this machine's
}
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
            async with box.beginning():
                await box.begin(plan.config(), _resident())
                if ports := _ports(spec):
                    await box.take_listeners(ours, len(ports))
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
            "listens": _ports(spec),
            "workdir": spec.workdir,
            "made": spec.folders,
            "covered": [*hidden, *_files(machine=machine, network=spec.network == "full")],
            "pids": spec.pids,
            "memory": spec.memory_mb << 20,
            "env": {**_VARIABLES, **(proxy_variables() if spec.network == "allowlist" else {}), **spec.env},
            "user": spec.user,
            "cores": random.sample(cores, spec.cpus) if spec.cpus < len(cores) else [],
            "filter": box_filter(os.uname().machine),
            "replies": 0,
            "machine": False,
        }


def _ports(spec: SandboxSpec) -> list[int]:
    """Where a box listens for this process: at any port for a model, at its own for the proxy."""
    return {"model": [0], "allowlist": [0, PORT]}.get(spec.network, [])


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


class BubblewrapBox(ResidentBox):
    """A box of ``bwrap``; ``layer``: what it keeps its changes in."""

    def __init__(self, process: FirstProcess, spec: SandboxSpec, layer: Path | None) -> None:
        super().__init__(process, spec)
        self._layer = layer
        self._listener: socket.socket | None = None
        self._stack = AsyncExitStack()

    async def take_listeners(self, out: socket.socket, count: int) -> None:
        """Take the sockets that the first process listens at (`_ports`): they have been sent to ``out``."""
        out.setblocking(False)
        files = socket.recv_fds(out, 1, count)[1]
        self._listener, *proxied = [socket.socket(fileno=file) for file in files]
        self._stack.callback(self._listener.close)
        for listener in proxied:
            await self._stack.enter_async_context(EgressProxy(listener, self._spec.allowed_hosts))

    async def listen(self) -> socket.socket:
        """See `Listens.listen`."""
        if self._spec.network == "full":
            return socket.create_server(("127.0.0.1", 0))
        if self._listener is None or not self.alive:
            raise SandboxRefused("the network of the box is none: its programs reach nobody")
        return self._listener.dup()

    async def close(self) -> None:
        """See `Sandbox.close`."""
        await super().close()
        await self._stack.aclose()
        if self._layer is not None:
            await asyncio.to_thread(shutil.rmtree, self._layer / "work", ignore_errors=True)


_: tuple[type[Sandbox], type[Listens]] = BubblewrapBox, BubblewrapBox

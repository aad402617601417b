"""`BubblewrapBoxes`: boxes without a daemon, an image or a right that an ordinary user lacks.

The root of a box is a copy-on-write view, an overlay in memory, of a folder or of this machine: of the
system's folders, not of homes, data and services, and without the files that not every user may read.

Nothing of a box is to be swept: processes, mounts and files exist in its namespaces alone, which end with its
first process (`inside.resident`). That ends with the socket to this process, and with the template, whatever
ends this process. For one that has not begun, see `gym_serve.sandbox.orphans`.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import socket
import stat
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from typing import Any

from gym_serve.sandbox.boxes import Keeps, Listens, Sandbox, SandboxRefused, SandboxSpec
from gym_serve.sandbox.egress import PORT, EgressProxy, proxy_variables
from gym_serve.sandbox.inside.confinement import box_filters
from gym_serve.sandbox.providers import Bubblewrap, find_sandbox
from gym_serve.sandbox.resident_boxes import ResidentBox
from gym_serve.sandbox.templates import Copy, Template
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
_SHARED_MEMORY = 64 << 20  # bytes of /dev/shm
_RESOLVER = Path("/etc/resolv.conf")


class BubblewrapBoxes:
    """Makes boxes with ``bwrap``; see the module."""

    def __init__(self) -> None:
        self._bubblewrap: Bubblewrap | None = None
        self._template: Template | None = None

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
        try:
            template, before = self._template, None
            if template is None or not template.alive:
                before, template = template, Template(bubblewrap)
                self._template = template
            box = BubblewrapBox(await template.copy(spec.cpus), spec, layer)
            async with box.beginning():
                if before is not None:
                    await before.leave()
                await box.begin(_config(spec, layer, rootless=bubblewrap.user is None))
                await box.take_files()
        except OSError as error:
            raise Unavailable(f"a box does not start: {error}") from error
        return box

    async def stop(self) -> None:
        """See `Keeps.stop`."""
        template, self._template = self._template, None
        if template is not None:
            await template.leave()


def _config(spec: SandboxSpec, layer: Path | None, *, rootless: bool) -> dict[str, Any]:
    """What the first process is told; ``layer``: the folder that it keeps its changes in."""
    machine, cores = spec.root is None, sorted(os.sched_getaffinity(0))
    bases = {"": None, **{name: f"/{name}" for name in _MACHINE}} if machine else {"": str(spec.root)}
    overlays: list[tuple[str, str, list[str]]] = []  # place in the box, key, places of the lower folders
    shown: list[tuple[str, str]] = []
    for name, base in bases.items():
        key = name.replace("/", "-") or "root"
        lowers = [str(each / "upper" / key) for each in spec.layers]
        places = [(path, f"/lower/{n}-{key}") for n, path in enumerate(lowers) if os.path.isdir(path)]
        places += [] if base is None else [(base, f"/lower/{key}")]
        shown += places
        overlays.append((f"/{name}", key, [p for _, p in places] + (["/lower/root"] if base is None else [])))
    return {
        "overlays": overlays,
        "shown": shown,
        "layer": None if layer is None else str(layer),
        "options": ",userxattr" if rootless else "",
        "disk": spec.disk_mb << 20,
        "shared": _SHARED_MEMORY,
        "folders": sorted(_FOLDERS.items()) if machine else [],
        "links": _links() if machine else [],
        "mounts": ["tmp"],
        "network": spec.network == "full",
        "listens": _ports(spec),
        "workdir": spec.workdir,
        "made": spec.folders,
        "covered": [
            *(_hidden() if machine else []),
            *_files(machine=machine, network=spec.network == "full"),
        ],
        "pids": spec.pids,
        "memory": spec.memory_mb << 20,
        "env": {**_VARIABLES, **(proxy_variables() if spec.network == "allowlist" else {}), **spec.env},
        "user": spec.user,
        "cores": random.sample(cores, spec.cpus) if spec.cpus < len(cores) else [],
        "filters": box_filters(),
        "replies": 0,
        "machine": False,
    }


def _ports(spec: SandboxSpec) -> list[int]:
    """Where a box listens for this process: at any port for a model, at its own for the proxy."""
    return {"model": [0], "allowlist": [0, PORT]}.get(spec.network, [])


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

    def __init__(self, process: Copy, spec: SandboxSpec, layer: Path | None) -> None:
        super().__init__(process, spec)
        self._copy = process
        self._layer = layer
        self._listener: socket.socket | None = None
        self._stack = AsyncExitStack()

    async def take_files(self) -> None:
        """Take the sockets that the first process has sent: it listens at them (`_ports`). Raises `OSError`:
        it cannot join a control group."""
        listeners = [socket.socket(fileno=file) for file in self._copy.taken()]
        for listener in listeners:
            self._stack.callback(listener.close)
        self._copy.join_group()
        if listeners:
            self._listener = listeners[0]
        for listener in listeners[1:]:
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


_: tuple[type[Sandbox], type[Listens], type[Keeps]] = BubblewrapBox, BubblewrapBox, BubblewrapBoxes

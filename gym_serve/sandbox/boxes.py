"""`SandboxProvider` makes boxes, and a `Sandbox` is one: a small machine of its own, for one episode.

What a box contains is hostile: an agent works in it. So all of its output is bounded, and its files come as
bytes, never as files of this machine. A command that fails is a result, not an exception; an exception says
that the box is gone (`SessionLost`), or cannot do what was asked (`SandboxRefused`).
"""

from __future__ import annotations

import importlib.metadata
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, Protocol, runtime_checkable

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    model_validator,
)
from typing_extensions import Self

from gym_serve.sandbox.hosts import host_entry
from gym_serve.types.errors import GraphError

GROUP = "gym_serve.sandboxes"  # the entry points of providers

AbsolutePath = Annotated[str, StringConstraints(pattern=r"^/[^\x00]*$")]


class SandboxSpec(BaseModel):
    """What a box is made of, and what it may use."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    image: str | None = None
    """An OCI image, by its reference; None for what the provider makes boxes of."""
    root: Path | None = None
    """A folder with the files of a system, which stays as it is; None for a view of this machine's own."""
    layers: tuple[Path, ...] = ()
    """Layers on top of it, the last one first, as `SandboxProvider.create` makes them."""
    workdir: AbsolutePath = "/"
    """Where commands run that do not say; made if it is missing."""
    folders: tuple[AbsolutePath, ...] = ()
    """Further folders that are made if they are missing."""
    env: dict[str, str] = {}
    """Environment variables of all commands."""
    user: str | int | None = None
    """User of commands that do not say, by name or number; None for root."""
    network: Literal["none", "model", "allowlist", "full"] = "none"
    """``model``: no network but one port of its own loopback, behind which this process answers (`Listens`).
    ``allowlist``: the same, and ``allowed_hosts`` by HTTP and HTTPS, through a proxy that variables of the
    environment name. ``full``: the network of this machine, its own services included."""
    allowed_hosts: tuple[Annotated[str, AfterValidator(host_entry)], ...] = ()
    """Names, ``*.`` before a name for all below it, addresses and networks. A name leads to public addresses
    only, and to those that are in the list themselves."""
    cpus: PositiveInt = 1
    """Processors that its commands may use."""
    memory_mb: PositiveInt = 2048
    """Memory of all its processes together, in MiB; the largest one is killed if they take more."""
    disk_mb: PositiveInt = 1024
    """Size of all files that it writes, in MiB; they are in memory."""
    pids: Annotated[int, Field(ge=320)] = 512
    """Maximum number of processes and threads."""
    ttl: PositiveFloat | None = None
    """Seconds that the box lives at most, whoever has it; None for as long as its owner keeps it. The
    connection to its owner is its lease: it ends with that in any case."""

    @model_validator(mode="after")
    def _has_hosts_for_a_list(self) -> Self:
        if self.allowed_hosts and self.network != "allowlist":
            raise ValueError(f"allowed_hosts is for network: allowlist, got {self.network}")
        return self


class ExecResult(BaseModel):
    """How a command ended."""

    model_config = ConfigDict(frozen=True)

    status: int
    """Exit status; the signal that ended it, negated."""
    stdout: bytes
    """What it wrote: the start and the end, where that was more than the limit."""
    stderr: bytes
    ended: Literal["exit", "timeout", "memory"]
    """``timeout``: its whole session was killed at its time limit. ``memory``: the box had too little."""
    cut: bool
    """Whether a part of the output is missing."""

    @property
    def ok(self) -> bool:
        return self.ended == "exit" and self.status == 0

    @property
    def text(self) -> str:
        return (self.stdout + self.stderr).decode("utf-8", "replace")


class SandboxRefused(Exception):
    """The box goes on, but cannot do this: there is no such program, folder, user or file, or it is too long.

    The message says what it is."""


def words_of(command: str | Sequence[str]) -> list[str]:
    """The program and its arguments; a text is the shell's. Raises `SandboxRefused`: there are none."""
    words = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
    if not words or any("\0" in word for word in words):
        raise SandboxRefused("a command must have words, and none with a NUL character")
    return words


class Sandbox(Protocol):
    """A box that lives until it is closed, or the process that made it ends."""

    @property
    def alive(self) -> bool:
        """False once it is known that the box is gone."""
        ...

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: PositiveFloat,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        stdin: bytes = b"",
        output_limit: int = 1 << 20,
    ) -> ExecResult:
        """Execute a command. Several may run at the same time; processes that one leaves behind go on.

        Args:
            timeout: seconds after which the command is killed with all that it started in its session.
            cwd, user: those of the box by default.
            output_limit: bytes of each output that are returned.

        As the others, it raises `SandboxRefused` where the box cannot do this, and `SessionLost` if it is
        gone.
        """
        ...

    async def read(self, path: str, *, limit: int = 1 << 24) -> bytes:
        """The content of a file, of at most ``limit`` bytes."""
        ...

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Make a file; one that is there is removed first, so that no link is followed."""
        ...

    async def get(self, path: str, *, limit: int = 1 << 26) -> bytes:
        """A folder as a tar archive of at most ``limit`` bytes, whose names are relative to it."""
        ...

    async def put(self, path: str, archive: bytes, *, clear: bool = False) -> None:
        """Unpack a tar archive into a folder, which is made if it is missing."""
        ...

    async def close(self) -> None:
        """End all of its processes and remove its files. Safe to call again."""
        ...


@runtime_checkable
class Listens(Protocol):
    """A box whose programs can reach this process."""

    async def listen(self) -> socket.socket:
        """A socket that listens at a port of the box's 127.0.0.1. Whoever calls this accepts from it, decides
        what is answered (`gym_serve.sandbox.relay`), and closes it.

        Raises `SandboxRefused`: the network of the box does not allow it, or the provider cannot do it.
        """
        ...


class SandboxProvider(Protocol):
    """Makes boxes."""

    def problems(self) -> list[str]:
        """Why it makes none on this machine; an empty list if it does."""
        ...

    async def create(self, spec: SandboxSpec, *, layer: Path | None = None) -> Sandbox:
        """Make a box. Raises `Unavailable` if it does not start.

        ``layer`` is a folder that is there and empty, to keep what the box changes, for `SandboxSpec.layers`.
        """
        ...


@runtime_checkable
class Keeps(Protocol):
    """A provider that keeps something of its own beside its boxes, from the first one on."""

    async def stop(self) -> None:
        """End that once the last box is closed; a box that is made later has a new one."""
        ...


@runtime_checkable
class BuildsImages(Protocol):
    """A provider that builds images by itself."""

    async def build(self, folder: Path, spec: SandboxSpec, timeout: float) -> SandboxSpec:
        """The box of a folder with a Dockerfile.

        Args:
            folder: its Dockerfile, and what that copies.
            spec: what the box may use; a ``workdir`` of its own comes before the image's.
            timeout: seconds that it may take.

        Raises:
            InvalidRequest: it cannot be built; says why.
            Unavailable: not in time, or nobody answers.
        """
        ...


def find_provider(name: str) -> SandboxProvider:
    """The provider of a name, ready to use on this machine, or a `GraphError` with the next step."""
    providers = {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}
    if name not in providers:
        raise GraphError(f"sandbox: there is no provider {name!r}, only {', '.join(sorted(providers))}")
    provider: SandboxProvider = providers[name].load()()
    if problems := provider.problems():
        raise GraphError(problems)
    return provider


def provider_problems(name: str) -> list[str]:
    """The problems for which `find_provider` would raise."""
    try:
        find_provider(name)
    except GraphError as error:
        return error.problems
    return []

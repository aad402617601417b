"""`DockerBoxes`: boxes that are containers of Docker or Podman, by Docker's API over a socket.

The first process of a container waits for the end of its standard input, which is one connection to this
process. So a container ends with the process that made it, however that ends, and the daemon removes it then.
Only where the daemon itself was stopped before that, an ended container is left: the next start sweeps it.

Where the image has a Python, 3.9 or newer, the first process executes commands, as in a box of bubblewrap
(`inside.resident`): it has imported all that it needs before the agent comes. In other images with a shell,
``tar`` and ``head``, commands are ``exec`` calls of the daemon. Such a command has the variable `_MARK` in
its environment, and so has all that it starts: that is what is killed at its time limit.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import io
import itertools
import json
import os
import secrets
import socket
import tarfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from aiohttp import ClientError

from gym_serve.sandbox.attached import CHUNK, FIRST, PYTHON, SOURCE, Channel, settings_of
from gym_serve.sandbox.boxes import ExecResult, Listens, Sandbox, SandboxRefused, SandboxSpec, words_of
from gym_serve.sandbox.egress import PORT, EgressProxy, proxy_variables
from gym_serve.sandbox.inside.resident import Output
from gym_serve.sandbox.resident_boxes import ResidentBox
from gym_serve.sandbox.timed_box import TimedBox
from gym_serve.types.errors import InvalidRequest, SessionLost, Unavailable

if TYPE_CHECKING:
    from aiodocker import Docker
    from aiodocker.containers import DockerContainer
    from aiodocker.execs import Exec
    from aiodocker.stream import Stream

LABEL = "gym-serve"
"""Label of all its containers; its value says which process made one, ``host:pid``."""

_MARK = "GYM_SERVE_COMMAND"
_BOX = "GYM_SERVE_BOX"
_NETWORK = 0x40000000  # CLONE_NEWNET
_SOCKETS = ("/var/run/docker.sock", "/run/podman/podman.sock")
_FILE_SECONDS = 60.0
_START_SECONDS = 60.0
_LOOK_SECONDS = 0.5  # between two looks whether a command has ended
_LAST_OUTPUT_SECONDS = 0.2  # for what it wrote, once it has ended and others hold its output
_SCRIPT = """cd -- "$1" 2>/dev/null || {{ echo "{mark} folder $1" >&2; exit 127; }}; shift
command -v "$1" >/dev/null 2>&1 || {{ echo "{mark} program $1" >&2; exit 127; }}
{given}"$@"
"""
_KILL = f"""for p in /proc/[0-9]*; do
  [ "${{p#/proc/}}" != 1 ] && grep -qa "{_MARK}=$1" $p/environ 2>/dev/null && kill -9 "${{p#/proc/}}"
done; true"""


class DockerBoxes:
    """Makes containers; see the module. ``DOCKER_HOST`` says where the daemon is."""

    def __init__(self) -> None:
        self._swept = False

    def problems(self) -> list[str]:
        """See `SandboxProvider.problems`."""
        try:
            import aiodocker  # noqa: F401
        except ImportError:
            return ["sandbox: docker needs aiodocker: pip install 'gym-serve[docker]'"]
        url = _daemon()
        if url is None:
            places = " or ".join(_SOCKETS)
            return [f"sandbox: no daemon of Docker or Podman at {places}; DOCKER_HOST names another"]
        if url.startswith("unix://"):
            with socket.socket(socket.AF_UNIX) as there:
                try:
                    there.connect(url.removeprefix("unix://"))
                except OSError as error:
                    return [f"sandbox: no daemon of Docker or Podman at {url}: {error}"]
        return []

    async def create(self, spec: SandboxSpec, *, layer: Path | None = None) -> Sandbox:
        """See `SandboxProvider.create`. Changes stay with the daemon: ``layer`` must be None."""
        if spec.image is None or spec.root is not None or spec.layers or layer is not None:
            raise InvalidRequest("a box of Docker is made of an image, not of folders of this machine")
        from aiodocker.exceptions import DockerError

        async with AsyncExitStack() as stack:
            docker = await stack.enter_async_context(_client())
            try:
                if not self._swept:
                    self._swept = True
                    await _sweep(docker)
                image = (await docker.images.inspect(spec.image))["Config"]
                env = {**(proxy_variables() if spec.network == "allowlist" else {}), **spec.env}
                user = image.get("User") if spec.user is None else spec.user
                spec = spec.model_copy(update={"user": user, "env": env})
                mark = secrets.token_hex(16)
                container = await docker.containers.create(_config(spec, mark))
                stack.push_async_callback(_remove, container)
                held = container.attach(stdin=True, stdout=True, stderr=True)
                await stack.enter_async_context(held)  # type: ignore[arg-type] # of its own __aexit__
                await container.start()
                channel = await stack.enter_async_context(Channel(held))
                if spec.network == "allowlist":
                    listener = await _listener_of(container, mark, PORT)
                    await stack.enter_async_context(EgressProxy(listener, spec.allowed_hosts))
                has_python = await asyncio.wait_for(channel.reader.readexactly(1), _START_SECONDS) == b"r"
            except DockerError as error:
                failure = InvalidRequest if error.status in (400, 404) else Unavailable
                raise failure(f"a box of {spec.image} does not start: {error.message}") from error
            except SandboxRefused as error:
                raise InvalidRequest(f"a box of {spec.image} does not start: {error}") from None
            except (OSError, EOFError, asyncio.TimeoutError, SessionLost) as error:
                raise Unavailable(f"a box of {spec.image} does not start: {error}") from error
            box: ContainerBox | DockerBox
            if has_python:
                channel.stack = stack.pop_all()
                box = ContainerBox(channel, spec, container, mark)
                beginning = box.begin(settings_of(spec), SOURCE)
            else:
                box = DockerBox(container, spec, mark, stack.pop_all())
                beginning = box.begin()
            async with box.beginning():
                await beginning
            return box
        raise AssertionError("unreachable")

    async def build(self, folder: Path, spec: SandboxSpec, timeout: float) -> SandboxSpec:
        """See `BuildsImages.build`."""
        from aiodocker.exceptions import DockerError

        context = await asyncio.to_thread(_context, folder)
        base = spec.image or ""  # what `ARG BASE` and `FROM $BASE` build on
        tag = f"gym-serve:{hashlib.sha256(context + base.encode()).hexdigest()[:32]}"
        async with _client() as docker:
            try:
                try:
                    image = await docker.images.inspect(tag)
                except DockerError as error:
                    if error.status != 404:
                        raise
                    await docker.images.build(
                        fileobj=io.BytesIO(context),
                        tag=tag,
                        encoding="identity",
                        buildargs={"BASE": base} if base else {},
                        timeout=timeout,
                        forcerm=True,
                    )
                    image = await docker.images.inspect(tag)
            except asyncio.TimeoutError as error:
                raise Unavailable(f"{folder}: the image took more than {timeout:g} s to build") from error
            except DockerError as error:
                raise InvalidRequest(f"{folder}: the image cannot be built: {error.message}") from None
            except OSError as error:
                raise Unavailable(f"the daemon does not answer: {error}") from error
        changes: dict[str, Any] = {"image": tag}
        if "workdir" not in spec.model_fields_set:
            changes["workdir"] = image["Config"].get("WorkingDir") or "/"
        return spec.model_copy(update=changes)


def _daemon() -> str | None:
    if host := os.environ.get("DOCKER_HOST"):
        return host
    return next((f"unix://{path}" for path in _SOCKETS if os.path.exists(path)), None)


def _client() -> Docker:
    from aiodocker import Docker

    return Docker(url=_daemon())


def _context(folder: Path) -> bytes:
    """The folder as an archive whose bytes depend on its files alone."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = "root"
        return member

    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for path in sorted(folder.rglob("*")):
            archive.add(path, arcname=str(path.relative_to(folder)), recursive=False, filter=plain)
    return data.getvalue()


def _config(spec: SandboxSpec, mark: str) -> dict[str, Any]:
    """What the daemon is asked for; ``mark`` is in the environment of the first process."""
    memory = spec.memory_mb << 20
    return {
        "Image": spec.image,
        "Entrypoint": ["/bin/sh", "-c", FIRST, "sh", PYTHON],
        "Cmd": [],
        "OpenStdin": True,
        "StdinOnce": True,  # its input ends with the first connection to it
        "AttachStdin": True,
        "WorkingDir": spec.workdir,
        "Env": [f"{name}={value}" for name, value in {**spec.env, _BOX: mark}.items()],
        "User": "0",
        "Labels": {LABEL: f"{socket.gethostname()}:{os.getpid()}", f"{LABEL}.version": version("gym-serve")},
        "HostConfig": {
            "AutoRemove": True,
            "NetworkMode": "bridge" if spec.network == "full" else "none",
            "NanoCpus": spec.cpus * 1_000_000_000,
            "Memory": memory,
            "MemorySwap": memory,
            "PidsLimit": spec.pids,
            "SecurityOpt": ["no-new-privileges"],
        },
    }


async def _sweep(docker: Docker) -> None:
    """Remove containers that have ended, and that the daemon was stopped before it removed."""
    over = {"label": [LABEL], "status": ["exited"]}
    for container in await docker.containers.list(all=True, filters=json.dumps(over)):
        await _remove(container)


async def _remove(container: DockerContainer) -> None:
    from aiodocker.exceptions import DockerError

    with suppress(DockerError, OSError):  # it removes itself as well
        await container.delete(force=True)


class DockerBox(TimedBox):
    """A container; see `Sandbox`.

    Args:
        container: it runs.
        spec: what it was made of.
        mark: that of its first process.
        stack: ends it.
    """

    def __init__(
        self, container: DockerContainer, spec: SandboxSpec, mark: str, stack: AsyncExitStack
    ) -> None:
        super().__init__(spec)
        self._container = container
        self._mark = mark
        self._stack = stack
        self._numbers = itertools.count(1)

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
        """See `Sandbox.exec`."""
        argv = words_of(command)
        mark = f"{next(self._numbers)}-{secrets.token_hex(8)}"
        script = _SCRIPT.format(mark=mark, given=f"head -c {len(stdin)} | " if stdin else "exec ")
        outputs = (Output(output_limit), Output(output_limit))
        ended: Literal["exit", "timeout"] = "exit"
        with self._errors():
            execution = await self._container.exec(
                ["/bin/sh", "-c", script, "sh", cwd or self._spec.workdir, *argv],
                stdin=bool(stdin),
                environment={**(env or {}), _MARK: mark},
                user=str((self._spec.user if user is None else user) or ""),
            )
            async with execution.start() as stream:
                try:
                    await asyncio.wait_for(_exchange(execution, stream, stdin, outputs), timeout)
                except asyncio.TimeoutError:
                    ended = "timeout"
                    await self._kill(mark)
                except asyncio.CancelledError:
                    await asyncio.shield(self._kill(mark))
                    raise
            status = (await execution.inspect())["ExitCode"]
        stdout, stderr = (output.text() for output in outputs)
        first_word, _, missing = stderr.decode("utf-8", "replace").partition(" ")
        if status == 127 and first_word == mark:
            raise SandboxRefused(f"there is no {missing.strip()}")
        return ExecResult(
            status=-9 if ended == "timeout" else 128 - status if status > 128 else status,
            stdout=stdout,
            stderr=stderr,
            ended=ended,
            cut=any(output.size > output_limit for output in outputs),
        )

    async def begin(self) -> None:
        """Make the folders of the box, and count the time that it lives from now on."""
        if self._spec.folders:
            await self.exec(["mkdir", "-p", "--", *self._spec.folders], timeout=_FILE_SECONDS, user=0)
        self._begin_to_live()

    async def listen(self) -> socket.socket:
        """See `Listens.listen`."""
        return await _model_listener_of(self._container, self._spec, self._mark)

    async def _kill(self, mark: str) -> None:
        execution = await self._container.exec(["/bin/sh", "-c", _KILL, "sh", mark], user="0")
        async with execution.start() as stream:
            while await stream.read_out() is not None:
                pass

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """What the daemon says, as errors of a box."""
        from aiodocker.exceptions import DockerError

        if self._over is not None:
            raise SessionLost(f"the box is gone: {self._over}")
        try:
            yield
        except DockerError as error:
            if error.status in (404, 409):
                raise SessionLost(f"the box is gone: {error.message}") from error
            raise SandboxRefused(f"the daemon refuses it: {error.message}") from None
        except (OSError, ClientError) as error:
            raise SessionLost(f"the box is gone: {error}") from error

    async def read(self, path: str, *, limit: int = 1 << 24) -> bytes:
        """See `Sandbox.read`."""
        done = await self._file(["head", "-c", str(limit + 1), "--", path], path, limit=limit + 1)
        if len(done) > limit:
            raise SandboxRefused(f"{path} has more than {limit} bytes")
        return done

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See `Sandbox.write`."""
        script = 'mkdir -p -- "$(dirname -- "$1")" && rm -f -- "$1" && cat >"$1" && chmod "$2" "$1"'
        await self._file(["/bin/sh", "-c", script, "sh", path, f"{mode:o}"], path, data)

    async def get(self, path: str, *, limit: int = 1 << 26) -> bytes:
        """See `Sandbox.get`."""
        archive = await self._file(["tar", "-C", path, "-cf", "-", "."], path, limit=limit + 1)
        if len(archive) > limit:
            raise SandboxRefused(f"{path} has more than {limit} bytes")
        return archive

    async def put(self, path: str, archive: bytes, *, clear: bool = False) -> None:
        """See `Sandbox.put`."""
        script = 'mkdir -p -- "$1" && cd -- "$1" && { [ -z "$2" ] || rm -rf -- ..?* .[!.]* *; } && tar -xf -'
        await self._file(["/bin/sh", "-c", script, "sh", path, "clear" if clear else ""], path, archive)

    async def _file(self, argv: list[str], path: str, data: bytes = b"", *, limit: int = 1 << 12) -> bytes:
        done = await self.exec(argv, timeout=_FILE_SECONDS, stdin=data, output_limit=2 * limit, user=0)
        if not done.ok:
            problem = (
                done.stderr.decode("utf-8", "replace")[-500:] or f"it took more than {_FILE_SECONDS:g} s"
            )
            raise SandboxRefused(f"{path}: {problem}")
        return done.stdout

    async def close(self) -> None:
        """See `Sandbox.close`."""
        self._end("it was closed")
        await self._stack.aclose()


class ContainerBox(ResidentBox):
    """A container whose first process executes the commands. ``channel``: to that process; ``container``,
    ``mark``: see `DockerBox`."""

    def __init__(self, channel: Channel, spec: SandboxSpec, container: DockerContainer, mark: str) -> None:
        super().__init__(channel, spec)
        self._container, self._mark = container, mark

    async def listen(self) -> socket.socket:
        """See `Listens.listen`."""
        return await _model_listener_of(self._container, self._spec, self._mark)


async def _model_listener_of(container: DockerContainer, spec: SandboxSpec, mark: str) -> socket.socket:
    """See `Listens.listen`."""
    if spec.network not in ("model", "allowlist"):
        raise SandboxRefused(f"the network of the box is {spec.network}, and must be model or allowlist")
    return await _listener_of(container, mark, 0)


async def _listener_of(container: DockerContainer, mark: str, port: int) -> socket.socket:
    """A socket that listens at a port of a container's loopback. This process must be root, and see the
    daemon's processes: it enters the network of the container for a moment."""
    from aiodocker.exceptions import DockerError

    try:
        process = int((await container.show())["State"]["Pid"])
    except (DockerError, OSError, ClientError) as error:
        raise SessionLost(f"the box is gone: {error}") from error
    return await asyncio.to_thread(_listener_in, process, f"{_BOX}={mark}".encode(), port)


def _listener_in(process: int, mark: bytes, port: int) -> socket.socket:
    """A socket that listens in the network of a process, which has ``mark`` in its environment: a number may
    be another process's, where the daemon's processes have other numbers than here."""
    opened: list[socket.socket | OSError] = []

    def enter() -> None:  # in a thread of its own, which ends in that network
        try:
            if mark not in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
                raise ProcessLookupError("the daemon's processes are not those of this machine")
            namespace = os.open(f"/proc/{process}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            try:
                if ctypes.CDLL(None, use_errno=True).setns(namespace, _NETWORK) == -1:
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            finally:
                os.close(namespace)
            opened.append(socket.create_server(("127.0.0.1", port)))
        except OSError as error:
            opened.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if isinstance(opened[0], OSError):
        raise SandboxRefused(
            f"the server must be root on the daemon's machine to open a way out of the box: {opened[0]}"
        )
    return opened[0]


async def _exchange(execution: Exec, stream: Stream, stdin: bytes, outputs: tuple[Output, Output]) -> None:
    """Give a command its input and read its output until it has ended, though others may hold that."""

    async def ended() -> None:
        while (await execution.inspect())["Running"]:  # noqa: ASYNC110 - the daemon tells nobody
            await asyncio.sleep(_LOOK_SECONDS)
        await asyncio.sleep(_LAST_OUTPUT_SECONDS)

    async def write() -> None:
        for start in range(0, len(stdin), CHUNK):
            await stream.write_in(stdin[start : start + CHUNK])

    async def read() -> None:
        while (message := await stream.read_out()) is not None:
            outputs[message.stream == 2].add(message.data)

    writing = asyncio.create_task(write())  # a command may end before it has read all
    tasks = [asyncio.create_task(read()), asyncio.create_task(ended())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (writing, *tasks):
            task.cancel()
        await asyncio.gather(writing, *tasks, return_exceptions=True)


_: tuple[type[Sandbox], type[Listens]] = DockerBox, DockerBox

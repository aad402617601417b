"""`Images`: from a folder with a Dockerfile to a layer and settings of a box, without a container engine.

``FROM`` is replaced by the provider's own root. ``RUN``, ``COPY`` and ``ADD`` of local files happen once, in
a box whose changes are kept. What cannot be done here is an error, never left out in silence.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import io
import json
import logging
import os
import re
import shlex
import shutil
import string
import tarfile
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from gym_serve.sandbox import BuildsImages, SandboxProvider, SandboxRefused, SandboxSpec
from gym_serve.types.errors import InvalidRequest, Unavailable

logger = logging.getLogger("gym_serve")

DOCKERFILE = "Dockerfile"
_IGNORED = {"CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "STOPSIGNAL", "VOLUME"}
_DOES = {"RUN", "COPY", "ADD"}
_BUILDS = SandboxSpec(network="full", memory_mb=8192)
_SHOWN = 2000  # characters of what a step wrote
_UV = re.compile(r"--from=ghcr\.io/astral-sh/uv(?::([0-9][0-9.]*|latest))?")
_UV_PROGRAMS = ("/uv", "/uvx")


_UNUSED_SECONDS = 24 * 3600.0
_SIZE = "size"  # file of a layer that says how many bytes it has


def cache_folder() -> Path:
    """Where layers are kept; it may be deleted while nothing runs, and `sweep` bounds it."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gym-serve" / "layers"


class Images:
    """The layers of a provider's boxes."""

    def __init__(self, provider: SandboxProvider, cache: Path) -> None:
        self._provider = provider
        self._cache = cache
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    async def spec(self, folder: Path | None, spec: SandboxSpec, timeout: float) -> SandboxSpec:
        """The box of an image (of None: as it is); ``env`` and ``workdir`` of ``spec`` come first. Raises
        InvalidRequest: the Dockerfile asks for what is not done here, or a step of it failed; Unavailable: no
        box starts.
        """
        if isinstance(self._provider, BuildsImages):
            return spec if folder is None else await self._provider.build(folder, spec, timeout)
        if spec.image is not None:
            _say(spec.image)
            spec = spec.model_copy(update={"image": None})
        if folder is None:
            return spec
        steps = list(instructions(folder))
        settings = _settings(steps, spec)
        _say(next((text for name, text in steps if name == "FROM"), "scratch"))
        if not any(name in _DOES for name, _ in steps):
            return settings
        key = await asyncio.to_thread(_digest, folder)
        layer = self._cache / key
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            if not await asyncio.to_thread(_used, layer):
                await self._build(folder, steps, layer, timeout)
        return settings.model_copy(update={"layers": (layer, *spec.layers)})

    async def _build(self, folder: Path, steps: list[tuple[str, str]], layer: Path, timeout: float) -> None:
        lock = await asyncio.to_thread(_locked, layer)  # another process may build it
        begun = Path(f"{layer}.begun")
        try:
            if not await asyncio.to_thread(_begin, layer, begun):
                return
            box = await self._provider.create(_BUILDS, layer=begun)
            try:
                for number, (name, text) in enumerate(steps):
                    if name in _DOES:
                        await _Step(folder, _settings(steps[:number], _BUILDS), timeout).do(box, name, text)
            finally:
                await box.close()
            await asyncio.to_thread(_finish, begun, layer)
        finally:
            await asyncio.to_thread(shutil.rmtree, begun, ignore_errors=True)
            os.close(lock)


def sweep(cache: Path, most: float) -> None:
    """Remove what killed builds left, and layers, until there are at most ``most`` bytes of them: those that
    were used last the longest ago, and not those of the last day, which boxes may still have."""
    layers = {path.name.partition(".")[0] for path in cache.glob("*")}
    used = sorted((_last_use(cache / name), cache / name) for name in layers)
    total = sum(_size(layer) for _, layer in used)
    for moment, layer in used:
        try:
            lock = _locked(layer, wait=False)
        except BlockingIOError:  # it is being built or swept
            continue
        try:
            shutil.rmtree(f"{layer}.begun", ignore_errors=True)
            if total > most and moment == _last_use(layer) < time.time() - _UNUSED_SECONDS:
                total -= _size(layer)
                shutil.rmtree(layer, ignore_errors=True)
            if not layer.exists():
                os.unlink(f"{layer}.lock")
        finally:
            os.close(lock)


def _last_use(layer: Path) -> float:
    try:
        return layer.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _size(layer: Path) -> int:
    with suppress(OSError, ValueError):
        return int((layer / _SIZE).read_text())
    return sum(path.lstat().st_size for path in layer.rglob("*") if not path.is_dir())


def _used(layer: Path) -> bool:
    """Whether there is this layer, which is not swept then for a day."""
    lock = _locked(layer)
    try:
        os.utime(layer)
    except FileNotFoundError:
        return False
    finally:
        os.close(lock)
    return True


def _finish(begun: Path, layer: Path) -> None:
    (begun / _SIZE).write_text(str(_size(begun)))
    begun.rename(layer)


def _locked(layer: Path, *, wait: bool = True) -> int:
    layer.parent.mkdir(parents=True, exist_ok=True)
    name = f"{layer}.lock"
    while True:
        file = os.open(name, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            with suppress(FileNotFoundError):  # who swept the layer has removed the file
                if os.path.samestat(os.fstat(file), os.stat(name)):
                    return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _begin(layer: Path, begun: Path) -> bool:
    """Make an empty folder for a layer; False if the layer is there by now."""
    shutil.rmtree(begun, ignore_errors=True)  # of a process that was killed
    if layer.exists():
        return False
    begun.mkdir()
    return True


class _Step:
    def __init__(self, folder: Path, settings: SandboxSpec, timeout: float) -> None:
        self._folder = folder
        self._settings = settings
        self._timeout = timeout

    async def do(self, box: Any, name: str, text: str) -> None:
        try:
            await (self._run(box, text) if name == "RUN" else self._copy(box, name, text))
        except SandboxRefused as error:
            raise InvalidRequest(f"{self._folder / DOCKERFILE}: {name} {text[:200]}: {error}") from None

    async def _run(self, box: Any, text: str) -> None:
        if text.startswith(("--", "<<")):
            raise SandboxRefused("RUN with flags or a here-document is not supported by this provider")
        settings, limit = self._settings, self._timeout
        command: Any = json.loads(text) if text.startswith("[") else text
        await box.exec(["mkdir", "-p", settings.workdir], timeout=limit)
        place = {"cwd": settings.workdir, "env": settings.env, "user": settings.user}
        done = await box.exec(command, timeout=limit, **place)
        if done.ended == "timeout":
            raise Unavailable(f"{self._folder / DOCKERFILE}: RUN took more than {self._timeout:g} s")
        if not done.ok:
            raise SandboxRefused(f"exit status {done.status}: {done.text[-_SHOWN:]}")

    async def _copy(self, box: Any, name: str, text: str) -> None:
        words = json.loads(text) if text.startswith("[") else shlex.split(text)
        flags = [word for word in words if word.startswith("--")]
        *sources, place = [_expanded(word, self._settings.env) for word in words if not word.startswith("--")]
        target = os.path.join(self._settings.workdir, place)
        into = place.endswith("/") or len(sources) > 1 or place in (".", "..")
        if len(flags) == 1 and (uv := _UV.fullmatch(flags[0])) and set(sources) <= {*_UV_PROGRAMS}:
            for source in sources:
                await self._uv(box, uv[1], source, f"{target}{source}" if into else target)
            return
        if flags or not sources or any("://" in source for source in sources):
            lack = "is not supported by this provider"
            raise SandboxRefused(f"{name} with flags, from an image or a URL {lack}")
        for source in sources:
            for file, data, mode in await asyncio.to_thread(self._found, source):
                if mode is None:
                    await box.put(target, data)
                else:
                    await box.write(f"{target}/{file}" if into else target, data, mode=mode)

    async def _uv(self, box: Any, version: str | None, program: str, target: str) -> None:
        """The program of uv's image, which Harbor's own template copies: its wheel has the same one."""
        wheel = "uv" if version in (None, "latest") else f"uv=={version}"
        await self._run(
            box,
            f"python3 -m venv /tmp/uv && /tmp/uv/bin/pip install --quiet --no-cache-dir {wheel} "
            f"&& install -D /tmp/uv/bin{program} {shlex.quote(target)} && rm -rf /tmp/uv",
        )

    def _found(self, source: str) -> list[tuple[str, bytes, int | None]]:
        """Name, content and mode of files; of a folder an archive, and no mode."""
        context = self._folder.resolve()
        paths = [context] if source.strip("/") in ("", ".") else sorted(context.glob(source.lstrip("/")))
        inside = [path for path in paths if path.resolve().is_relative_to(context)]
        if not inside:
            raise SandboxRefused(f"there is no {source} in {context}")
        return [
            (path.name, archive_of(path), None)
            if path.is_dir()
            else (path.name, path.read_bytes(), path.stat().st_mode & 0o777)
            for path in inside
        ]


@cache
def _say(image: str) -> None:
    logger.info("FROM %s is replaced by the system of this machine, copied on write", image)


def instructions(folder: Path) -> Iterator[tuple[str, str]]:
    """The instructions of a folder's Dockerfile, in order. Raises InvalidRequest: there is no such file, or
    it has several stages or an instruction that is not known.
    """
    path = folder / DOCKERFILE
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}") from None
    joined = re.sub(r"\\[ \t]*\n(?:[ \t]*#.*\n)*", lambda end: " " + "\0" * end[0].count("\n"), text)
    stages = following = 0
    for line in joined.split("\n"):
        number, following = following + 1, following + 1 + line.count("\0")
        name, _, rest = line.replace("\0", "").strip().partition(" ")
        if not name or name.startswith("#"):
            continue
        name = name.upper()
        stages += name == "FROM"
        if stages > 1:
            raise InvalidRequest(f"{path}:{number}: several stages are not supported by this provider")
        if name not in _DOES | _IGNORED | {"FROM", "WORKDIR", "ENV", "USER", "ARG"}:
            raise InvalidRequest(f"{path}:{number}: {name} is not supported by this provider")
        yield name, rest.strip()


def _settings(steps: list[tuple[str, str]], spec: SandboxSpec) -> SandboxSpec:
    """The settings that instructions make, under those of the box's own."""
    workdir, user = "/", None
    env: dict[str, str] = {}
    arguments: dict[str, str] = {}
    for name, text in steps:
        value = _expanded(text, {**arguments, **env})
        if name == "WORKDIR":
            workdir = os.path.normpath(os.path.join(workdir, value))
        elif name == "USER":
            user = value.partition(":")[0]
        elif name in ("ENV", "ARG"):
            pairs = [word.partition("=") for word in shlex.split(value)]
            if name == "ENV" and not pairs[0][1]:  # the old form: ENV NAME value
                key, _, rest = value.partition(" ")
                pairs = [(key, "=", rest)]
            settings = {key: given for key, equals, given in pairs if equals}
            (env if name == "ENV" else arguments).update(settings)
    own = spec.model_fields_set
    return spec.model_copy(
        update={
            "workdir": spec.workdir if "workdir" in own else workdir,
            "env": {**env, **spec.env},
            "user": spec.user if spec.user is not None else user,
        }
    )


def _expanded(text: str, env: Mapping[str, str]) -> str:
    return string.Template(text).safe_substitute(env)


def _digest(folder: Path) -> str:
    digest = hashlib.sha256(b"1")  # of this format
    for path in sorted(folder.rglob("*")):
        digest.update(f"{path.relative_to(folder)}\0{path.lstat().st_mode}\0".encode())
        if path.is_file() and not path.is_symlink():
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        elif path.is_symlink():
            digest.update(os.readlink(path).encode())
    with suppress(OSError):  # what FROM is replaced by
        digest.update(Path("/etc/os-release").read_bytes())
    return digest.hexdigest()[:32]


def archive_of(source: Path | Mapping[str, str]) -> bytes:
    """A tar archive of a folder, or of texts by name; its files are root's. Raises InvalidRequest: a name
    leads out of the archive.
    """
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.GNU_FORMAT) as archive:
        if isinstance(source, Path):
            archive.add(source, arcname=".", filter=_of_root)
            return data.getvalue()
        for name, text in source.items():
            if name.startswith("/") or ".." in PurePosixPath(name).parts:
                raise InvalidRequest(f"a file's name must be below its folder, got {name!r}")
            member = tarfile.TarInfo(name)
            content = text.encode("utf-8", "surrogatepass")
            member.size, member.mode = len(content), 0o755 if content.startswith(b"#!") else 0o644
            archive.addfile(member, io.BytesIO(content))
    return data.getvalue()


def _of_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member

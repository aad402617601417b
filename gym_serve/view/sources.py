"""Which runs there are below the given paths, and their files as plain lines.

A run is its main file with the failures beside it. Its id is a digest of its path, so links to it stay.

An index needs to go to the middle of a file at once. Compressed files cannot do that in general, so they are
read by a decompressed copy in the cache, which follows the file as it grows.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gym_serve.rollouts.files import CORRUPT, split_name
from gym_serve.rollouts.journal import Outputs
from gym_serve.types.errors import BadRequest, InvalidRequest

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_BESIDE = ("_failures", "_materialized_inputs", "_comparisons", ".annotations")
"""What follows the name of a run in its other files."""
_CHUNK = 1 << 18
_DECODED = 1 << 20
_FREE, _RATIO, _MOST = 256 << 20, 200, 64 << 30
"""A file may become 256 MiB whatever its size, beyond that 200 times its size, and never more than 64 GiB."""


@dataclass(frozen=True)
class RunFiles:
    """The files of a run. ``id``: 12 hexadecimal digits, of the path; ``name``: what tells it from the other
    runs, for people; ``main``: the scored rollouts; it need not exist if there are failures; ``failures``:
    the failed attempts; it need not exist."""

    id: str
    name: str
    main: Path
    failures: Path


def find_runs(paths: Iterable[Path]) -> list[RunFiles]:
    """The runs of files and folders, by path. Folders are searched with all folders in them. Raises
    InvalidRequest: a path does not exist, or is a file of another kind."""
    mains: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            mains.update(dict.fromkeys(_in_folder(path)))
        elif path.is_file():
            if not path.name.endswith(_SUFFIXES):
                raise InvalidRequest(f"{path} must end in {', '.join(_SUFFIXES)}")
            mains[_main_of(path.resolve())] = None
        else:
            raise InvalidRequest(f"cannot read {path}: no such file or folder")
    common = Path(os.path.commonpath([main.parent for main in mains])) if mains else Path()
    return [
        RunFiles(
            hashlib.blake2b(os.fsencode(main), digest_size=6).hexdigest(),
            shown(main.relative_to(common)),
            main,
            beside(main, Outputs.of(main).failures),
        )
        for main in sorted(mains)
    ]


def open_regular(path: Path, *, follow: bool = False) -> int:
    """Open a regular file for reading; its descriptor. A pipe would hang its reader, and a device never ends.

    Args:
        follow: whether it may be a link.

    Raises:
        OSError: it cannot be opened, is a link, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file", str(path))


def shown(path: Path) -> str:
    """A path as text; a name may be any bytes."""
    return os.fsencode(path).decode(errors="replace")


def cache_folder() -> Path:
    """Where indices are kept: ``$XDG_CACHE_HOME/gym-serve/view``, by default below ``~/.cache``. Raises
    BadRequest: it cannot be made."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "gym-serve" / "view"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BadRequest(
            f"cannot make {folder} for the index: {error.strerror}; name another folder by XDG_CACHE_HOME"
        ) from error
    return folder


def _real(path: Path) -> Path:
    """What a link leads to. (`Path.resolve` raises where links form a loop.)"""
    return Path(os.path.realpath(path))


def _in_folder(folder: Path) -> Iterator[Path]:
    folder = folder.resolve()
    for at, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(at, name)
            own = _real(path).is_relative_to(folder)  # a link may lead anywhere
            if own and name.endswith(_SUFFIXES) and not name.startswith(".") and path.is_file():
                yield _main_of(path)


def _main_of(path: Path) -> Path:
    """The main file of the run that a file belongs to: itself, if that is not there."""
    stem, suffix = split_name(path)
    for ending in _BESIDE:
        if stem.endswith(ending) and len(stem) > len(ending):
            main = path.with_name(stem.removesuffix(ending) + suffix)
            if main.exists() or ending == "_failures":
                return main
    return path


def beside(main: Path, path: Path) -> Path:
    """A file beside another, where a link to it leads; where it leads elsewhere, one that is not there."""
    if not path.is_symlink():
        return path
    target = _real(path)
    return target if target.is_relative_to(main.parent.resolve()) else path.with_name(f".outside.{path.name}")


class Copy:
    """The decompressed copy of a file, which follows it. ``source``: a ``.gz`` or ``.zst`` file in any
    framing; ``read``/``written``: bytes of both up to the end of the last complete frame, from an earlier
    `Copy`; ``follow``: whether the file may be a link."""

    def __init__(
        self, source: Path, target: Path, read: int = 0, written: int = 0, *, follow: bool = False
    ) -> None:
        self.source = source
        self._follow = follow
        self.target = target
        self.read = read
        self.written = written
        self._at = read
        self._left = b""
        self._frame: Any = None
        with open(target, "ab") as file:
            file.truncate(written)

    def step(self) -> bool:
        """Decompress the next part; whether there was any. Raises OSError: a file cannot be read or written;
        ValueError: the file is damaged."""
        if not self._left:
            with open(open_regular(self.source, follow=self._follow), "rb") as file:
                file.seek(self._at)
                self._left = file.read(_CHUNK)
            self._at += len(self._left)
            if not self._left:
                return False
        with open(self.target, "ab") as out:
            try:
                self._check(out)
                while self._left or (self._frame is not None and self._more(self._frame)):
                    self._decode(out)
            except CORRUPT as error:
                raise ValueError(
                    f"{shown(self.source)} is damaged after {self.read:,} bytes: {error}"
                ) from error
        return True

    def _decode(self, out: BinaryIO) -> None:
        if self._frame is None:
            self._frame = self._new()
        frame = self._frame
        if isinstance(frame, zstd.ZstdDecompressor):
            out.write(frame.decompress(self._left, _DECODED))
            self._left = frame.unused_data if frame.eof else b""
        else:
            out.write(frame.decompress(self._left, _DECODED))
            self._left = frame.unused_data if frame.eof else frame.unconsumed_tail
        self._check(out)
        if frame.eof:
            self._frame = None
            self.read, self.written = self._at - len(self._left), out.tell()

    def _check(self, out: BinaryIO) -> None:
        if out.tell() > min(_MOST, max(_FREE, _RATIO * self._at)):
            raise ValueError(
                f"{shown(self.source)} is shown up to {out.tell() >> 20:,} MiB: {self._at:,} bytes of it "
                "become more than rollouts do. If you trust it, decompress it yourself"
            )

    def _more(self, frame: Any) -> bool:
        return isinstance(frame, zstd.ZstdDecompressor) and not frame.needs_input

    def _new(self) -> Any:
        return zstd.ZstdDecompressor() if self.source.suffix == ".zst" else zlib.decompressobj(wbits=31)

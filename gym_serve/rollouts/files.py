"""JSONL files: read, replaced at once, or appended to so that a crash costs at most the last line.

Files are plain, ``.gz`` or ``.zst``. One that is *appended to* holds one gzip member or zstd frame per line,
so a torn line can be cut off alone: when the file is next opened for appending. A damaged line anywhere else
is never repaired silently. A record is *acknowledged* when `RecordFile.append` returns: it survives the death
of this process, and after `RecordFile.sync` a power failure.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import gzip
import hashlib
import io
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

import orjson
from typing_extensions import Self

from gym_serve.servers.transport import encode
from gym_serve.types.errors import BadRequest, Conflict, GymError, InvalidRequest, Unavailable
from gym_serve.types.exact import exact_json
from gym_serve.types.requests import JSON

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

CORRUPT = (EOFError, gzip.BadGzipFile, zlib.error, zstd.ZstdError)
"""The exceptions that reading a damaged compressed file raises."""

MAX_ROW_BYTES = 256 << 20
"""The longest line of a file of rows or rollouts, in bytes without its newline. Readers and writers have the
same limit, so that nothing is written that cannot be read."""

_CHUNK = 16 * 1024  # small, because what follows a frame in its chunk is copied once per frame


@dataclass(frozen=True)
class Codec:
    """How lines are stored in a file that is appended to.

    ``frames`` are the complete frames of a file: where each ends, and its decoded bytes.
    """

    encode: Callable[[bytes], bytes]
    frames: Callable[[BinaryIO], Iterator[tuple[int, bytes]]]


def codec_of(path: Path) -> Codec:
    """The codec that the file's name asks for."""
    return _CODECS.get(path.suffix, _PLAIN)


def open_decompressed(path: Path) -> BinaryIO:
    """Open a file for reading, decompressed if its name says that it is compressed. Damaged contents raise
    one of `CORRUPT` on reading."""
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if path.suffix == ".zst":
        # `ZstdFile` takes an empty file, to which nothing was appended yet, for a torn one.
        return cast(BinaryIO, zstd.open(path)) if path.stat().st_size else io.BytesIO()
    return open(path, "rb")


@contextmanager
def compressed(file: BinaryIO, path: Path) -> Iterator[BinaryIO]:
    """A file to write into, whose contents go to ``file`` as the name of ``path`` asks for."""
    if path.suffix == ".gz":
        with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as compressing:
            yield cast(BinaryIO, compressing)
    elif path.suffix == ".zst":
        with zstd.ZstdFile(file, "wb") as compressing:
            yield cast(BinaryIO, compressing)
    else:
        yield file


@contextmanager
def regular(path: Path) -> Iterator[Path]:
    """A file that can be read again and again: the given one, or a copy of what comes out of a pipe. A
    `GymError` raised meanwhile names the pipe in the copy's place."""
    if not path.exists() or path.is_file() or path.is_dir():
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="rows-", suffix=".jsonl") as copy:
        with path.open("rb") as pipe:
            shutil.copyfileobj(pipe, copy)
        copy.flush()
        try:
            yield Path(copy.name)
        except GymError as error:
            error.message = error.message.replace(copy.name, str(path))
            raise


def split_name(path: Path) -> tuple[str, str]:
    """Stem and suffix of a JSONL file: ``out.jsonl.gz`` -> ``("out", ".jsonl.gz")``."""
    compression = path.suffix if path.suffix in _CODECS else ""
    name = path.name.removesuffix(compression)
    suffix = next((s for s in (".jsonl", ".json") if name.endswith(s)), "")
    return name.removesuffix(suffix), f".jsonl{compression}"


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    end = 0
    for line in file:
        if not line.endswith(b"\n"):
            return
        end += len(line)
        yield end, line


def _members(new: Callable[[], Any]) -> Callable[[BinaryIO], Iterator[tuple[int, bytes]]]:
    def frames(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        end = 0
        chunk = b""
        while True:
            member = new()
            decoded = []
            while (chunk := chunk or file.read(_CHUNK)) and not member.eof:
                decoded.append(member.decompress(chunk))
                end += len(chunk)
                chunk = b""
                if member.eof:
                    chunk = member.unused_data
                    end -= len(chunk)
                    break
            if not member.eof:
                return
            yield end, b"".join(decoded)

    return frames


_PLAIN = Codec(lambda line: line, _lines)
_CODECS = {
    ".gz": Codec(partial(gzip.compress, compresslevel=6, mtime=0), _members(partial(zlib.decompressobj, 31))),
    ".zst": Codec(zstd.compress, _members(zstd.ZstdDecompressor)),
}


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an `OSError` of writing ``path`` into `Unavailable` (no space is left) or `BadRequest`."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise Unavailable(
                f"no space left for {path} ({error.strerror}). Free some space, then run the command again; "
                "a run that has begun goes on with --resume, and has lost nothing that it reported"
            ) from error
        check_folder(path)
        raise BadRequest(f"cannot write {path}: {error.strerror or error}") from error


def check_folder(path: Path) -> None:
    """Raise `BadRequest` if a file's folder does not exist. It is not made, as its name may be misspelt."""
    if not path.parent.is_dir():
        raise BadRequest(f"cannot write {path}: folder {path.parent} does not exist; create it first")


def lock(file: BinaryIO, path: Path) -> None:
    """Make this process the only writer of a run, until ``file`` is closed. Raises `Conflict` or
    `BadRequest`."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise BadRequest(f"cannot lock {path}: {error.strerror}") from error
        raise Conflict(f"{path} is being written by another process; write to another file") from None


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Replace a file atomically: whenever the process dies, either the old or the new file is there.

    The contents are compressed if the name says so. Raises as `writing` does.
    """
    partial = path.with_name(f".partial.{path.name}")
    with writing(path):
        try:
            with open(partial, "wb") as raw:
                with compressed(raw, path) as file:
                    yield file
                raw.flush()
                os.fsync(raw.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make new names in a directory survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_records(path: Path, records: Iterable[JSON]) -> Iterator[None]:
    """Replace a file of records, in steps of one; it appears when it is complete."""
    partial_file = path.with_name(f".partial.{path.name}")
    try:
        with RecordFile(partial_file) as file:
            file.clear()
            for record in records:
                file.append(record)
                yield
            file.sync()
        with writing(path):
            os.replace(partial_file, path)
            sync_directory(path.parent)
    except BaseException:
        partial_file.unlink(missing_ok=True)  # where no space is left, it takes some
        raise


def fingerprint(path: Path) -> JSON:
    """The length and a digest of a file, as it is stored. Raises `InvalidRequest` if it cannot be read."""
    try:
        with open(path, "rb") as file:
            digest = hashlib.blake2b(digest_size=16)
            while chunk := file.read(1 << 20):
                digest.update(chunk)
            return {"bytes": file.tell(), "digest": digest.hexdigest()}
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error


def readable_line(record: JSON, spare: int = 0) -> bytes:
    """A record as a line that every reader of such files accepts, with ``spare`` bytes left free for keys.
    Raises `ValueError` if it is longer than `MAX_ROW_BYTES` or nested too deeply, `TypeError` if no JSON."""
    try:
        line = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:
        line = encode(record) + b"\n"
        exact_json(line)  # what the standard library writes is not always what can be read
    if len(line) - 1 > (allowed := MAX_ROW_BYTES - spare):
        raise ValueError(f"the line must have at most {allowed:,} bytes, got {len(line):,}")
    return line


def read_records(path: Path) -> Iterator[JSON]:
    """The complete records of a file, also while another process appends; none if the file does not exist.
    Raises `Conflict`: the file is damaged before its end."""
    return (record for _, record in _complete(path))


class RecordFile:
    """A file of records, open for appending. Raises `Conflict` if another process is writing it, and
    `BadRequest` if it cannot be written."""

    def __init__(self, path: Path, *, exclusive: bool = False, spare: int = 0) -> None:
        self.path = path
        self._spare = spare
        self._codec = codec_of(path)
        with writing(path):
            if path.exists() and not path.is_dir() and not path.is_file():  # opening a pipe would hang
                raise BadRequest(f"cannot write {path}: it must be a regular file")
            # Unbuffered: a record is written by one call, and nothing is lost inside this process.
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        if exclusive:
            try:
                lock(self._file, path)
            except BaseException:
                self._file.close()
                raise
        self._end = self._file.seek(0, os.SEEK_END)
        self._synced = self._end

    @property
    def size(self) -> int:
        return self._end

    def recover(self) -> Iterator[JSON]:
        """The records of the file; when all have been read, a torn last line is cut off."""
        complete = 0
        for end, record in _complete(self.path):
            complete = end
            yield record
        self._cut(complete)

    def append(self, record: JSON) -> None:
        """Add a record. Raises what `readable_line` does, and `Unavailable` where no space is left: the file
        then ends with the previous record."""
        self.append_line(readable_line(record, self._spare))

    def append_line(self, line: bytes) -> None:
        """Add a record, as `readable_line` makes it."""
        data = memoryview(self._codec.encode(line))
        written = 0
        try:
            with writing(self.path):
                while written < len(data):
                    written += self._file.write(data[written:])
        except BaseException:
            self._cut(self._end)
            raise
        self._end += written

    def clear(self) -> None:
        self._cut(0)

    def sync(self) -> None:
        """Wait until everything that was appended is on the disk."""
        if self._synced != (end := self._end):
            with writing(self.path):
                os.fsync(self._file.fileno())
            self._synced = end

    def check(self) -> None:
        """Raise `Conflict` if the file was deleted, replaced, or changed by another program."""
        own = os.fstat(self._file.fileno())
        try:
            there = os.stat(self.path)
        except OSError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino):
            change = "deleted" if there is None else "replaced"
            raise Conflict(f"{self.path} was {change} while this run wrote it")
        if own.st_size != self._end:
            raise Conflict(f"{self.path} was changed by another program while this run wrote it")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _cut(self, end: int) -> None:
        if os.fstat(self._file.fileno()).st_size != end:
            with writing(self.path):
                self._file.truncate(end)
        self._end = end
        self._synced = -1


def _complete(path: Path) -> Iterator[tuple[int, JSON]]:
    try:
        file = open(path, "rb")  # noqa: SIM115
    except FileNotFoundError:
        return
    except OSError as error:
        raise BadRequest(f"cannot read {path}: {error.strerror}") from error
    with file:
        count = end = 0
        try:
            for frame_end, line in codec_of(path).frames(file):
                record = exact_json(line)
                if not isinstance(record, dict):
                    raise ValueError(f"a rollout must be a JSON object, got a {type(record).__name__}")
                count, end = count + 1, frame_end
                yield end, record
        except (*CORRUPT, ValueError) as error:
            raise Conflict(
                f"{path}:{count + 1} is damaged, {end} bytes from the start: {error}. Repair or move the file"
            ) from error


_STEPS_PER_CALL = 500  # steps between two chances to be cancelled


async def run_in_threads(steps: Generator[None, None, None]) -> None:
    """Run a long generator in worker threads; it is closed after its current steps where the task is
    cancelled."""

    def some() -> bool:
        return sum(1 for _ in islice(steps, _STEPS_PER_CALL)) == _STEPS_PER_CALL

    with closing(steps):
        more = True
        while more:
            running = asyncio.ensure_future(asyncio.to_thread(some))
            try:
                more = await asyncio.shield(running)
            except asyncio.CancelledError:
                await asyncio.wait([running])  # a generator that runs cannot be closed
                raise

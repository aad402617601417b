"""`RecordFile`: JSON lines, appended one by one, so that a crash at any instant costs at most the last.

A record is *acknowledged* when `append` returns: it is with the operating system then, and survives the
death of this process. `sync` makes it survive a power failure too. A write that fails half way is taken back,
and a last line that a crash has torn is cut off when the file is next opened for appending; a damaged
line anywhere else is no accident of ours, and is never repaired silently.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import orjson
from typing_extensions import Self

from gym_serve.rollouts.compression import CORRUPT, codec_of
from gym_serve.rollouts.outputs import lock, writing
from gym_serve.rollouts.rows import MAX_ROW_BYTES
from gym_serve.servers.transport import encode
from gym_serve.types.errors import BadRequest, Conflict
from gym_serve.types.exact import any_json
from gym_serve.types.requests import JSON

__all__ = ["RecordFile", "read_records", "readable_line"]


def readable_line(record: JSON, spare: int = 0) -> bytes:
    """A record as a line that everything takes which reads such files.

    Args:
        record: the record.
        spare: bytes that have to be left, for what is added to it later.

    Raises:
        ValueError: there is none: it is longer than `MAX_ROW_BYTES`, or nested too deeply.
        TypeError: it is no JSON.
    """
    try:
        line = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:
        line = encode(record) + b"\n"
        any_json(line)  # what the standard library writes is not always what can be read
    if len(line) - 1 > (allowed := MAX_ROW_BYTES - spare):
        raise ValueError(f"{len(line):,} bytes, where a line has at most {allowed:,}")
    return line


def read_records(path: Path) -> Iterator[JSON]:
    """The complete records of a file, also while another process appends; none if there is no file.

    Raises:
        Conflict: the file is damaged before its end.
    """
    for _, record in _complete(path):
        yield record


class RecordFile:
    """A file of records, open for appending.

    Args:
        path: the file; created if it does not exist, in a folder that does.
        exclusive: whether to be its only writer; see `lock`.
        spare: see `readable_line`.

    Raises:
        Conflict: it has another writer.
        BadRequest: it cannot be written.
    """

    def __init__(self, path: Path, *, exclusive: bool = False, spare: int = 0) -> None:
        self.path = path
        self._spare = spare
        self._codec = codec_of(path)
        with writing(path):
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
        """Its length in bytes."""
        return self._end

    def recover(self) -> Iterator[JSON]:
        """The records that are in the file; a torn last one is cut off once all of them are taken."""
        complete = 0
        for end, record in _complete(self.path):
            complete = end
            yield record
        self._cut(complete)

    def append(self, record: JSON) -> None:
        """Add a record.

        Raises:
            TypeError, ValueError: see `readable_line`.
            Unavailable: no space is left. The file ends with the record before.
        """
        data = memoryview(self._codec.encode(readable_line(record, self._spare)))
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
        """Remove all records."""
        self._cut(0)

    def sync(self) -> None:
        """Wait until everything that was appended is on the disk."""
        if self._synced != (end := self._end):
            with writing(self.path):
                os.fsync(self._file.fileno())
            self._synced = end

    def check(self) -> None:
        """Check that the path still leads to this file, and that nobody else has written it.

        Raises:
            Conflict: it does not: what was appended is lost, or another program's output stands in between.
        """
        own = os.fstat(self._file.fileno())
        try:
            there = os.stat(self.path)
        except OSError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino):
            raise Conflict(
                f"{self.path} was {'deleted' if there is None else 'replaced'} while this run wrote it"
            )
        if own.st_size != self._end:
            raise Conflict(f"{self.path} was changed by another program while this run wrote it")

    def close(self) -> None:
        """Close it, and give up the lock."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _cut(self, end: int) -> None:
        if os.fstat(self._file.fileno()).st_size != end:
            with writing(self.path):
                self._file.truncate(end)
        self._end = end
        self._synced = -1


def _complete(path: Path) -> Iterator[tuple[int, JSON]]:
    """The complete records, each with the offset where it ends."""
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
                record = any_json(line)
                if not isinstance(record, dict):
                    raise ValueError(f"a {type(record).__name__} instead of a rollout")
                count, end = count + 1, frame_end
                yield end, record
        except (*CORRUPT, ValueError) as error:
            raise Conflict(
                f"{path}:{count + 1} is damaged, {end} bytes from the start: {error}; repair or move the file"
            ) from error

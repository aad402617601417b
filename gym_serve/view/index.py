"""The index of a run: SQLite, written by one process and read by any number meanwhile.

`Indexer` goes through the lines of a run and keeps the facts of each rollout, where its line is, and its
words for full-text search (`gym_serve.view.tables`). It follows files that grow; a file that was replaced or
cut is indexed anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import sqlite3
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from gym_serve.rollouts.files import MAX_ROW_BYTES
from gym_serve.view.facts import Facts, facts_of
from gym_serve.view.sources import Copy, RunFiles, cache_folder, open_regular, shown
from gym_serve.view.tables import FAILURES, IndexedLine, Tables

_BATCH = 2000  # rollouts
_BATCH_SECONDS = 0.5
_ENDS = 4096  # bytes at both ends of what was read, by which a replaced file is told


@dataclass
class _Position:
    """How far a file has been read, and what it was; kept in the index."""

    offset: int = 0
    line: int = 0
    copied: tuple[int, int] = (0, 0)
    """Bytes of a compressed file and of its copy."""
    device: int = 0
    inode: int = 0
    head: str = ""
    tail: str = ""

    def of_another_file(self, path: Path, *, compressed: bool) -> bool:
        """Whether the file is no longer the one of which the beginning was read."""
        if not self.offset and not self.copied[0]:
            return False
        try:
            status = path.stat()
        except FileNotFoundError:
            return True
        least = self.copied[0] if compressed else self.offset
        if (status.st_dev, status.st_ino) != (self.device, self.inode) or status.st_size < least:
            return True
        return (self.head, self.tail) != _ends(path, least)


class _Lines:
    def __init__(self, key: str, path: Path, folder: Path, tables: Tables) -> None:
        self.key = key
        self.path = path
        self.at = _Position()
        self.unfinished = 0
        """Bytes of a last line that has no end yet, and is no rollout so far."""
        self._first = 0 if key == "main" else FAILURES
        self._tables = tables
        self.compressed = path.suffix in (".gz", ".zst")
        self._copy: Copy | None = None
        self._size_read = -1
        self.plain = folder / f"{key}.jsonl" if self.compressed else path
        """The file, or its decompressed copy."""

    def index_until(self, ends: float) -> bool:
        """Index lines until the time is over; whether there may be more."""
        problem: Exception | None = None
        copied = False
        try:
            status = self.path.stat()
            self.at.device, self.at.inode = status.st_dev, status.st_ino
            copied = self.compressed and self._decompress(ends)
        except FileNotFoundError:
            return False
        except (OSError, ValueError) as error:
            problem = error
        try:
            more = self._index_plain(ends)
        except OSError as error:
            raise OSError(f"cannot read {shown(self.path)}: {error.strerror}") from error
        if problem is not None and not more:
            raise problem
        return more or copied

    def _decompress(self, ends: float) -> bool:
        follow = self.key == "main"
        copy = self._copy = self._copy or Copy(self.path, self.plain, *self.at.copied, follow=follow)
        try:
            while more := copy.step():
                if time.monotonic() > ends:
                    break
        finally:
            self.at.copied = (copy.read, copy.written)
            self.at.head, self.at.tail = _ends(self.path, copy.read)
        return more

    def _index_plain(self, ends: float) -> bool:
        size = _size(self.plain)
        if size == self._size_read or not self.plain.exists():
            return False
        more = True
        with open(open_regular(self.plain, follow=self.key == "main"), "rb") as file:
            file.seek(self.at.offset)
            while more and time.monotonic() < ends:
                more = self._index_batch(file, ends)
        if not self.compressed:
            self.at.head, self.at.tail = _ends(self.path, self.at.offset)
        self._size_read = -1 if more else size
        return more

    def _index_batch(self, file: BinaryIO, ends: float) -> bool:
        batch: list[IndexedLine] = []
        try:
            while len(batch) < _BATCH and time.monotonic() < ends:
                if not self._read_line(file, batch):
                    return False
            return True
        finally:
            self._tables.add(batch)

    def _read_line(self, file: BinaryIO, batch: list[IndexedLine]) -> bool:
        """Read the next line; False at the end of the file, and before a last line that is not finished."""
        line = file.readline(MAX_ROW_BYTES + 1)
        size, self.unfinished = len(line), 0
        if not line:
            return False
        facts, problem = None, None
        if size > MAX_ROW_BYTES and not line.endswith(b"\n"):
            problem = f"it is longer than {MAX_ROW_BYTES >> 20} MiB"
            while (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):
                size += len(rest)
            size += len(rest)
        elif line.strip():
            facts, problem = _read_facts(line)
            if problem and not line.endswith(b"\n"):
                self.unfinished = size
                return False
        if problem is not None:
            self._tables.add_problem(shown(Path(self.path.name)), self.at.line + 1, problem)
        if facts is not None:
            batch.append(IndexedLine(self._first + self.at.line, self.at.offset, size, facts))
        self.at.line += 1
        self.at.offset += size
        return True


class Indexer:
    """Writes the index of a run, as long as no other process does."""

    def __init__(self, files: RunFiles, cache: Path | None = None) -> None:
        self.files = files
        self.folder = (cache or cache_folder()) / files.id
        self._lock: BinaryIO | None = None
        self._tables: Tables | None = None
        self._lines: list[_Lines] = []

    def become_writer(self) -> bool:
        """Become the only writer of this index, if nobody is; whether that is so."""
        if self._tables is not None:
            return True
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = open(self.folder / "lock", "wb")  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            return False
        self._lock = file
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        return True

    def index_for(self, seconds: float = _BATCH_SECONDS) -> bool:
        """Index for about some seconds; whether there may be more to index at once."""
        if not self.become_writer():
            return False
        tables = self._tables
        assert tables is not None
        if any(lines.at.of_another_file(lines.path, compressed=lines.compressed) for lines in self._lines):
            tables.clear()
            self._lines = self._from_the_beginning(tables)
        ends = time.monotonic() + seconds
        more, error = False, None
        for lines in reversed(self._lines):  # failures first: they are few
            try:
                more = lines.index_until(ends) or more
            except (OSError, ValueError) as problem:  # what came before the damage is shown
                error = str(problem)
        tables.commit(
            {
                **{lines.key: orjson.dumps(asdict(lines.at)) for lines in self._lines},
                "problems": tables.problems,
                "done": not more,
                "unfinished": sum(lines.unfinished for lines in self._lines),
                "error": error,
                "bytes": sum(_size(lines.plain) for lines in self._lines),
                "indexed": sum(lines.at.offset for lines in self._lines),
            }
        )
        return more

    def close(self) -> None:
        if self._tables is not None:
            self._tables.close()
            self._tables = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _open(self) -> None:
        try:
            self._tables = tables = Tables(database_of(self.folder), self.files.main)
        except sqlite3.DatabaseError:  # of another format, or damaged by a power failure
            for path in self.folder.glob("index.sqlite*"):
                path.unlink()
            self._tables = tables = Tables(database_of(self.folder), self.files.main)
        self._lines = self._from_the_beginning(tables)
        state = tables.state()
        for lines in self._lines:
            kept: dict[str, Any] = orjson.loads(state.get(lines.key, b"{}"))
            lines.at = _Position(**kept | {"copied": tuple(kept.get("copied", (0, 0)))})

    def _from_the_beginning(self, tables: Tables) -> list[_Lines]:
        paths = {"main": self.files.main, "failures": self.files.failures}
        return [_Lines(key, path, self.folder, tables) for key, path in paths.items()]


def database_of(folder: Path) -> Path:
    """The index in its folder of the cache."""
    return folder / "index.sqlite"


def index_run(files: RunFiles, cache: Path | None = None) -> None:
    """Index all that is there of a run now. If another process does, wait until it has."""
    indexer = Indexer(files, cache)
    try:
        while not indexer.become_writer():
            time.sleep(0.05)
        while indexer.index_for(5.0):
            pass
    finally:
        indexer.close()


def drop_stale(cache: Path) -> None:
    """Remove the indices of files that are gone."""
    folders = cache.iterdir() if cache.is_dir() else ()
    for folder in (folder for folder in folders if re.fullmatch("[0-9a-f]{12}", folder.name)):
        try:
            database = sqlite3.connect(f"file:{database_of(folder)}?mode=ro", uri=True)
            try:
                row = database.execute("SELECT value FROM state WHERE key = 'path'").fetchone()
            finally:
                database.close()
        except sqlite3.DatabaseError:
            continue
        if row and not Path(os.fsdecode(row[0])).parent.exists():
            shutil.rmtree(folder, ignore_errors=True)


def _read_facts(line: bytes) -> tuple[Facts | None, str | None]:
    try:
        return facts_of(line), None
    except ValueError as error:
        return None, str(error)
    except Exception as error:  # whatever a line holds, the next one is indexed
        return None, f"it cannot be indexed: {error!r}"


def _ends(path: Path, length: int) -> tuple[str, str]:
    """Digests of the first bytes of a file, and of the last ones before ``length``."""
    descriptor = open_regular(path, follow=True)
    try:
        head = os.pread(descriptor, min(_ENDS, length), 0)
        tail = os.pread(descriptor, min(_ENDS, length), max(0, length - _ENDS))
    finally:
        os.close(descriptor)
    return tuple(hashlib.blake2b(part, digest_size=8).hexdigest() for part in (head, tail))  # type: ignore[return-value]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0

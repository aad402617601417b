"""The index of a run: SQLite, written by one process and read by any number meanwhile.

`Indexer` goes through the lines of a run and keeps the facts of each rollout, where its line is, and its
words for full-text search. It follows a file that grows; a file that was replaced or cut is indexed anew.

- ``rollouts`` is narrow, because filters and sorts go through all of it. The verifier's fields and the row's
  keys are columns ``f0``, ``f1``, ... of it, and ``fields`` has their names. ``tools`` has each name between
  newlines.
  Likewise ``u0``, ``u1``, ... are what its calls of a model server used, and ``models`` has the names.
  Rollouts that are equal in what facets count are of one ``kind``, because small numbers are grouped fast.
- ``details`` has what only a page of the table shows.
- ``words`` finds texts and holds none: the file has them.
- ``state`` says how far the files have been read, and what they were.

A rollout's number is its line in the main file, from 0; failures count from `FAILURES`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from gym_serve.rollouts.files import MAX_ROW_BYTES
from gym_serve.view.facts import Facts, Usage, facts_of
from gym_serve.view.sources import Copy, RunFiles, cache_folder, open_regular, shown

FAILURES = 10**9
"""Number of the first failed attempt."""
KEPT_PROBLEMS = 1000
FORMAT = 5
"""Of the tables: another number makes all indices anew."""

MOST_MODELS = 16
"""The most model servers of which the index has the usage; a run with more has no cost."""

MOST_OWN = 200
"""The most fields of the verifier and keys of the row in the index."""

_UNUSED = (None,) * len(Usage._fields)
_BATCH = 2000  # rollouts
_BATCH_SECONDS = 0.5
_ENDS = 4096  # bytes at both ends of what was read, by which a replaced file is told
_COLUMNS = (
    *("n", "start", "size", "task", "attempt", "agent", "environment", "reward", "failure", "turns", "tools"),
    *("input_tokens", "output_tokens", "seconds", "version", "last_version"),
    *("behind", "at", "kind"),
)
_KIND = ("agent", "environment", "failure", "version", "last_version", "tools")
_TABLES = f"""
CREATE TABLE rollouts ({", ".join(_COLUMNS).replace("n,", "n INTEGER PRIMARY KEY,", 1)});
CREATE INDEX by_task ON rollouts (task);
CREATE TABLE details (n INTEGER PRIMARY KEY, id TEXT, prompt TEXT, prompt_digest INTEGER);
CREATE VIRTUAL TABLE words USING fts5(text, content='', detail=none, columnsize=0);
CREATE TABLE fields (name TEXT PRIMARY KEY, number INTEGER, numeric INTEGER);
CREATE TABLE kinds (number INTEGER PRIMARY KEY, {", ".join(_KIND)});
CREATE TABLE models (name TEXT PRIMARY KEY, number INTEGER);
CREATE TABLE problems (file TEXT, line INTEGER, message TEXT);
CREATE TABLE state (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
"""


@dataclass
class _Feed:
    """One file of a run, and how far it has been read."""

    key: str
    path: Path
    first: int
    offset: int = 0
    line: int = 0
    copied: tuple[int, int] = (0, 0)
    device: int = 0
    inode: int = 0
    head: str = ""
    tail: str = ""
    copy: Copy | None = None
    torn: int = 0
    seen: int = -1

    @property
    def compressed(self) -> bool:
        return self.path.suffix in (".gz", ".zst")

    def saved(self) -> dict[str, Any]:
        at = (self.copy.read, self.copy.written) if self.copy is not None else self.copied
        return {
            "offset": self.offset,
            "line": self.line,
            "copied": at,
            "device": self.device,
            "inode": self.inode,
            "head": self.head,
            "tail": self.tail,
        }


class Indexer:
    """Writes the index of a run, as long as no other process does.

    Args:
        files: the run.
        cache: where indices are kept.
    """

    def __init__(self, files: RunFiles, cache: Path | None = None) -> None:
        self.files = files
        self.folder = (cache or cache_folder()) / files.id
        self._lock: BinaryIO | None = None
        self._database: sqlite3.Connection | None = None
        self._feeds: list[_Feed] = []
        self._fields: dict[str, tuple[int, bool]] = {}
        self._models: dict[str, int] = {}
        self._kinds: dict[tuple[Any, ...], int] = {}
        self._newest: int | None = None
        self._problems = 0
        self._error: str | None = None

    def own(self) -> bool:
        """Become the only writer of this index, if nobody is; whether that is so."""
        if self._lock is not None:
            return True
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = open(self.folder / "lock", "wb")  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            return False
        self._lock = file
        self._open()
        return True

    def step(self, seconds: float = _BATCH_SECONDS) -> bool:
        """Index for about some seconds; whether there may be more to index at once."""
        if not self.own():
            return False
        if any(self._replaced(feed) for feed in self._feeds):
            self._reset()
        ends = time.monotonic() + seconds
        more = False
        self._error = None
        for feed in reversed(self._feeds):  # failures first: they are few
            more = self._read(feed, ends) or more
        self._save(more)
        return more

    def close(self) -> None:
        """Let another process write."""
        if self._database is not None:
            self._database.close()
            self._database = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _open(self) -> None:
        try:
            self._load()
        except sqlite3.DatabaseError:  # of another format, or damaged by a power failure
            if self._database is not None:
                self._database.close()
            for path in self.folder.glob("index.sqlite*"):
                path.unlink()
            self._load()

    def _load(self) -> None:
        database = sqlite3.connect(database_of(self.folder), isolation_level=None)
        self._database = database
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("PRAGMA cache_size = -65536")
        self._feeds = self._fresh()
        if not database.execute("SELECT 1 FROM sqlite_master").fetchone():
            self._create()
        state = dict(database.execute("SELECT key, value FROM state"))
        if state.get("format") != FORMAT:
            raise sqlite3.DatabaseError("it is of another version")
        for feed in self._feeds:
            for key, value in orjson.loads(state.get(feed.key, b"{}")).items():
                setattr(feed, key, tuple(value) if key == "copied" else value)
        self._problems = state.get("problems", 0)
        found = database.execute("SELECT name, number, numeric FROM fields")
        self._fields = {name: (number, bool(numeric)) for name, number, numeric in found}
        self._models = dict(database.execute("SELECT name, number FROM models"))
        self._kinds = {tuple(kind): number for number, *kind in database.execute("SELECT * FROM kinds")}
        query = "SELECT max(last_version) FROM rollouts WHERE typeof(last_version) = 'integer' AND n < ?"
        self._newest = database.execute(query, (FAILURES,)).fetchone()[0]

    def _fresh(self) -> list[_Feed]:
        return [
            _Feed("main", self.files.main, 0),
            _Feed("failures", self.files.failures, FAILURES),
        ]

    def _create(self) -> None:
        database = self._connected
        database.executescript("BEGIN;" + _TABLES)
        database.execute("INSERT INTO state VALUES ('format', ?)", (FORMAT,))
        database.execute("INSERT INTO state VALUES ('path', ?)", (os.fsencode(self.files.main),))
        database.execute("COMMIT")

    @property
    def _connected(self) -> sqlite3.Connection:
        assert self._database is not None
        return self._database

    def _replaced(self, feed: _Feed) -> bool:
        """Whether the file is no longer the one of which the beginning was read."""
        if not feed.offset and not feed.copied[0]:
            return False
        try:
            found = feed.path.stat()
        except FileNotFoundError:
            return True
        least = feed.copied[0] if feed.compressed else feed.offset
        if (found.st_dev, found.st_ino) != (feed.device, feed.inode) or found.st_size < least:
            return True
        return (feed.head, feed.tail) != _ends(feed.path, least)

    def _reset(self) -> None:
        database = self._connected
        names = ("rollouts", "details", "words", "fields", "models", "kinds", "problems", "state")
        epoch = dict(database.execute("SELECT key, value FROM state")).get("epoch", 0)
        database.executescript("BEGIN;" + "".join(f"DROP TABLE {name};" for name in names) + _TABLES)
        database.execute("INSERT INTO state VALUES ('format', ?), ('epoch', ?)", (FORMAT, epoch + 1))
        database.execute("INSERT INTO state VALUES ('path', ?)", (os.fsencode(self.files.main),))
        database.execute("COMMIT")
        self._feeds, self._fields, self._problems = self._fresh(), {}, 0
        self._models, self._kinds, self._newest = {}, {}, None

    def _read(self, feed: _Feed, ends: float) -> bool:
        """Index lines until the time is over; whether there may be more."""
        copied = False
        try:
            found = feed.path.stat()
            feed.device, feed.inode = found.st_dev, found.st_ino
            copied = feed.compressed and self._decompress(feed, ends)
        except FileNotFoundError:
            return False
        except (OSError, ValueError) as error:  # what came before the damage is shown
            self._error = str(error)
        try:
            return self._read_lines(feed, ends) or copied
        except OSError as error:
            self._error = f"cannot read {shown(feed.path)}: {error.strerror}"
            return False

    def _read_lines(self, feed: _Feed, ends: float) -> bool:
        path = self.plain(feed)
        if not path.exists():
            return False
        size = path.stat().st_size
        if size == feed.seen:
            return False
        more = True
        with open(open_regular(path, follow=feed.key == "main"), "rb") as file:
            file.seek(feed.offset)
            while more and time.monotonic() < ends:
                more = self._batch(feed, file, ends)
        if not feed.compressed:
            feed.head, feed.tail = _ends(feed.path, feed.offset)
        feed.seen = -1 if more else size
        return more

    def _batch(self, feed: _Feed, file: BinaryIO, ends: float) -> bool:
        """Index some lines; whether there are more."""
        batch: list[tuple[int, int, int, Facts]] = []
        try:
            while len(batch) < _BATCH and time.monotonic() < ends:
                found = self._next(feed, file)
                if found is None:
                    return False
                batch.extend(found)
            return True
        finally:
            self._write(batch)

    def plain(self, feed: _Feed) -> Path:
        """The file, or its decompressed copy."""
        return self.folder / f"{feed.key}.jsonl" if feed.compressed else feed.path

    def _decompress(self, feed: _Feed, ends: float) -> bool:
        if feed.copy is None:
            feed.copy = Copy(
                feed.path, self.folder / f"{feed.key}.jsonl", *feed.copied, follow=feed.key == "main"
            )
        copy = feed.copy
        try:
            while more := copy.step():
                if time.monotonic() > ends:
                    break
        finally:
            feed.copied = (copy.read, copy.written)
            feed.head, feed.tail = _ends(feed.path, copy.read)
        return more

    def _next(self, feed: _Feed, file: BinaryIO) -> list[tuple[int, int, int, Facts]] | None:
        """The next line, if it holds a rollout; None at the end of the file, and before a torn line."""
        start = feed.offset
        line = file.readline(MAX_ROW_BYTES + 1)
        feed.torn = 0
        if not line:
            return None
        problem: str | None = None
        facts: Facts | None = None
        size = len(line)
        if size > MAX_ROW_BYTES and not line.endswith(b"\n"):
            line = b""
            rest = file.readline(1 << 20)
            size += len(rest)
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(1 << 20)
                size += len(rest)
            problem = f"it is longer than {MAX_ROW_BYTES >> 20} MiB"
        elif line.strip():
            try:
                facts = facts_of(line)
            except ValueError as error:
                problem = str(error)
            except Exception as error:  # whatever a line holds, the next one is indexed
                problem = f"it cannot be indexed: {error!r}"
            if problem and not line.endswith(b"\n"):
                feed.torn = size
                return None
        number = feed.line
        feed.line += 1
        feed.offset = start + size
        if problem is not None:
            self._problem(feed, number, problem)
        if facts is None:
            return []
        return [(feed.first + number, start, size, facts)]

    def _problem(self, feed: _Feed, line: int, message: str) -> None:
        self._problems += 1
        if self._problems <= KEPT_PROBLEMS:
            self._begin()
            values = (shown(Path(feed.path.name)), line + 1, message[:300])
            self._connected.execute("INSERT INTO problems VALUES (?, ?, ?)", values)

    def _begin(self) -> None:
        if not self._connected.in_transaction:
            self._connected.execute("BEGIN")

    def _write(self, batch: list[tuple[int, int, int, Facts]]) -> None:
        if not batch:
            return
        self._begin()
        database = self._connected
        for _, _, _, facts in batch:
            for name, value in facts.own.items():
                self._learn(name, not isinstance(value, str))
            for name in facts.usage:
                self._meet(name)
        own = [name for name, (number, _) in sorted(self._fields.items(), key=lambda pair: pair[1][0])]
        models = list(self._models)
        names = [
            *_COLUMNS,
            *(f"f{self._fields[name][0]}" for name in own),
            *(column for name in models for column in usage_columns(self._models[name])),
        ]
        marks = ", ".join("?" * len(names))
        database.executemany(
            f"INSERT OR REPLACE INTO rollouts ({', '.join(names)}) VALUES ({marks})",
            [
                (
                    *(
                        n,
                        start,
                        size,
                        f.task,
                        f.attempt,
                        f.agent,
                        f.environment,
                        f.reward,
                        f.failure,
                        f.turns,
                    ),
                    _tools(f),
                    *(f.input_tokens, f.output_tokens, f.seconds, f.version, f.last_version),
                    *(self._behind(n, f), f.at, self._kind(f)),
                    *(f.own.get(name) for name in own),
                    *(count for name in models for count in f.usage.get(name, _UNUSED)),
                )
                for n, start, size, f in batch
            ],
        )
        database.executemany(
            "INSERT OR REPLACE INTO details VALUES (?, ?, ?, ?)",
            [(n, f.id, f.prompt, f.prompt_digest) for n, _, _, f in batch],
        )
        database.executemany(
            "INSERT INTO words (rowid, text) VALUES (?, ?)", [(n, f.text) for n, _, _, f in batch]
        )

    def _learn(self, name: str, numeric: bool) -> None:
        known = self._fields.get(name)
        if known is None:
            if len(self._fields) >= MOST_OWN:
                return
            number = len(self._fields)
            self._connected.execute(f"ALTER TABLE rollouts ADD COLUMN f{number}")
            self._connected.execute("INSERT INTO fields VALUES (?, ?, ?)", (name, number, numeric))
            self._fields[name] = (number, numeric)
        elif known[1] and not numeric:
            self._connected.execute("UPDATE fields SET numeric = 0 WHERE name = ?", (name,))
            self._fields[name] = (known[0], False)

    def _meet(self, model: str) -> None:
        if model not in self._models and len(self._models) < MOST_MODELS:
            number = len(self._models)
            for column in usage_columns(number):
                self._connected.execute(f"ALTER TABLE rollouts ADD COLUMN {column}")
            self._connected.execute("INSERT INTO models VALUES (?, ?)", (model, number))
            self._models[model] = number

    def _kind(self, facts: Facts) -> int:
        kind = (
            *(facts.agent, facts.environment, facts.failure, facts.version, facts.last_version),
            _tools(facts),
        )
        number = self._kinds.get(kind)
        if number is None:
            number = self._kinds[kind] = len(self._kinds)
            self._connected.execute("INSERT INTO kinds VALUES (?, ?, ?, ?, ?, ?, ?)", (number, *kind))
        return number

    def _behind(self, n: int, facts: Facts) -> int | None:
        """How many versions older its first call's is than the newest one of the rollouts up to this one.

        Lines are in order of completion. Those of failures are in another file, so they have no such place.
        """
        first, last = facts.version, facts.last_version
        if n >= FAILURES or not isinstance(first, int) or not isinstance(last, int):
            return None
        self._newest = last if self._newest is None else max(self._newest, last)
        return min(max(self._newest, first) - first, 10**12)  # SQLite has 64 bits

    def _save(self, more: bool) -> None:
        database = self._connected
        torn = sum(feed.torn for feed in self._feeds)
        done = not more
        state: dict[str, Any] = {feed.key: orjson.dumps(feed.saved()) for feed in self._feeds}
        state |= {
            "problems": self._problems,
            "done": done,
            "torn": torn,
            "error": self._error,
            "bytes": sum(_size(self.plain(feed)) for feed in self._feeds),
            "indexed": sum(feed.offset for feed in self._feeds),
        }
        known = dict(database.execute("SELECT key, value FROM state"))
        changed = {key: value for key, value in state.items() if known.get(key, 0) != value}
        if changed or database.in_transaction:
            self._begin()
            changed["revision"] = known.get("revision", 0) + 1
            database.executemany("INSERT OR REPLACE INTO state VALUES (?, ?)", changed.items())
            database.execute("COMMIT")


def usage_columns(number: int) -> list[str]:
    """The columns of ``rollouts`` with the `Usage` of a model server."""
    return [f"u{number}_{name}" for name in Usage._fields]


def database_of(folder: Path) -> Path:
    """The index in its folder of the cache."""
    return folder / "index.sqlite"


def index_run(files: RunFiles, cache: Path | None = None) -> None:
    """Index all that is there of a run now. If another process does, wait until it has."""
    indexer = Indexer(files, cache)
    try:
        while not indexer.own():
            time.sleep(0.05)
        while indexer.step(5.0):
            pass
    finally:
        indexer.close()


def drop_stale(cache: Path) -> None:
    """Remove the indices of files that are gone."""
    for folder in _indices(cache):
        try:
            database = sqlite3.connect(f"file:{database_of(folder)}?mode=ro", uri=True)
            try:
                found = database.execute("SELECT value FROM state WHERE key = 'path'").fetchone()
            finally:
                database.close()
        except sqlite3.DatabaseError:
            continue
        if found and not Path(os.fsdecode(found[0])).parent.exists():
            shutil.rmtree(folder, ignore_errors=True)


def _indices(cache: Path) -> Iterator[Path]:
    if cache.is_dir():
        yield from (path for path in cache.iterdir() if re.fullmatch("[0-9a-f]{12}", path.name))


def _tools(facts: Facts) -> str:
    return "\n".join(["", *facts.tools, ""]) if facts.tools else ""


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

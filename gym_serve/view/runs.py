"""`Run`: the index and the lines of a run, read.

What people noted of rollouts: tags, a comment, a corrected verdict.

They are kept beside the file of the run, in ``NAME.annotations.jsonl``, a line for each change. The last line
of a rollout counts. A line names the rollout by its number and its id, so that it is not taken for another
one when the file was replaced.
"""

from __future__ import annotations

import math
import os
import sqlite3
import stat
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter

from gym_serve.rollouts.files import split_name
from gym_serve.servers.usage import Prices
from gym_serve.types.errors import BadRequest, InvalidRequest, NotFound
from gym_serve.types.requests import parse
from gym_serve.view.expression import BadExpression, condition, sort_key
from gym_serve.view.facts import top_level
from gym_serve.view.index import database_of
from gym_serve.view.sources import RunFiles, cache_folder, open_regular, shown
from gym_serve.view.tables import FAILURES, FORMAT

_MOST_TAGS = 50
_LONGEST_TAG = 100
_LONGEST_COMMENT = 100_000
EMPTY: dict[str, Any] = {"tags": [], "comment": "", "reward": None, "by": "", "at": None}


class Annotations:
    """The annotations of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._revision = 0
        self._known: dict[int, dict[str, Any]] = {}
        self._seen: tuple[int, int, int] | None = None
        self._lock = Lock()

    @property
    def revision(self) -> int:
        """Changes with the annotations."""
        self._read()
        return self._revision

    def of(self, n: int, id_: str) -> dict[str, Any]:
        """The annotation of a rollout, an empty one without any."""
        note = self._read().get(n)
        if note is None or note["id"] != id_:
            return EMPTY
        return {key: note[key] for key in EMPTY}

    def tags(self, n: int, id_: str) -> list[str]:
        tags: list[str] = self.of(n, id_)["tags"]
        return tags

    def tagged(self, tag: str) -> list[int]:
        """The numbers of the rollouts with a tag."""
        return [n for n, note in self._read().items() if tag in note["tags"]]

    def all_tags(self) -> list[str]:
        return sorted({tag for note in self._read().values() for tag in note["tags"]})

    def lines(self) -> Iterator[dict[str, Any]]:
        """The annotations, one for each rollout that has one."""
        for n, note in sorted(self._read().items()):
            if any(note[key] for key in ("tags", "comment")) or note["reward"] is not None:
                yield {"n": n, **note}

    def put(self, n: int, id_: str, content: Any) -> dict[str, Any]:
        """Note something of a rollout, in place of what was noted before. Raises InvalidRequest: it is no
        annotation; BadRequest: the file cannot be written."""
        note = {"n": n, "id": id_, **_checked(content), "at": round(time.time(), 3)}
        with self._lock:
            try:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
                descriptor = os.open(self.path, flags, 0o666)
                try:
                    os.write(descriptor, orjson.dumps(note, option=orjson.OPT_APPEND_NEWLINE))
                finally:
                    os.close(descriptor)
            except OSError as error:
                raise BadRequest(f"cannot write {shown(self.path)}: {error.strerror}") from error
        return self.of(n, id_)

    def _read(self) -> dict[int, dict[str, Any]]:
        with self._lock:
            try:
                status = self.path.lstat()
                if not stat.S_ISREG(status.st_mode):
                    raise FileNotFoundError(self.path)
            except OSError:
                if self._known:
                    self._known, self._revision = {}, self._revision + 1
                self._seen = None
                return self._known
            identity = (status.st_ino, status.st_size, status.st_mtime_ns)
            if identity != self._seen:
                self._seen = identity
                self._known = dict(_records(self.path))
                self._revision += 1
            return self._known


def annotations_of(main: Path) -> Path:
    """The file of the annotations of a run: ``out.jsonl.gz`` has ``out.annotations.jsonl``."""
    return main.with_name(f"{split_name(main)[0]}.annotations.jsonl")


def read_annotations(path: Path) -> dict[int, dict[str, Any]]:
    """The annotations of a file by the rollout's number: ``id``, ``tags``, ``comment``, ``reward``, ...; none
    if the file does not exist."""
    return dict(_records(path.resolve())) if path.is_file() else {}


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with open(open_regular(path), "rb") as file:
        for line in file:
            try:
                record = orjson.loads(line)
                yield record["n"], {"id": str(record["id"]), **_checked(record), "at": record.get("at")}
            except (ValueError, TypeError, KeyError, InvalidRequest):
                continue  # a torn line, or one of another program


_Short = Annotated[str, Field(max_length=_LONGEST_TAG)]


class Annotation(BaseModel):
    """What a person says of a rollout."""

    model_config = ConfigDict(strict=True)

    tags: Annotated[list[Annotated[_Short, Field(min_length=1)]], Field(max_length=_MOST_TAGS)] = []
    comment: Annotated[str, Field(max_length=_LONGEST_COMMENT)] = ""
    reward: FiniteFloat | None = None
    by: _Short = ""


_NOTE = TypeAdapter(Annotation)


def _checked(content: Any) -> dict[str, Any]:
    if isinstance(content, dict):
        content = {key: value for key, value in content.items() if value is not None}
    note: Annotation = parse(_NOTE, content, "annotation")
    return {**note.model_dump(), "tags": list(dict.fromkeys(note.tags))}


_KEPT = 64  # results
_POOL = 4  # connections
FILTER_SECONDS = 1.0
"""How much processor time a query with a filter may take."""


class Run:
    """A run, as far as it is indexed."""

    def __init__(
        self, files: RunFiles, cache: Path | None = None, prices: Mapping[str, Prices] | None = None
    ) -> None:
        self.files = files
        self.prices = dict(prices or {})
        self.folder = (cache or cache_folder()) / files.id
        self.annotations = Annotations(annotations_of(files.main))
        self._free: list[sqlite3.Connection] = []
        self._lock = Lock()
        self._kept: OrderedDict[Hashable, tuple[int, Any]] = OrderedDict()

    @property
    def id(self) -> str:
        return self.files.id

    @contextmanager
    def reading(self) -> Iterator[Reading]:
        """The index as it is now: what is read meanwhile is of one state."""
        with self._lock:
            connection = self._free.pop() if self._free else None
        if connection is None:
            connection = self._connect()
        indexed = False
        try:
            with suppress(sqlite3.DatabaseError):
                connection.execute("BEGIN")
            reading = Reading(self, connection)
            indexed = not reading.empty
            yield reading
        finally:
            with suppress(sqlite3.DatabaseError):
                connection.rollback()
            with self._lock:
                keep = indexed and len(self._free) < _POOL
                if keep:
                    self._free.append(connection)
            if not keep:
                connection.close()

    def _connect(self) -> sqlite3.Connection:
        path = database_of(self.folder)
        if not path.exists():  # the indexer has not come to it yet
            return sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        connection = sqlite3.connect(
            f"{path.as_uri()}?mode=ro", uri=True, check_same_thread=False, isolation_level=None
        )
        connection.execute("PRAGMA mmap_size = 1073741824")
        connection.execute("PRAGMA query_only = 1")
        return connection

    def close(self) -> None:
        with self._lock:
            while self._free:
                self._free.pop().close()

    def kept(self, key: Hashable, revision: int) -> Any:
        """A result that was kept; None if the index has changed since."""
        with self._lock:
            entry = self._kept.get(key)
            if entry is None or entry[0] != revision:
                return None
            self._kept.move_to_end(key)
            return entry[1]

    def keep(self, key: Hashable, revision: int, result: Any) -> None:
        with self._lock:
            self._kept[key] = (revision, result)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)


class Reading:
    """One state of a run's index."""

    def __init__(self, run: Run, connection: sqlite3.Connection) -> None:
        self.run = run
        self._connection = connection
        self._filtered = False
        try:
            self.state: dict[str, Any] = dict(connection.execute("SELECT key, value FROM state"))
            fields = list(connection.execute("SELECT name, number, numeric FROM fields ORDER BY number"))
        except sqlite3.DatabaseError:  # there is no index yet, or the indexer will make it anew
            self.state, fields = {}, []
        if self.state.get("format") != FORMAT:
            self.state, fields = {}, []
        self.own = {name: f"f{number}" for name, number, _ in fields}
        """Columns of the verifier's fields, ``fields.NAME``, and of the row's keys, ``row.NAME``."""
        self.numeric = frozenset(name for name, _, is_numeric in fields if is_numeric)
        """Those of them that hold numbers."""
        self.models: dict[str, int] = {} if self.empty else dict(self.sql("SELECT name, number FROM models"))
        """Numbers of the model servers whose usage the index has."""

    @property
    def fields(self) -> dict[str, str]:
        """The columns of the verifier's fields, by their names alone."""
        return {name[7:]: column for name, column in self.own.items() if name.startswith("fields.")}

    @property
    def empty(self) -> bool:
        """Whether nothing is indexed yet."""
        return not self.state

    @property
    def revision(self) -> int:
        """Changes with the index, and with the annotations."""
        annotated = self.run.annotations.revision
        return (
            int(self.state.get("revision", 0)) + (annotated << 32) + (int(self.state.get("epoch", 0)) << 48)
        )

    def sql(self, query: str, values: Iterable[Any] = ()) -> list[Any]:
        """The rows of a query; none if there is no index yet. Raises BadExpression: a filter was asked for,
        and SQLite cannot do that, or needs more than a second."""
        if self.empty:
            return []
        ends = time.thread_time() + FILTER_SECONDS if self._filtered else math.inf
        self._connection.set_progress_handler(lambda: time.thread_time() > ends, 5_000)
        try:
            return self._connection.execute(query, tuple(values)).fetchall()
        except sqlite3.OperationalError as error:
            if not self._filtered:
                raise
            slow = f"it needs more than {FILTER_SECONDS:g} s" if str(error) == "interrupted" else str(error)
            raise BadExpression(f"this filter cannot be used: {slow}") from None

    def where(self, expression: str) -> str:
        """The condition of a filter, in SQL; queries with it are bounded in time."""
        self._filtered = self._filtered or bool(expression.strip())
        return condition(expression, self.own, self.run.annotations.tagged)

    def order(self, sort: str | None) -> tuple[str, str]:
        """What to sort by, for ``name`` or ``-name``, and the whole order: what a rollout lacks comes last,
        and ties are as in the file. Raises BadExpression: there is no such name."""
        if not sort:
            return "NULL", "n"
        key = sort_key(sort.removeprefix("-"), self.own)
        return key, f"({key}) IS NULL, {key} {'DESC' if sort.startswith('-') else 'ASC'}, n"

    def count(self, expression: str) -> int:
        """How many rollouts a filter selects."""
        query = f"SELECT count(*) FROM rollouts WHERE {self.where(expression)}"
        rows = self.once(("count", expression), lambda: self.sql(query))
        return rows[0][0] if rows else 0

    def once(self, key: Hashable, ask: Callable[[], Any]) -> Any:
        """The answer of ``ask``, which is kept as long as the index does not change."""
        answer = self.run.kept(key, self.revision)
        if answer is None:
            answer = ask()
            self.run.keep(key, self.revision, answer)
        return answer

    def problems(self) -> list[dict[str, Any]]:
        """The lines that could not be read; the first of them."""
        rows = self.sql("SELECT file, line, message FROM problems LIMIT 100")
        listed = [{"line": line, "message": f"{file}: {message}"} for file, line, message in rows]
        if self.state.get("unfinished"):
            message = f"the last line is not complete yet ({self.state['unfinished']:,} bytes)"
            listed.insert(0, {"line": None, "message": message})
        if self.state.get("error"):
            listed.insert(0, {"line": None, "message": str(self.state["error"])})
        return listed

    def line(self, n: int) -> bytes:
        """A rollout's line, as it is stored. Raises NotFound: there is no such rollout, or no longer."""
        rows = self.sql("SELECT start, size FROM rollouts WHERE n = ?", (n,))
        if not rows:
            raise NotFound(f"{self.run.files.name} has no rollout {n}")
        key = "main" if n < FAILURES else "failures"
        path = self.run.files.main if n < FAILURES else self.run.files.failures
        if path.suffix in (".gz", ".zst"):
            path = self.run.folder / f"{key}.jsonl"
        start, size = rows[0]
        try:
            descriptor = open_regular(path, follow=key == "main")
            try:
                line = _read_all(descriptor, size, start)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise NotFound(f"cannot read {shown(path)}: {error.strerror}") from None
        return line.rstrip(b"\r\n")

    def rollout(self, n: int) -> dict[str, Any]:
        """A rollout. Raises NotFound: there is no such rollout, or no longer."""
        try:
            return top_level(self.line(n))
        except ValueError as error:
            raise NotFound(f"the file has changed: {error}") from None


def _read_all(descriptor: int, size: int, start: int) -> bytes:
    parts: list[bytes] = []
    while size > 0 and (part := os.pread(descriptor, size, start)):
        parts.append(part)
        start += len(part)
        size -= len(part)
    return b"".join(parts)

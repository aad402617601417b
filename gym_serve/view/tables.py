"""The tables of an index, and the one writer of them.

- ``rollouts`` is narrow, because filters and sorts go through all of it. The verifier's fields and the row's
  keys are columns ``f0``, ``f1``, ... of it, and ``fields`` has their names. ``tools`` has each name between
  newlines. Likewise ``u0``, ``u1``, ... are what its calls of a model server used, and ``models`` has the
  names. Rollouts that are equal in what facets count are of one ``kind``, because small numbers are grouped
  fast.
- ``details`` has what only a page of the table shows.
- ``words`` finds texts and holds none: the file has them.
- ``state`` says how far the files have been read, and what they were.

A rollout's number is its line in the main file, from 0; failures count from `FAILURES`.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from gym_serve.view.facts import Facts, Usage

FAILURES = 10**9
"""Number of the first failed attempt."""
FORMAT = 5
"""Of the tables: another number makes all indices anew."""
KEPT_PROBLEMS = 1000
MOST_MODELS = 16
"""The most model servers of which the index has the usage; a run with more has no cost."""
MOST_OWN = 200
"""The most fields of the verifier and keys of the row in the index."""

_UNUSED = (None,) * len(Usage._fields)
_KIND = ("agent", "environment", "failure", "version", "last_version")
_FACTS = ("task", "attempt", *_KIND, "reward", "turns", "input_tokens", "output_tokens", "seconds", "at")
_COLUMNS = ("n", "start", "size", *_FACTS, "tools", "behind", "kind")
_TABLES = f"""
CREATE TABLE rollouts ({", ".join(_COLUMNS).replace("n,", "n INTEGER PRIMARY KEY,", 1)});
CREATE INDEX by_task ON rollouts (task);
CREATE TABLE details (n INTEGER PRIMARY KEY, id TEXT, prompt TEXT, prompt_digest INTEGER);
CREATE VIRTUAL TABLE words USING fts5(text, content='', detail=none, columnsize=0);
CREATE TABLE fields (name TEXT PRIMARY KEY, number INTEGER, numeric INTEGER);
CREATE TABLE kinds (number INTEGER PRIMARY KEY, {", ".join(_KIND)}, tools);
CREATE TABLE models (name TEXT PRIMARY KEY, number INTEGER);
CREATE TABLE problems (file TEXT, line INTEGER, message TEXT);
CREATE TABLE state (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
"""
_NAMES = ("rollouts", "details", "words", "fields", "models", "kinds", "problems", "state")
_kind_of, _facts_of = attrgetter(*_KIND), attrgetter(*_FACTS)


class IndexedLine(NamedTuple):
    """A rollout, and where its line is."""

    n: int
    start: int
    size: int
    facts: Facts


class Tables:
    """The tables, for their one writer. Raises sqlite3.DatabaseError: it is of another format, or damaged."""

    def __init__(self, path: Path, run: Path) -> None:
        self._run = run
        self._database = database = sqlite3.connect(path, isolation_level=None)
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.execute("PRAGMA cache_size = -65536")
            if not database.execute("SELECT 1 FROM sqlite_master").fetchone():
                self._create(0)
            if self.state().get("format") != FORMAT:
                raise sqlite3.DatabaseError("it is of another version")
            self._load_names()
        except BaseException:
            database.close()
            raise

    def _create(self, epoch: int, *, instead: bool = False) -> None:
        drops = "".join(f"DROP TABLE {name};" for name in _NAMES) if instead else ""
        self._database.executescript("BEGIN;" + drops + _TABLES)
        state = {"format": FORMAT, "epoch": epoch, "path": os.fsencode(self._run)}
        self._database.executemany("INSERT INTO state VALUES (?, ?)", state.items())
        self._database.execute("COMMIT")

    def _load_names(self) -> None:
        query = self._database.execute
        fields = query("SELECT name, number, numeric FROM fields ORDER BY number")
        self._own = {name: (number, bool(numeric)) for name, number, numeric in fields}
        self._models = dict(query("SELECT name, number FROM models ORDER BY number"))
        self._kinds = {tuple(kind): number for number, *kind in query("SELECT * FROM kinds")}
        self.problems: int = self.state().get("problems", 0)
        versions = "SELECT max(last_version) FROM rollouts WHERE typeof(last_version) = 'integer' AND n < ?"
        self._newest_version: int | None = query(versions, (FAILURES,)).fetchone()[0]

    def clear(self) -> None:
        self._create(self.state().get("epoch", 0) + 1, instead=True)
        self._load_names()

    def close(self) -> None:
        self._database.close()

    def state(self) -> dict[str, Any]:
        return dict(self._database.execute("SELECT key, value FROM state"))

    def commit(self, state: Mapping[str, Any]) -> None:
        """Let readers see what was added, and a new state; nothing happens if nothing has changed."""
        before = self.state()
        changed = {key: value for key, value in state.items() if before.get(key, 0) != value}
        if changed or self._database.in_transaction:
            self._begin()
            changed["revision"] = before.get("revision", 0) + 1
            self._database.executemany("INSERT OR REPLACE INTO state VALUES (?, ?)", changed.items())
            self._database.execute("COMMIT")

    def add_problem(self, file: str, line: int, message: str) -> None:
        """Keep why a line, counted from 1, is no rollout."""
        self.problems += 1
        if self.problems <= KEPT_PROBLEMS:
            self._begin()
            values = (file, line, message[:300])
            self._database.execute("INSERT INTO problems VALUES (?, ?, ?)", values)

    def add(self, lines: Sequence[IndexedLine]) -> None:
        if not lines:
            return
        self._begin()
        for line in lines:
            for name, value in line.facts.own.items():
                self._add_own(name, numeric=not isinstance(value, str))
            for name in line.facts.usage:
                self._add_model(name)
        used = [column for number in self._models.values() for column in usage_columns(number)]
        columns = [*_COLUMNS, *(f"f{number}" for number, _ in self._own.values()), *used]
        marks = ", ".join("?" * len(columns))
        self._database.executemany(
            f"INSERT OR REPLACE INTO rollouts ({', '.join(columns)}) VALUES ({marks})", map(self._row, lines)
        )
        self._database.executemany(
            "INSERT OR REPLACE INTO details VALUES (?, ?, ?, ?)",
            [(n, facts.id, facts.prompt, facts.prompt_digest) for n, _, _, facts in lines],
        )
        self._database.executemany(
            "INSERT INTO words (rowid, text) VALUES (?, ?)", [(line.n, line.facts.text) for line in lines]
        )

    def _begin(self) -> None:
        if not self._database.in_transaction:
            self._database.execute("BEGIN")

    def _row(self, line: IndexedLine) -> tuple[Any, ...]:
        facts = line.facts
        tools = "\n".join(["", *facts.tools, ""]) if facts.tools else ""
        used = (count for name in self._models for count in facts.usage.get(name, _UNUSED))
        return (
            *(line.n, line.start, line.size, *_facts_of(facts)),
            *(tools, self._versions_behind(line.n, facts), self._kind_number(facts, tools)),
            *map(facts.own.get, self._own),
            *used,
        )

    def _add_own(self, name: str, *, numeric: bool) -> None:
        """Make a column for a field of the verifier or a key of the row; it is a text if one value is."""
        column = self._own.get(name)
        if column is None and len(self._own) < MOST_OWN:
            number = len(self._own)
            self._database.execute(f"ALTER TABLE rollouts ADD COLUMN f{number}")
            self._database.execute("INSERT INTO fields VALUES (?, ?, ?)", (name, number, numeric))
            self._own[name] = (number, numeric)
        elif column is not None and column[1] and not numeric:
            self._database.execute("UPDATE fields SET numeric = 0 WHERE name = ?", (name,))
            self._own[name] = (column[0], False)

    def _add_model(self, name: str) -> None:
        if name not in self._models and len(self._models) < MOST_MODELS:
            number = len(self._models)
            for column in usage_columns(number):
                self._database.execute(f"ALTER TABLE rollouts ADD COLUMN {column}")
            self._database.execute("INSERT INTO models VALUES (?, ?)", (name, number))
            self._models[name] = number

    def _kind_number(self, facts: Facts, tools: str) -> int:
        kind = (*_kind_of(facts), tools)
        number = self._kinds.get(kind)
        if number is None:
            number = self._kinds[kind] = len(self._kinds)
            marks = ", ".join("?" * (1 + len(kind)))
            self._database.execute(f"INSERT INTO kinds VALUES ({marks})", (number, *kind))
        return number

    def _versions_behind(self, n: int, facts: Facts) -> int | None:
        """How many versions older its first call's is than the newest one of the rollouts up to this one.

        Lines are in order of completion. Those of failures are in another file, so they have no such place.
        """
        first, last = facts.version, facts.last_version
        if n >= FAILURES or not isinstance(first, int) or not isinstance(last, int):
            return None
        newest = last if self._newest_version is None else max(self._newest_version, last)
        self._newest_version = newest
        return min(max(newest, first) - first, 10**12)  # SQLite has 64 bits


def usage_columns(number: int) -> list[str]:
    """The columns of ``rollouts`` with the `Usage` of a model server."""
    return [f"u{number}_{name}" for name in Usage._fields]

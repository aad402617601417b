"""Runs SQL that a model wrote on a database in memory. It is executed in a sandbox, never in the replica.

The text of this module is that program (see `execution`), so it uses the standard library alone. SQLite asks
its authorizer about every action of every statement, triggers and views included. Allowed is what is listed
here; other files, extensions, virtual tables and most PRAGMAs are refused.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Any

_ACTIONS = frozenset(
    getattr(sqlite3, f"SQLITE_{name}")
    for name in (
        *("SELECT", "READ", "RECURSIVE", "FUNCTION", "INSERT"),
        *("UPDATE", "DELETE", "TRANSACTION", "SAVEPOINT"),
        *("CREATE_TABLE", "CREATE_INDEX", "CREATE_VIEW", "CREATE_TRIGGER"),
        *("CREATE_TEMP_TABLE", "CREATE_TEMP_INDEX", "CREATE_TEMP_VIEW", "CREATE_TEMP_TRIGGER"),
        *("DROP_TABLE", "DROP_INDEX", "DROP_VIEW", "DROP_TRIGGER"),
        *("DROP_TEMP_TABLE", "DROP_TEMP_INDEX", "DROP_TEMP_VIEW", "DROP_TEMP_TRIGGER"),
        *("ALTER_TABLE", "REINDEX", "ANALYZE"),
    )
)
_NAMES = {
    value: name.removeprefix("SQLITE_").replace("_", " ")
    for name, value in vars(sqlite3).items()
    if name.startswith(("SQLITE_CREATE_", "SQLITE_DROP_", "SQLITE_ATTACH", "SQLITE_DETACH"))
}
_PRAGMAS = frozenset(
    {
        *("foreign_keys", "foreign_key_list", "index_info", "index_list", "index_xinfo"),
        *("table_info", "table_list", "table_xinfo"),
    }
)
_REFUSED_FUNCTIONS = frozenset({"load_extension", "fts3_tokenizer", "readfile", "writefile", "edit"})
_LIMITS = {  # by the names of Python 3.11; before that, the limits of the process do alone
    "ATTACHED": 0,
    "COLUMN": 100,
    "COMPOUND_SELECT": 500,
    "EXPR_DEPTH": 500,
    "LENGTH": 1_000_000,
    "LIKE_PATTERN_LENGTH": 1_000,
    "TRIGGER_DEPTH": 50,
    "WORKER_THREADS": 0,
}


def run_sql(schema: str, sql: str, max_rows: int, max_bytes: int, heap_bytes: int) -> dict[str, Any]:
    """Build a database and run statements on it. Returns ``{"error", "stage": "schema" | "sql"}`` where
    something failed, else ``has_rows`` (whether the schema holds any), ``rows`` (of the last statement that
    gives any; None if none does) and ``tables`` (if the statements changed any: all rows by table and view).
    """
    database = _Database(max_rows, max_bytes, heap_bytes)
    stage = "schema"
    try:
        database.run(schema)
        before = database.tables()
        stage = "sql"
        rows = database.run(sql)
        after = database.tables()
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        return {"error": database.refusal or str(error) or type(error).__name__, "stage": stage}
    except MemoryError:
        return {"error": "out of memory", "stage": stage}
    return {"has_rows": any(before.values()), "rows": rows, "tables": None if after == before else after}


class _Budget:
    """How many rows and bytes may still be read."""

    def __init__(self, max_rows: int, max_bytes: int) -> None:
        self._excess = f"more than {max_rows:,} rows or {max_bytes:,} bytes"
        self._rows_left = max_rows
        self._bytes_left = max_bytes

    def rows(self, cursor: sqlite3.Cursor) -> list[list[Any]]:
        """The rows of a statement. Raises ValueError: there are too many."""
        rows: list[list[Any]] = []
        for row in cursor:
            self._rows_left -= 1
            self._bytes_left -= sum(8 + len(v) if isinstance(v, str | bytes) else 8 for v in row)
            if self._rows_left < 0 or self._bytes_left < 0:
                raise ValueError(self._excess)
            rows.append([value.hex() if isinstance(value, bytes) else value for value in row])
        return rows


class _Database:
    def __init__(self, max_rows: int, max_bytes: int, heap_bytes: int) -> None:
        self.refusal: str | None = None
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._connection = sqlite3.connect(":memory:", isolation_level=None)
        self._connection.text_factory = lambda text: text.decode("utf-8", "replace")
        for pragma in (f"hard_heap_limit={heap_bytes}", "temp_store=MEMORY", "trusted_schema=OFF"):
            self._connection.execute(f"PRAGMA {pragma}")
        if hasattr(self._connection, "setlimit"):
            for name, value in _LIMITS.items():
                self._connection.setlimit(getattr(sqlite3, f"SQLITE_LIMIT_{name}"), value)
        self._connection.set_authorizer(self._authorize)

    def run(self, script: str) -> list[list[Any]] | None:
        """Run statements; the rows of the last one that gives any. Raises sqlite3.Error, sqlite3.Warning,
        MemoryError: a statement fails; ValueError: it has too many rows, or a null character.
        """
        rows = None
        for statement in _statements(script):
            cursor = self._connection.execute(statement)
            table_rows = _Budget(self._max_rows, self._max_bytes).rows(cursor)
            rows = rows if cursor.description is None else table_rows
        return rows

    def tables(self) -> dict[str, list[list[Any]]]:
        """All rows, by table or view; a view that fails has none. Raises ValueError: there are too many."""
        names = self._connection.execute(
            "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT GLOB 'sqlite_*'"
        ).fetchall()
        tables: dict[str, list[list[Any]]] = {}
        budget = _Budget(self._max_rows, self._max_bytes)
        for (name,) in names:
            quoted = name.replace('"', '""')
            try:
                tables[name] = budget.rows(self._connection.execute(f'SELECT * FROM "{quoted}"'))
            except sqlite3.OperationalError:
                tables[name] = []
        return tables

    def _authorize(self, action: int, first: str | None, second: str | None, *_: str | None) -> int:
        if action == sqlite3.SQLITE_PRAGMA:
            allowed = (first or "").lower() in _PRAGMAS
            refused = f"PRAGMA {first}"
        elif action == sqlite3.SQLITE_FUNCTION:
            allowed = (second or "").lower() not in _REFUSED_FUNCTIONS
            refused = f"the function {second}"
        else:
            allowed = action in _ACTIONS
            refused = _NAMES.get(action, f"action {action} of SQLite")
        if not allowed:
            self.refusal = self.refusal or f"{refused} is not allowed"
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK


def _statements(script: str) -> Iterator[str]:
    """The statements of a script; SQLite knows where each ends, within strings and triggers too."""
    start = 0
    for place, character in enumerate(script):
        if character == ";" and sqlite3.complete_statement(script[start : place + 1]):
            yield script[start : place + 1]
            start = place + 1
    if script[start:].strip():
        yield script[start:]

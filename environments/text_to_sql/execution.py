"""Running a query and the expected one on the row's own database, and comparing what they give.

Only a difference that no reading of the question excuses is one: another number of rows, a column whose
values the other result does not have, or other changes of the database. Names and order of columns, further
columns, the order of rows and rounding make none. Equal results on a few rows are left to the judge.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from gym_serve.grading import pair_up
from gym_serve.sandbox import Confinement, Limits, SandboxedPython, SandboxPool
from gym_serve.types.errors import VerifierFailed
from gym_serve.types.requests import JSON

_PROGRAM = Path(__file__).with_name("sqlite_runner.py").read_text("utf-8")
_MAX_ROWS = 10_000
_MAX_BYTES = 256 << 10
_OUTPUT_LIMIT = 32 * _MAX_BYTES  # rows and tables; a character has at most twelve in JSON
_MAX_SQL = 100_000
_SHOWN = 500

Rows = Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Execution:
    """What running a query showed: ``failed``: it does not run; ``different`` from the expected query's
    result; ``same``; ``undecided``: the row does not allow to tell. ``detail`` says why.
    """

    outcome: Literal["failed", "different", "same", "undecided"]
    detail: str = ""


class SqlRunner(SandboxPool):
    """Sandboxes that run SQLite queries, each for ``timeout`` seconds of processor time."""

    def __init__(self, sandbox: Confinement, *, memory_bytes: int, timeout: float, size: int) -> None:
        limits = Limits(
            memory_bytes=memory_bytes,
            file_bytes=2 * _OUTPUT_LIMIT,  # more than the limit, so that a result that is cut is seen to be
            disk_bytes=8 * _OUTPUT_LIMIT,
        )
        self._heap_bytes = memory_bytes // 2
        self._timeout = timeout
        super().__init__(sandbox, limits, size=size, prelude="import sqlite3")

    async def check(self, schema: str, expected: str, query: str) -> Execution:
        """Run a query and the expected one, each on a new database. Raises VerifierFailed: sandboxes died, or
        the machine is too busy; Unavailable: a sandbox does not start.
        """
        if len(query) > _MAX_SQL:
            return Execution("failed", f"the query has more than {_MAX_SQL:,} characters")
        return await self.grade(lambda python: self._compared(python, schema, expected, query), "query")

    async def _compared(self, python: SandboxedPython, schema: str, expected: str, query: str) -> Execution:
        wanted = await self._run(python, schema, expected)
        if "error" in wanted:
            what = "sql_context" if wanted["stage"] == "schema" else "the expected query"
            return Execution("undecided", f"{what} does not run: {wanted['error']}")
        result = await self._run(python, schema, query)
        if "error" in result:
            return Execution("failed", result["error"])
        if not wanted["has_rows"] and wanted["tables"] is None:
            return Execution("undecided", "sql_context has no rows")
        reason = await asyncio.to_thread(difference, wanted, result)
        if reason is None:
            return Execution("same")
        again = await self._run(python, schema, expected)
        if "error" in again or await asyncio.to_thread(difference, wanted, again) is not None:
            return Execution("undecided", "the expected query gives something else each time")
        return Execution("different", reason)

    async def _run(self, python: SandboxedPython, schema: str, sql: str) -> JSON:
        """What `sqlite_runner.run_sql` answers; ``{"error", "stage"}`` also where it could not."""
        run = await python.run(
            _PROGRAM,
            function="run_sql",
            arguments=[schema, sql, _MAX_ROWS, _MAX_BYTES, self._heap_bytes],
            timeout=self._timeout,
            output_limit=_OUTPUT_LIMIT,
        )
        if run.starved:
            raise VerifierFailed("the machine is overloaded: a query got less than a tenth of a processor")
        if run.value is not None:
            result: JSON = await asyncio.to_thread(json.loads, run.value)
            return {**result, "error": result["error"][:_SHOWN]} if "error" in result else result
        reason = run.stderr.strip().rpartition("\n")[2][:_SHOWN] or f"it ended with status {run.status}"
        if run.timed_out:
            reason = f"it took over {self._timeout:g} s"
        elif run.cut:
            reason = "the result is too large"
        return {"error": reason, "stage": "sql"}


def difference(expected: JSON, actual: JSON) -> str | None:
    """How two results of `sqlite_runner.run_sql` differ; None if they agree."""
    if expected["tables"] is None and actual["tables"] is not None:
        return "it changes the database, and the expected query does not"
    if expected["tables"] is not None and actual["tables"] is None:
        return "it does not change the database, and the expected query does"
    if (reason := _difference_of_rows(expected["rows"], actual["rows"])) is not None:
        return reason
    tables, others = expected["tables"] or {}, actual["tables"] or {}
    for name in sorted(tables.keys() | others.keys()):
        if (reason := _difference_of_rows(tables.get(name), others.get(name))) is not None:
            return f"table {name}: {reason}"
    return None


def _difference_of_rows(expected: Rows | None, actual: Rows | None) -> str | None:
    if expected is None or actual is None:
        return None if expected is actual else f"it gives {'no result' if actual is None else 'a result'}"
    if len(expected) != len(actual):
        return f"it gives {len(actual)} rows, and {len(expected)} were expected"
    columns, others = _columns(expected), _columns(actual)
    fewer, more = sorted((columns, others), key=len)
    fits = [[i for i, other in enumerate(more) if _same_values(column, other)] for column in fewer]
    if len(pair_up(fits)) < len(fewer):
        return "a column has other values"
    narrow, wide = (expected, actual) if fewer is columns else (actual, expected)
    if not any(_same_rows(narrow, wide, places) for places in islice(_pairings(fits), _MOST_PAIRINGS)):
        return "its columns have the expected values, and its rows have not"
    return None


def _pairings(fits: Sequence[Sequence[int]], taken: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Each way to give every column of one result a column of the other that has the same values."""
    if len(taken) == len(fits):
        yield taken
        return
    for place in fits[len(taken)]:
        if place not in taken:
            yield from _pairings(fits, (*taken, place))


def _same_rows(narrow: Rows, wide: Rows, places: Sequence[int]) -> bool:
    """Whether two results have the same rows in any order, once their columns are paired."""
    others = [[row[place] for place in places] for row in wide]
    pairs = zip(sorted(narrow, key=_row_key), sorted(others, key=_row_key), strict=True)
    if all(all(map(_same_value, row, other)) for row, other in pairs):
        return True
    if len(narrow) > _MOST_ROWS:
        return False
    # Rounded numbers may sort in another way.
    fits = [[i for i, other in enumerate(others) if all(map(_same_value, row, other))] for row in narrow]
    return len(pair_up(fits)) == len(narrow)


def _row_key(row: Sequence[Any]) -> list[tuple[int, float, str]]:
    """Sorts rows: what is equal but for rounding comes to the same place."""
    return [
        (1, 0.0, repr(value)) if (number := _number(value)) is None else (0, float(f"{number:.3g}"), "")
        for value in row
    ]


def _same_value(first: Any, second: Any) -> bool:
    number, other = _number(first), _number(second)
    if number is None or other is None:
        return number is other and first == second
    return _same_number(number, other)


_MOST_PAIRINGS = 1000
_MOST_ROWS = 200


@dataclass(frozen=True)
class _Column:
    """The values of a column in any order: numbers by size, and how often everything else comes."""

    numbers: list[int | float]
    others: Counter[Any]


def _columns(rows: Rows) -> list[_Column]:
    columns = []
    for values in zip(*rows, strict=True):
        numbers: list[int | float] = []
        others: Counter[Any] = Counter()
        for value in values:
            if (number := _number(value)) is None:
                others[value] += 1
            else:
                numbers.append(number)
        columns.append(_Column(sorted(numbers), others))
    return columns


def _number(value: Any) -> int | float | None:
    """A number, also one that is written as text; None for everything else."""
    if isinstance(value, str):
        if not _NUMERAL.fullmatch(value):
            return None
        value = int(value) if value.lstrip("+-").isdecimal() else float(value)
    return None if value is None or math.isnan(value) else value


_NUMERAL = re.compile(r"[+-]?(?:\d{1,300}(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,2})?", re.ASCII)
"""Unlike Python's, without `1_000`, `inf` or spaces; integers keep all of their digits."""


def _same_values(first: _Column, second: _Column) -> bool:
    is_like = first.others == second.others and len(first.numbers) == len(second.numbers)
    return is_like and all(map(_same_number, first.numbers, second.numbers))


def _same_number(first: int | float, second: int | float) -> bool:
    """Whether two numbers are equal, or one is the other rounded."""
    if first == second:
        return True
    if not (math.isfinite(first) and math.isfinite(second)):
        return False
    if first == int(first) and second == int(second):
        return False
    unit = 10.0 ** -min(_decimals(first), _decimals(second))
    return math.isclose(first, second, rel_tol=1e-9, abs_tol=unit / 2 * (1 + 1e-9))


def _decimals(number: int | float) -> int:
    """Digits after the point; 0 for an integer."""
    mantissa, _, exponent = repr(number).partition("e")
    digits = len(mantissa.partition(".")[2].rstrip("0"))
    return max(0, digits - int(exponent or 0))

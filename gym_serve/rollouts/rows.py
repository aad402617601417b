"""Rows: read from a file or an iterable, their reserved keys, and the problems found in them.

A row that cannot be used is a value, a `LocatedRow` with a problem: the reader decides whether one bad row
stops everything or is skipped. A line longer than `MAX_ROW_BYTES` is never held. The reserved keys,
``_ng_*``, identify a rollout and its attempt (docs/formats.md, Metadata).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

from gym_serve.rollouts.files import CORRUPT, MAX_ROW_BYTES, open_decompressed
from gym_serve.types.errors import InvalidRequest
from gym_serve.types.exact import exact_json, is_shallow
from gym_serve.types.requests import JSON
from gym_serve.types.rows import Row

RUN_ID = "_ng_run_id"  # key of every line of the output files: the run that it belongs to

METADATA_KEYS = ("_ng_task_index", "_ng_rollout_index", "_ng_attempt_index", "_ng_rollout_id")

MAX_TASK_INDEX = 2**40 - 1
MAX_ROLLOUT_INDEX = 2**23 - 1


def task_index(row: Mapping[str, Any]) -> int:
    """``_ng_task_index`` of a row. Raises `InvalidRequest` if it is no integer from 0 to `MAX_TASK_INDEX`."""
    return _index(row, "_ng_task_index", MAX_TASK_INDEX)


def rollout_index(row: Mapping[str, Any]) -> int:
    """``_ng_rollout_index`` of a row. Raises `InvalidRequest`: it is not from 0 to `MAX_ROLLOUT_INDEX`."""
    return _index(row, "_ng_rollout_index", MAX_ROLLOUT_INDEX)


def rollout_key(rollout: Mapping[str, Any]) -> int:
    """Task and rollout index as one integer below 2**63, which identifies the rollout in its run."""
    return task_index(rollout) << 23 | rollout_index(rollout)


def row_of_attempt(row: JSON, attempt: int) -> JSON:
    """The row of attempt number ``attempt``, counted from 0; the first attempt has no metadata of its own."""
    if attempt == 0:
        return row
    return {**row, "_ng_attempt_index": attempt, "_ng_rollout_id": f"{row['_ng_rollout_id']}-a{attempt}"}


def _index(row: Mapping[str, Any], key: str, largest: int) -> int:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= largest:
        raise InvalidRequest(f"{key} must be an integer from 0 to {largest}, got {str(value)[:50]}")
    return value


class LocatedRow(NamedTuple):
    """A row and its place, or the problem there."""

    where: str  # ``"rows.jsonl:17"``, or ``"row 17"`` of an iterable; counted from 1
    row: JSON | None
    problem: str | None = None


Rows = Iterable[JSON] | Iterable[Row] | Iterable[LocatedRow] | str | Path
"""Rows, or the path of a JSONL file (plain, ``.gz`` or ``.zst``)."""

_BOM = b"\xef\xbb\xbf"
_TO_JSONL = "pandas.{read}('{path}').to_json('{name}.rows.jsonl', orient='records', lines=True)"
_OTHER_FORMATS = {
    b"\xff\xfe": ("UTF-16 or UTF-32", "iconv -f UTF-16 -t UTF-8 '{path}' > '{name}.rows.jsonl'"),
    b"\xfe\xff": ("UTF-16", "iconv -f UTF-16 -t UTF-8 '{path}' > '{name}.rows.jsonl'"),
    b"\x1f\x8b": ("gzip", "mv '{path}' '{name}.jsonl.gz'"),
    b"\x28\xb5": ("zstd", "mv '{path}' '{name}.jsonl.zst'"),
    b"PAR1": ("Parquet", _TO_JSONL.replace("{read}", "read_parquet")),
    b"ARROW1": ("Arrow", _TO_JSONL.replace("{read}", "read_feather")),
    b"PK\3\4": ("a ZIP archive or a sheet of Excel", _TO_JSONL.replace("{read}", "read_excel")),
    b"[": ("one JSON array", "jq -c '.[]' '{path}' > '{name}.rows.jsonl'"),
}
"""By their first bytes: what a file is, and how to make it a file of rows."""
_DEEPEST = 500  # levels: half of what the standard library writes
_CSV = ("CSV", _TO_JSONL.replace("{read}", "read_csv"))


def read_rows(rows: Rows, note: Callable[[str], None] = lambda text: None) -> Iterator[LocatedRow]:
    """The rows, one at a time; blank lines are skipped. Raises `InvalidRequest`: the file cannot be opened.

    ``note`` is called with anything unusual but harmless (a byte order mark, CRLF), once per file.
    """
    return _of_file(Path(rows), note) if isinstance(rows, str | Path) else _of_iterable(rows)


def _of_iterable(rows: Iterable[Any]) -> Iterator[LocatedRow]:
    for number, row in enumerate(rows, 1):
        if isinstance(row, LocatedRow):
            yield row
        elif isinstance(row, dict):
            yield LocatedRow(f"row {number}", row)
        else:
            yield LocatedRow(f"row {number}", None, _not_an_object(row))


def _of_file(path: Path, note: Callable[[str], None]) -> Iterator[LocatedRow]:
    try:
        file = open_decompressed(path)
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror or error}") from error
    noted: set[str] = set()
    number = 0
    with file:
        try:
            for number, line in enumerate(_lines(file), 1):
                where = f"{path}:{number}"
                if number == 1 and line and (problem := _other_format(path, line)):
                    yield LocatedRow(where, None, problem)
                    return
                unusual = {
                    "skipped a byte order mark": (line or b"").startswith(_BOM),
                    "lines end in CRLF": (line or b"").endswith(b"\r\n"),
                }
                for what in (what for what, is_so in unusual.items() if is_so and what not in noted):
                    noted.add(what)
                    note(f"{where}: {what}")
                if line is None:
                    yield LocatedRow(where, None, f"the line is longer than {MAX_ROW_BYTES >> 20} MiB")
                elif content := line.removeprefix(_BOM).strip():
                    yield parsed_row(where, content)
        except CORRUPT as error:
            yield LocatedRow(f"{path}:{number + 1}", None, f"the file is damaged from here on: {error}")


def _other_format(path: Path, line: bytes) -> str | None:
    """What to do with a file that is no JSONL, by its first line."""
    line = line.removeprefix(_BOM)
    is_csv = path.suffix.lower() == ".csv" and not line.startswith(b"{")
    formats = (format_ for magic, format_ in _OTHER_FORMATS.items() if line.startswith(magic))
    kind, how = next(formats, _CSV if is_csv else ("", ""))
    if not kind:
        return None
    how = how.format(path=path, name=path.with_suffix(""))
    return f"the file must be JSONL, one JSON object a line in UTF-8, but is {kind}; to convert it: {how}"


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    while line := file.readline(MAX_ROW_BYTES + 1):
        if len(line) <= MAX_ROW_BYTES or line.endswith(b"\n"):
            yield line
            continue
        while (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):
            pass
        yield None


def parsed_row(where: str, line: bytes) -> LocatedRow:
    """The row that a line holds, or what is wrong with the line."""
    try:
        row = exact_json(line)
    except ValueError as error:
        return LocatedRow(where, None, _explained(line, error))
    if not isinstance(row, dict):
        return LocatedRow(where, None, _not_an_object(row))
    if line.count(b"[") + line.count(b"{") > _DEEPEST and not is_shallow(row, _DEEPEST):
        return LocatedRow(where, None, f"a row must nest at most {_DEEPEST} levels")
    return LocatedRow(where, row)


def _not_an_object(row: object) -> str:
    return f"a row must be a JSON object, got a {type(row).__name__}"


def _explained(line: bytes, error: ValueError) -> str:
    try:
        text = line.decode()
    except UnicodeDecodeError as problem:
        return f"byte {line[problem.start]:#04x} at {problem.start} is not UTF-8"
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as problem:
        if isinstance(problem, _Constant):
            return f"{problem} is not valid JSON; use null"
    where = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
    return f"not JSON: {where}"


class _Constant(ValueError):
    """NaN or an infinity."""


def _refuse(constant: str) -> NoReturn:
    raise _Constant(constant)


_KEPT = 1000
_SHOWN = 20


class Problems:
    """The problems and notes of a run's rows, to be reported together; of many, the first are kept."""

    def __init__(self) -> None:
        self.count = 0  # how many problems there are
        self._alike: dict[str, tuple[str, int]] = {}  # the first place of each, and how many others there are
        self.notes: list[str] = []  # anything unusual, but harmless

    def add(self, problem: str) -> None:
        self.count += 1
        where, colon, what = problem.partition(": ")
        if not colon:
            where, what = "", problem
        if what in self._alike or len(self._alike) < _KEPT:
            first, others = self._alike.get(what, (where, -1))
            self._alike[what] = first, others + 1

    @property
    def kept(self) -> list[str]:
        """The first problems, each with its place; equal ones once, with their number."""
        return [
            f"{where}{': ' if where else ''}{what}" + (f" (and {others:,} more like this)" if others else "")
            for what, (where, others) in self._alike.items()
        ]

    def raise_if_any(self, summary: str) -> None:
        """Raise an `InvalidRequest` with ``summary`` and the first problems, if there are problems."""
        if self.count:
            kept = self.kept
            shown = [f"  - {problem}" for problem in kept[:_SHOWN]]
            more = [f"  - and {len(kept) - len(shown)} other problems"] if len(kept) > len(shown) else []
            raise InvalidRequest("\n".join([f"{summary}:", *shown, *more]))


def raise_problem(problem: str) -> None:
    """Stop at the first problem."""
    raise InvalidRequest(problem)


def ignore_problem(problem: str) -> None:
    """Skip the row."""

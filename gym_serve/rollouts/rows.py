"""Rows as they come in: a JSONL file or an iterable, one row at a time, each with its place.

A row that cannot be used is a value here, a `Located` with a problem, because whoever reads decides
whether one bad row stops everything or is left out. A line is never held if it is longer than
`MAX_ROW_BYTES`, so a file that is no JSONL at all cannot fill the memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import orjson

from gym_serve.rollouts.compression import CORRUPT, open_decompressed
from gym_serve.types.errors import InvalidRequest
from gym_serve.types.exact import any_json
from gym_serve.types.requests import JSON

__all__ = ["MAX_ROW_BYTES", "Located", "Rows", "located"]

MAX_ROW_BYTES = 256 << 20
"""The longest line of a file of rows or rollouts, without its end. What writes such files keeps to it as
well, so that nothing is written that cannot be read."""

Rows = Iterable[JSON] | str | Path
"""Rows, or the path of a JSONL file (plain, ``.gz`` or ``.zst``)."""

_BOM = b"\xef\xbb\xbf"
_OTHER_ENCODINGS = {
    b"\xff\xfe": "UTF-16 or UTF-32",
    b"\xfe\xff": "UTF-16",
    b"\x1f\x8b": "gzip",
    b"\x28\xb5": "zstd",
}


class Located(NamedTuple):
    """A row and its place, or the problem there."""

    where: str
    """``"rows.jsonl:17"``, or ``"row 17"`` of an iterable; counted from 1."""
    row: JSON | None
    problem: str | None = None


def located(rows: Rows, note: Callable[[str], None] = lambda text: None) -> Iterator[Located]:
    """The rows, one at a time; blank lines are skipped.

    Args:
        rows: rows, or the path of a JSONL file.
        note: told of what is unusual but harmless (a byte order mark, CRLF), once per file.

    Raises:
        InvalidRequest: the file cannot be opened.
    """
    return _of_file(Path(rows), note) if isinstance(rows, str | Path) else _of_iterable(rows)


def _of_iterable(rows: Iterable[Any]) -> Iterator[Located]:
    for number, row in enumerate(rows, 1):
        if isinstance(row, dict):
            yield Located(f"row {number}", row)
        else:
            yield Located(f"row {number}", None, f"a row is a JSON object, not {type(row).__name__}")


def _of_file(path: Path, note: Callable[[str], None]) -> Iterator[Located]:
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
                if number == 1 and line and (encoding := _OTHER_ENCODINGS.get(line[:2])):
                    yield Located(where, None, f"the file is {encoding}, not UTF-8 text")
                    return
                for what, unusual in _unusual(line):
                    if unusual and what not in noted:
                        noted.add(what)
                        note(f"{where}: {what}")
                if line is None:
                    yield Located(where, None, f"longer than {MAX_ROW_BYTES >> 20} MiB")
                elif content := line.removeprefix(_BOM).strip():
                    yield _parsed(where, content)
        except CORRUPT as error:
            yield Located(f"{path}:{number + 1}", None, f"the file is damaged from here on: {error}")


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """The lines; None for one that is too long."""
    while line := file.readline(MAX_ROW_BYTES + 1):
        if len(line) <= MAX_ROW_BYTES or line.endswith(b"\n"):
            yield line
            continue
        while (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):
            pass
        yield None


def _unusual(line: bytes | None) -> Iterator[tuple[str, bool]]:
    if line is not None:
        yield "a byte order mark, left out", line.startswith(_BOM)
        yield "lines end in CRLF", line.endswith(b"\r\n")


def _parsed(where: str, line: bytes) -> Located:
    try:
        row = any_json(line)
    except orjson.JSONDecodeError as error:
        return Located(where, None, _explained(line, error))
    if not isinstance(row, dict):
        return Located(where, None, f"a row is a JSON object, not {type(row).__name__}")
    return Located(where, row)


def _explained(line: bytes, error: orjson.JSONDecodeError) -> str:
    """What is wrong with a line that is no JSON."""
    try:
        text = line.decode()
    except UnicodeDecodeError as problem:
        return f"byte {line[problem.start]:#04x} at {problem.start} is not UTF-8"
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as problem:
        if isinstance(problem, _Constant):
            return f"{problem} is no JSON; use null"
    return f"not JSON: {error.msg} at column {error.colno}"


class _Constant(ValueError):
    """NaN or an infinity."""


def _refuse(constant: str) -> NoReturn:
    raise _Constant(constant)

r"""Reads JSON exactly: integers of any size, and texts with half of a surrogate pair.

orjson makes floats of integers beyond 64 bits; where there can be some, pydantic's parser reads them.

A model can write half of a surrogate pair, and servers send it as an escape (``"\ud83d"``), which no UTF-8
can hold. `lenient_json` reads it, and `mended` makes U+FFFD of it, or the character where both halves met;
`Pieces` does so in streams. Bytes that are no UTF-8, as of a token that was cut in half, are U+FFFD at once.

The arguments of a call as models write them: none at all, and nests that nobody could send on.
"""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from collections.abc import Callable
from typing import Any

import orjson
from pydantic_core import from_json

_ZEROS = bytes(ord("0") if ord("0") <= byte <= ord("9") else byte for byte in range(256))
_LONG = b"0" * 19  # digits; any integer of fewer fits into 64 bits
_LONG_NUMBER = re.compile(rb"(?:^|[\s:,\[])-?[0-9]{19}")  # not those of an id, nor behind a point
_HALF = re.compile("[\ud800-\udfff]")


def exact_json(text: str | bytes) -> Any:
    """The value that a text stands for, with every digit of its integers.

    The search for long ones takes a microsecond per KB (a regular expression twenty). Raises `ValueError` for
    what is no JSON, or has a number that Python has not, such as 1e999 or one of 4,301 digits.
    """
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    is_long = _LONG in data.translate(_ZEROS) and _LONG_NUMBER.search(data)
    return _read(data) if is_long else orjson.loads(data)


def lenient_json(data: bytes) -> Any:
    """`exact_json`, and halves of surrogate pairs stay in the texts. Raises `ValueError` if it is no JSON."""
    try:
        return exact_json(data)
    except ValueError:
        if b"\\u" not in data and data.isascii():
            raise
        value = json.loads(data.decode("utf-8", "replace"), parse_constant=_refuse)
        json.dumps(value, allow_nan=False)  # which 1e999 has become
        return value


def no_json(data: bytes, error: ValueError) -> str:
    """The part of ``data`` that is no JSON, from shortly before the place that ``error`` names, and why."""
    start = max(0, getattr(error, "pos", 0) - 20)
    return f"{data[start : start + 200]!r} ({error})"


def foreign_json(data: bytes) -> Any:
    """`lenient_json` with its texts `mended`: what another program answered, behind a byte order mark too."""
    data = data.removeprefix(BOM_UTF8)
    try:
        return exact_json(data)
    except ValueError:
        return mended(lenient_json(data))


def exact_bytes(value: Any, option: int = 0, default: Callable[[Any], Any] | None = None) -> bytes:
    """A value as JSON, with every digit of its integers, and its texts `mended`.

    ``option`` is orjson's, of indentation, order and the line's end; ``default`` makes JSON of what is none.
    Raises `TypeError`, `ValueError`: JSON cannot hold it, or it nests too deeply.
    """
    try:
        return orjson.dumps(value, default, option)
    except TypeError:  # also for integers over 64 bits, halves of surrogate pairs, and 255 levels
        in_order, indent = bool(option & orjson.OPT_SORT_KEYS), 2 if option & orjson.OPT_INDENT_2 else None
    try:
        text = json.dumps(
            value, ensure_ascii=False, allow_nan=False, sort_keys=in_order, indent=indent, default=default
        )
    except RecursionError:
        raise TypeError("it nests too deeply to be written") from None
    return whole_text(text).encode() + (b"\n" if option & orjson.OPT_APPEND_NEWLINE else b"")


def mended(value: Any) -> Any:
    """A value whose texts are valid Unicode: two halves of a pair become their character, one U+FFFD."""
    if isinstance(value, str):
        return whole_text(value)
    if isinstance(value, dict):
        return {whole_text(key): mended(each) for key, each in value.items()}
    if isinstance(value, list):
        return list(map(mended, value))
    return value


def whole_text(text: str) -> str:
    """`mended` for one text."""
    if not _HALF.search(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Pieces:
    """Texts that come in pieces, as of a stream, without halves of pairs.

    Half of a pair at the end of a piece waits for the next piece of its text. It is U+FFFD if a piece of
    another text, or the end, comes first.
    """

    def __init__(self) -> None:
        self._text: Any = None
        self._half = ""

    def are_whole(self, *pieces: str) -> bool:
        """Whether nothing waits, and pieces may be passed on as they are."""
        return not self._half and not any(map(_HALF.search, pieces))

    def add(self, text: Any, piece: str) -> list[tuple[Any, str]]:
        """The pieces that can be passed on, each with its text."""
        ready = []
        if text == self._text:
            piece = self._half + piece
        elif self._half:
            ready.append((self._text, "\ufffd"))
        self._text = text
        self._half = piece[-1:] if "\ud800" <= piece[-1:] <= "\udbff" else ""
        if piece := whole_text(piece.removesuffix(self._half)):
            ready.append((text, piece))
        return ready


def _read(data: bytes) -> Any:
    value = from_json(data, allow_inf_nan=False)
    json.dumps(value, allow_nan=False)  # which 1e999 has become
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


MAX_DEPTH = 100
"""Levels of arguments that are read. Python's json gives up near 1,000, less what the stack has already."""

_SCALAR = (str, int, float, type(None))


def is_empty(arguments: Any) -> bool:
    """Whether a call has no arguments: they are missing, a blank text or null, as for a tool without any."""
    return arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null"))


def is_shallow(value: Any, levels: int = MAX_DEPTH) -> bool:
    """Whether a JSON value nests at most so many levels."""
    level = [value]
    for _ in range(levels):
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [item for items in inner if not isinstance(items, _SCALAR) for item in items]
        if not level:
            return True
    return False

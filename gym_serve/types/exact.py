"""Reading JSON with integers of any size, as a model may write them into the arguments of a call.

orjson, which reads all else, makes floats of integers beyond 64 bits, so a tool that works with primes would
silently be given another number, and it refuses those of over 308 digits, which a verifier that tells what
was called passes on. Where either can happen, pydantic's parser reads them; elsewhere it is never asked.
"""

from __future__ import annotations

import json
import re
from typing import Any

import orjson
from pydantic_core import from_json

_LONG = re.compile(rb"[0-9]{19}")


def exact_json(text: str | bytes) -> Any:
    """The value that a text stands for, with every digit of its integers.

    The search for long ones costs a short text a microsecond, and a long one as much as reading it.

    Raises:
        ValueError: it is no JSON, or has a number that Python has not, such as 1e999 or one of 4,301 digits.
    """
    data = text.encode() if isinstance(text, str) else text
    return _read(data) if _LONG.search(data) else orjson.loads(data)


def any_json(data: bytes) -> Any:
    """The value that a text stands for; its integers beyond 64 bits become floats, if floats go so far.

    Raises:
        orjson.JSONDecodeError: as for `exact_json`.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        try:
            return _read(data)
        except ValueError:
            raise error from None


def _read(data: bytes) -> Any:
    value = from_json(data, allow_inf_nan=False)
    json.dumps(value, allow_nan=False)  # which 1e999 has become
    return value

"""Parts of a verdict's ``reason``: bounded excerpts of what a model wrote, safe to print."""

from __future__ import annotations

import json
from typing import Any

EXCERPT_CHARS = 80  # characters of an excerpt
_LISTED = 5  # values that are shown of a list
_EDGE = 4  # how many times as much is looked at, as white space is taken together


def excerpt(value: Any, limit: int = EXCERPT_CHARS) -> str:
    """A value (JSON, unless it is a text) in quotes and in one line; of more than ``limit`` characters, its
    beginning and its end. Control characters, directions and half surrogate pairs become spaces.
    """
    text = value if isinstance(value, str) else _json(value)
    edge = _EDGE * limit
    if len(text) <= 2 * edge:
        line = _line(text)
        if len(line) <= limit:
            return f"'{line}'"
        first = last = line
    else:
        first, last = _line(text[:edge]), _line(text[-edge:])
    half = limit // 2
    return f"'{first[:half]} … {last[-half:]}'"


def ending(text: str) -> str:
    """How a text ends, as a part of a sentence: "the text ends 'C: Shakespeare'", or that it is empty."""
    if not text.strip():
        return "the response has no text"
    edge = _EDGE * EXCERPT_CHARS
    line = _line(text[-edge:])
    whole = len(line) <= EXCERPT_CHARS and len(text) <= edge
    return f"the text ends '{line if whole else '…' + line[1 - EXCERPT_CHARS :]}'"


def not_in_the_box(expected: str, boxed: str | None, text: str) -> str:
    """Why a text without the expected answer in its box is wrong."""
    got = f"none; {ending(text)}" if boxed is None else excerpt(boxed)
    return f"expected {excerpt(expected)} in a box, got {got}"


def listed(values: Any) -> str:
    """The first values of a list as excerpts, and how many more there are; ``none`` for an empty one."""
    values = list(values)
    more = f" and {len(values) - _LISTED} more" if len(values) > _LISTED else ""
    return ", ".join(excerpt(value, 40) for value in values[:_LISTED]) + more or "none"


def listed_calls(calls: list[dict[str, Any]]) -> str:
    """``function_call`` items as `listed` ones, ``name(arguments)``."""
    return listed(f"{call.get('name')}({call.get('arguments')})" for call in calls)


def _line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} that is too deep to show"

"""The arguments of a call as models write them: none at all, and nests that nobody could send on."""

from __future__ import annotations

from typing import Any

MAX_DEPTH = 100
"""Levels of arguments that are read. Python's json gives up near 1,000, less what the stack has already."""

_SCALAR = (str, int, float, type(None))


def is_empty(arguments: Any) -> bool:
    """Whether a call has no arguments: they are missing, a blank text or null, as for a tool without any."""
    return arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null"))


def is_shallow(value: Any) -> bool:
    """Whether a JSON value nests at most `MAX_DEPTH` levels."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [item for items in inner if not isinstance(items, _SCALAR) for item in items]
        if not level:
            return True
    return False

"""What verifiers of function calls share: the arguments that a model wrote, and equality of JSON values."""

from __future__ import annotations

import json
from typing import Any

from gym_serve.types.requests import JSON

__all__ = ["MAX_DEPTH", "arguments_of", "decoded_arguments", "same_value"]

MAX_DEPTH = 100
"""Levels of arguments that are read."""

_SCALAR = (str, int, float, type(None))


def arguments_of(call: JSON) -> JSON | None:
    """The arguments of a ``function_call`` item; None unless they are a JSON object."""
    arguments = decoded_arguments(call)
    return arguments if isinstance(arguments, dict) else None


def decoded_arguments(call: JSON) -> Any:
    """The arguments of a ``function_call`` item, be they an object or not; None if they are no JSON.

    A nest of more than `MAX_DEPTH` levels counts as none: it could be read, but not be sent on.
    """
    text = call.get("arguments")
    if not isinstance(text, str):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # also for numbers of thousands of digits
        return None
    return value if _is_shallow(value) else None


def _is_shallow(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [item for items in inner if not isinstance(items, _SCALAR) for item in items]
        if not level:
            return True
    return False


def same_value(first: Any, second: Any) -> bool:
    """Whether two JSON values are equal: 1 and 1.0 are, 1 and true are not."""
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same_value(first[key], second[key]) for key in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same_value, first, second))
    return isinstance(first, bool) == isinstance(second, bool) and bool(first == second)

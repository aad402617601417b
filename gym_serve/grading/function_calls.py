"""What verifiers of function calls share: arguments that a model wrote, equal JSON values, pairs of calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gym_serve.types.exact import MAX_DEPTH, is_empty, is_shallow
from gym_serve.types.requests import JSON


def arguments_of(call: JSON) -> JSON | None:
    """The arguments of a ``function_call`` item; None unless they are a JSON object."""
    arguments = decoded_arguments(call)
    return arguments if isinstance(arguments, dict) else None


def decoded_arguments(call: JSON) -> Any:
    """The arguments of a ``function_call`` item; None if they are no JSON, or nest more than `MAX_DEPTH`
    levels.
    """
    try:
        return decode_arguments(call.get("arguments"))
    except ValueError:
        return None


def decode_arguments(text: Any) -> Any:
    """The JSON value in ``text``; a blank text or null, as a call without parameters may have, is ``{}``.
    Raises ValueError: ``text`` is no JSON, nests more than `MAX_DEPTH` levels, or has a number of thousands
    of digits.
    """
    if is_empty(text):
        return {}
    if not isinstance(text, str):
        raise ValueError("arguments must be a string of JSON")
    try:
        value = json.loads(text)
    except RecursionError:
        value = None
    else:
        if is_shallow(value):
            return value
    raise ValueError(f"arguments nest more than {MAX_DEPTH} levels")


def same_value(first: Any, second: Any) -> bool:
    """Whether two JSON values are equal: 1 and 1.0 are, 1 and true are not."""
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same_value(first[key], second[key]) for key in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same_value, first, second))
    return isinstance(first, bool) == isinstance(second, bool) and bool(first == second)


def is_call(name: Any, arguments: Any, expected: str, values: JSON) -> bool:
    """Whether a call is of the expected function, and has these values among its arguments."""
    return (
        name == expected
        and isinstance(arguments, dict)
        and all(key in arguments and same_value(arguments[key], value) for key, value in values.items())
    )


def pair_up(candidates: Sequence[Sequence[int]]) -> set[int]:
    """The expected calls that can each have an actual call of their own, by index: a maximum bipartite
    matching (Kuhn's algorithm). Taking the first that fits could leave another expected call without any.
    ``candidates`` are, for each expected call, the indices of the actual calls that fit it.
    """
    owner: dict[int, int] = {}
    dead: set[int] = set()  # calls that a search has tried in vain can never be given up

    def assign(expected: int) -> bool:
        tried = set(dead)
        path = [(expected, -1, iter(candidates[expected]))]  # each with the call that it gives up
        while path:
            free = next((call for call in candidates[path[-1][0]] if call not in owner), None)
            if free is not None:
                for one, given_up, _ in reversed(path):
                    owner[free], free = one, given_up
                return True
            call = next((call for call in path[-1][2] if call not in tried), None)
            if call is None:
                path.pop()
            else:
                tried.add(call)
                path.append((owner[call], call, iter(candidates[owner[call]])))
        dead.update(tried)
        return False

    order = sorted(range(len(candidates)), key=lambda expected: len(candidates[expected]))
    return {expected for expected in order if assign(expected)}

"""Valid JSON bodies with one of their values replaced by anything: what a test of robustness starts from."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

__all__ = ["nested", "paths", "replaced", "wrong"]

JSON = dict[str, Any]
Path = tuple[str | int, ...]

_WORDS = [
    "text",
    "refusal",
    "tool_use",
    "tool_result",
    "thinking",
    "function",
    "none",
    "user",
    "assistant",
    "",
]
_KEYS = [*_WORDS[:5], "type", "content", "url", "name", "tools", "data", "INVALID_JSON"]
_SCALAR = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([10**400, 2**63, 2**64, -(2**63) - 1, 0, -1, 1.5, "\ud83d", *_WORDS])
    | st.text(max_size=4)
)
_ANYTHING = st.recursive(
    _SCALAR,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(_KEYS) | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)


def paths(value: Any, at: Path = ()) -> Iterator[Path]:
    """The places of all values in a value."""
    if at:
        yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from paths(part, (*at, key))


def replaced(value: JSON, at: Path, by: Any) -> JSON:
    """A copy with another value in a place."""
    copied: Any = copy.deepcopy(value)
    place = copied
    for key in at[:-1]:
        place = place[key]
    place[at[-1]] = by
    return copied  # type: ignore[no-any-return]


def nested(depth: int) -> Any:
    """A list in a list, and so on."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def wrong(sample: JSON) -> st.SearchStrategy[JSON]:
    """The sample with one of its values replaced."""
    return st.builds(replaced, st.just(sample), st.sampled_from(list(paths(sample))), _ANYTHING)

"""Templates of benchmarks: prompts and mapped fields, by Jinja's sandbox.

A prompt is a template (``{{ question }}``); a mapped field is an expression, and keeps the type of its value
(``choices.text[0]``, ``answer | search('#### (.*)')``). Both read the columns of one row, which are data:
nothing in them is evaluated. ``_`` is the whole row, for a column that is no identifier (``_['Correct
Answer']``). Jinja's own filters are there, and `FILTERS`.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import regex
from jinja2 import StrictUndefined, TemplateError, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gym_serve.types.errors import InvalidRequest

_SEARCH_SECONDS = 1.0


def search(text: str, pattern: str) -> str:
    """The last match of a pattern: its first group, or all of it without one. Raises ValueError: none."""
    matches = list(regex.finditer(pattern, text, timeout=_SEARCH_SECONDS))
    if not matches:
        raise ValueError(f"no match of {pattern!r} in {text[:80]!r}")
    return str(matches[-1].group(1 if matches[-1].re.groups else 0)).strip()


def letter(position: int) -> str:
    """A for 0, B for 1, ..."""
    return string.ascii_uppercase[int(position)]


def lettered(texts: Sequence[str]) -> list[dict[str, str]]:
    """Options as `mcqa` reads them: ``[{"A": text}, {"B": text}]``."""
    return [{letter(position): str(text)} for position, text in enumerate(texts)]


def lines(options: Sequence[Mapping[str, str]]) -> str:
    """Lettered options, one on each line: ``A: text``."""
    return "\n".join(f"{name}: {text}" for option in options for name, text in option.items())


def shuffled(values: Sequence[Any], seed: object) -> list[Any]:
    """The values in an order that the seed decides: the same on every machine."""
    return sorted(values, key=lambda value: random.Random(f"{seed}\0{value}").random())


FILTERS: dict[str, Callable[..., Any]] = {
    "from_json": json.loads,
    **{filter_.__name__: filter_ for filter_ in (search, letter, lettered, lines, shuffled)},
}

_ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
_ENVIRONMENT.filters.update(FILTERS)


def render(template: str, row: Mapping[str, Any]) -> str:
    """A text, with the fields of a row. Raises `InvalidRequest`: the template is wrong, or does not fit the
    row."""
    return str(_evaluated(template, lambda: _template(template).render({**row, "_": row})))


def evaluate(expression: str, row: Mapping[str, Any]) -> Any:
    """The value of an expression, for a row. Raises `InvalidRequest`: as for `render`."""
    value = _evaluated(expression, lambda: _expression(expression)({**row, "_": row}))
    if isinstance(value, Undefined):
        raise InvalidRequest(f"`{expression}`: the row has no such field; it has {', '.join(row)}")
    return value


@lru_cache(maxsize=256)
def _template(text: str) -> Any:
    return _ENVIRONMENT.from_string(text)


@lru_cache(maxsize=256)
def _expression(text: str) -> Any:
    return _ENVIRONMENT.compile_expression(text, undefined_to_none=False)


def _evaluated(source: str, value: Callable[[], Any]) -> Any:
    try:
        return value()
    # A filter gets whatever a row has, so any of these may come out of it.
    except (TemplateError, ValueError, TypeError, LookupError, ArithmeticError, TimeoutError) as error:
        shown = source if len(source) <= 80 else f"{source[:80]}..."
        raise InvalidRequest(f"`{shown}` does not fit this row: {error}") from None

"""From a model's text to a value: JSON, YAML, XML, TOML and CSV.

The text is hostile. Whatever a parser raises becomes `Unparsable`; entities, documents that grow when
they are expanded, deep nesting and texts on which a parser takes quadratic time are refused by size
before they cost anything.
"""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Callable
from typing import Any, Literal
from xml.parsers.expat import ExpatError

import xmltodict
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["MAX_CHARS", "Format", "Unparsable", "parse_text"]

Format = Literal["json", "yaml", "xml", "toml", "csv"]

MAX_CHARS: dict[Format, int] = {
    "json": 100_000,
    "yaml": 100_000,
    "xml": 100_000,
    "toml": 20_000,  # tomllib takes quadratic time on dotted keys
    "csv": 100_000,
}
"""Characters of a document that are read."""

_MAX_NODES = 20_000
_MAX_DEPTH = 100
_MAX_DIGITS = 4_300  # Python refuses to print more
_MAX_BITS = int(_MAX_DIGITS * math.log2(10))
_MAX_ALIASES = 10  # a document of n aliases can grow by e^(n/e) when it is expanded

_YamlLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Unparsable(ValueError):
    """The text is no document of its format, or one that is too large."""


def parse_text(text: str, format_: Format) -> Any:
    """The value that ``text`` denotes.

    Args:
        text: the whole text; prose or a code fence around the document makes it unparsable.
        format_: XML becomes what xmltodict makes of it (``@attribute``, ``#text``, a list for repeated
            elements), CSV a list with an object of strings per row.

    Raises:
        Unparsable: it denotes none, or is larger than anything that a row asks for.
    """
    if len(text) > MAX_CHARS[format_]:
        raise Unparsable(f"longer than {MAX_CHARS[format_]} characters")
    try:
        value = _PARSERS[format_](text)
    except Unparsable:
        raise
    except (ValueError, ExpatError, csv.Error, yaml.YAMLError, RecursionError) as error:
        raise Unparsable(f"{type(error).__name__}: {str(error)[:200]}") from None
    _check_size(value)
    return value


def _json(text: str) -> Any:
    return json.loads(text, parse_constant=_no_number)


def _no_number(name: str) -> Any:
    raise Unparsable(f"{name} is no JSON")


def _yaml(text: str) -> Any:
    # The events first, as they come one by one: building the value is where small texts grow.
    depth = aliases = 0
    for event in yaml.parse(text, Loader=_YamlLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        aliases += isinstance(event, yaml.AliasEvent)
        if depth > _MAX_DEPTH or aliases > _MAX_ALIASES:
            raise Unparsable("nested too deeply, or too many aliases")
    try:
        return yaml.load(text, Loader=_YamlLoader)
    except (TypeError, AttributeError, OverflowError, LookupError) as error:
        # PyYAML's constructors of dates and numbers let some of these through.
        raise Unparsable(f"{type(error).__name__}: {error}") from None


def _xml(text: str) -> Any:
    return xmltodict.parse(text)  # which refuses entities, so nothing in it can grow


def _csv(text: str) -> list[dict[str, str]]:
    header, *rows = filter(None, csv.reader(io.StringIO(text)))
    # A field without a column gets a name, so that the validator sees it; one that lacks is missing.
    names = header + [
        f"column {number}" for number in range(len(header) + 1, max(map(len, rows), default=0) + 1)
    ]
    return [dict(zip(names, fields, strict=False)) for fields in rows]


_PARSERS: dict[Format, Callable[[str], Any]] = {
    "json": _json,
    "yaml": _yaml,
    "xml": _xml,
    "toml": tomllib.loads,
    "csv": _csv,
}


def _check_size(value: Any) -> None:
    # Shared parts count each time that they occur: a validator would walk through them as often.
    nodes = 0
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            nodes += 1
            if isinstance(item, int) and item.bit_length() > _MAX_BITS:
                raise Unparsable(f"a number of more than {_MAX_DIGITS} digits")
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
            if nodes + len(inner) > _MAX_NODES:
                raise Unparsable(f"more than {_MAX_NODES} values")
        if not inner:
            return
        level = inner
    raise Unparsable(f"nested deeper than {_MAX_DEPTH} levels")

"""What a worker process of structured_outputs does: parse a model's text and validate the value.

The text is hostile. Every exception of a parser becomes `Unparsable`. Entities, documents that grow when they
are expanded, deep nesting, and texts on which a parser takes quadratic time are refused beforehand.

Values of XML and CSV are converted to the types that the schema asks for; one that cannot be stays a string.
"""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Callable
from typing import Any, Literal, TypedDict
from xml.parsers.expat import ExpatError

import xmltodict
import yaml
from typing_extensions import NotRequired

from gym_serve.environments.structured_outputs.schemas import schema_of
from gym_serve.types.errors import InvalidRequest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Format = Literal["json", "yaml", "xml", "toml", "csv"]

MAX_CHARS: dict[Format, int] = {
    "json": 100_000,
    "yaml": 100_000,
    "xml": 100_000,
    "toml": 20_000,  # tomllib takes quadratic time on dotted keys
    "csv": 100_000,
}  # characters of a document that are read

_MAX_NODES = 20_000
_MAX_DEPTH = 100
_MAX_DIGITS = 4_300  # Python refuses to print more
_MAX_BITS = int(_MAX_DIGITS * math.log2(10))
_MAX_ALIASES = 10  # a document of n aliases can grow by e^(n/e) when it is expanded

_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Unparsable(ValueError):
    """The text is not a document of its format, or is too large."""


class _YamlLoader(_SafeLoader):  # type: ignore[misc]
    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        _check_keys([(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
        return super().construct_mapping(node, deep)


def parse_text(text: str, format_: Format) -> Any:
    """The value that the whole text denotes; of XML what xmltodict makes of it, of CSV a list with an object
    of strings per row. Raises Unparsable: it denotes none, or is larger than anything that a row asks for.
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
    return json.loads(text, parse_constant=_no_number, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _check_keys([key for key, _ in pairs])
    return dict(pairs)


def _check_keys(keys: list[Any]) -> None:
    if len(set(keys)) < len(keys):
        raise Unparsable("a key stands twice in an object")


def _no_number(name: str) -> Any:
    raise Unparsable(f"{name} is not valid JSON")


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


def _csv(text: str) -> list[dict[str, str]]:
    header, *rows = filter(None, csv.reader(io.StringIO(text)))
    _check_keys(header)
    # A field without a column gets a name, so that the validator sees it; one that lacks is missing.
    longest = max(map(len, rows), default=0)
    names = header + [f"column {number}" for number in range(len(header) + 1, longest + 1)]
    return [dict(zip(names, fields, strict=False)) for fields in rows]


_PARSERS: dict[Format, Callable[[str], Any]] = {
    "json": _json,
    "yaml": _yaml,
    "xml": xmltodict.parse,  # it refuses entities, so nothing in it can grow
    "toml": tomllib.loads,
    "csv": _csv,
}


def _check_size(value: Any) -> None:
    # Shared parts count each time that they occur: a validator would walk through them as often.
    nodes, level = 0, [value]
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


_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def coerce_xml(value: Any, schema: Any) -> Any:
    """What xmltodict made of XML, with the types of ``schema``.

    An element that repeats is a list, also with the elements inside a wrapper (``<tags><tag>``), and
    also if there is one of them, or none. An empty element is an empty string where one is asked for.
    """
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "object" and isinstance(value, dict):
        properties = schema.get("properties", {})
        return {key: coerce_xml(item, properties.get(key)) for key, item in value.items()}
    if kind == "array":
        if isinstance(value, dict) and len(value) == 1:
            (value,) = value.values()
        items = value if isinstance(value, list) else [] if value is None else [value]
        return [coerce_xml(item, schema.get("items")) for item in items]
    if value is None and kind == "string":
        return ""
    return _scalar(value, kind) if isinstance(value, str) else value


def coerce_csv(rows: list[dict[str, str]], schema: Any) -> list[dict[str, Any]]:
    """Rows of CSV with the types of ``schema``: that of the list, or of one row."""
    row_schema = schema.get("items", schema) if isinstance(schema, dict) else {}
    properties = row_schema.get("properties", {}) if isinstance(row_schema, dict) else {}
    return [{key: _cell(value, properties.get(key)) for key, value in row.items()} for row in rows]


def _cell(value: str, schema: Any) -> Any:
    kind = schema.get("type") if isinstance(schema, dict) else None
    if not value:
        return None if isinstance(kind, list) and "null" in kind else value
    return _scalar(value, kind)


def _scalar(text: str, kind: Any) -> Any:
    """``text`` as the type ``kind``, or the first of a list of types that it can be read as."""
    if isinstance(kind, list):
        values = (_scalar(text, one) for one in kind if one not in ("null", "string"))
        return next((value for value in values if not isinstance(value, str)), text)
    if kind == "boolean":
        return _BOOLEANS.get(text.lower(), text)
    try:
        if kind == "integer":
            return int(text)
        if kind == "number" and math.isfinite(number := float(text)):
            return number
    except ValueError:
        pass  # the validator says what is wrong with it
    return text


Fault = Literal[
    "parse_error", "validation_error", "tool_arguments_parse_error", "missing_tool_payload_key", "invalid_row"
]


class Document(TypedDict):
    """What is to be checked."""

    schema: str
    strict: bool  # every listed property is required, and no other is allowed
    text: str  # a document, or the arguments of a function call
    format: Format | None  # format of a document; None for arguments
    key: str | None  # the argument that holds the value; None if all arguments are the value
    coerce: bool  # read the text of XML elements as the types of the schema


class Checked(TypedDict):
    """The result; empty if the value fits."""

    fault: NotRequired[Fault]  # what is wrong with it; ``invalid_row`` if it is the schema
    message: NotRequired[str]


def check(document: Document) -> Checked:
    """Parse a text, and validate its value."""
    try:
        schema = schema_of(document["schema"], document["strict"])
        value: Any = parse_text(document["text"], document["format"] or "json")
        if document["format"] == "csv":
            value = coerce_csv(value, schema.schema)
        elif document["format"] == "xml" and document["coerce"]:
            value = coerce_xml(value, schema.schema)
        if (key := document["key"]) is not None:
            if not isinstance(value, dict) or key not in value:
                message = f"there is no argument {json.dumps(key)}"
                return {"fault": "missing_tool_payload_key", "message": message}
            value = value[key]
        problem = schema.problem_of(value)
    except Unparsable as error:
        fault: Fault = "parse_error" if document["format"] else "tool_arguments_parse_error"
        return {"fault": fault, "message": str(error)}
    except InvalidRequest as error:
        return {"fault": "invalid_row", "message": error.message}
    return {} if problem is None else {"fault": "validation_error", "message": problem}


def warm_up() -> None:
    """Import the parsers, and build the schema of schemas."""
    schema = '{"type": "object"}'
    check({"schema": schema, "strict": True, "text": "{}", "format": "json", "key": None, "coerce": False})


def work(request: Document) -> Checked:
    """`check`, with a message that is not too long to send."""
    checked = check(request)
    return {**checked, "message": checked["message"][:500]} if "message" in checked else checked

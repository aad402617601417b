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
import re
import sys
from collections.abc import Callable
from itertools import islice
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
            if isinstance(item, float) and math.isnan(item):  # which every bound of a schema lets pass
                raise Unparsable("NaN is no number of JSON")
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


_NUMBER = re.compile(r"\s*[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?\s*")
"""As XML Schema has it; Python reads ``1_000`` and the digits of all scripts too."""
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def coerce_xml(value: Any, schema: Any, root: Any = None) -> Any:
    """What xmltodict made of XML, with the types of ``schema``, which is a part of ``root``.

    An element that repeats is a list, also with the elements inside a wrapper (``<tags><tag>``), and
    also if there is one of them, or none. An empty element is an empty string where one is asked for.
    """
    root = schema if root is None else root
    kinds, properties, inner = _read_as(schema, root)
    if "object" in kinds and isinstance(value, dict):
        return {key: coerce_xml(item, properties.get(key, {}), root) for key, item in value.items()}
    is_list = isinstance(value, list | dict) or kinds <= {"array", "object", "null"}
    if "array" in kinds and is_list and (value is not None or "null" not in kinds):
        # A wrapper, unless it is a list of one object with one property.
        if isinstance(value, dict) and len(value) == 1 and not value.keys() & _read_as(inner, root)[1].keys():
            (value,) = value.values()
        items = value if isinstance(value, list) else [] if value is None else [value]
        return [coerce_xml(item, inner, root) for item in items]
    if value is None and "string" in kinds and "null" not in kinds:
        return ""
    return _scalar(value, kinds) if isinstance(value, str) else value


def coerce_csv(rows: list[dict[str, str]], schema: Any) -> list[dict[str, Any]]:
    """Rows of CSV with the types of ``schema``: that of the list, or of one row."""
    kinds, properties, inner = _read_as(schema, schema)
    if not properties or "array" in kinds:
        properties = _read_as(inner, schema)[1]
    columns = {key: _read_as(column, schema)[0] for key, column in properties.items()}
    return [{key: _cell(value, columns.get(key, set())) for key, value in row.items()} for row in rows]


def _read_as(schema: Any, root: Any) -> tuple[set[str], dict[str, Any], Any]:
    """The types that a schema allows, its properties, and the schema of its items: those of its alternatives
    and of what it refers to within ``root`` too."""
    kinds: set[str] = set()
    properties: dict[str, Any] = {}
    inner: Any = {}
    parts = [schema]
    for part in islice(parts, _MAX_PARTS):  # it grows on the way
        if not isinstance(part, dict):
            continue
        kind = part.get("type")
        kinds |= {kind} if isinstance(kind, str) else set(kind or ())
        if kind is None:
            values = [*part.get("enum", ()), *([part["const"]] if "const" in part else ())]
            kinds |= {_KIND_OF[type(one)] for one in values}
        properties |= part.get("properties", {})
        inner = part.get("items", inner)
        parts += [*part.get("anyOf", ()), *part.get("oneOf", ()), *part.get("allOf", ())]
        parts += [_at(root, part["$ref"])] if "$ref" in part else []
    return kinds, properties, inner


def _at(root: Any, reference: str) -> Any:
    place = root
    for step in reference.removeprefix("#").split("/")[1:]:
        place = place.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(place, dict) else None
    return place


_MAX_PARTS = 100
_KIND_OF: dict[type, str] = {
    **{str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"},
    **{dict: "object", list: "array"},
}


def _cell(value: str, kinds: set[str]) -> Any:
    if not value:
        return None if "null" in kinds else value
    return _scalar(value, kinds)


def _scalar(text: str, kinds: set[str]) -> Any:
    """``text`` as a type that it can be read as; else itself, and the validator says what is wrong."""
    if (
        "boolean" in kinds
        and text.lower() in _BOOLEANS
        and not (text.isdigit() and kinds & {"integer", "number"})
    ):
        return _BOOLEANS[text.lower()]
    if not _NUMBER.fullmatch(text):
        return text
    try:
        if "integer" in kinds:
            return int(text)
    except ValueError:
        pass
    return number if "number" in kinds and math.isfinite(number := float(text)) else text


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

"""Schemas: made strict on request, and validated against without trusting the value.

A broken one is `InvalidRequest`, and it can refer to nothing outside itself. Three things differ from
jsonschema, as the value is a model's: patterns run in the `regex` package, which stops at a time limit; a
`$ref` is followed once for each part of the value; a set checks whether items are unique, in linear time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator
from contextvars import ContextVar
from fractions import Fraction
from functools import lru_cache
from typing import Any

import jsonschema
import referencing
import referencing.exceptions
import regex
from jsonschema.protocols import Validator

from gym_serve.types.errors import InvalidRequest
from gym_serve.types.requests import JSON

_Errors = Iterator[jsonschema.ValidationError]

_PATTERN_SECONDS = 1.0
_SUBSCHEMAS = ("items", "additionalProperties", "contains")
_MAPS_OF_SUBSCHEMAS = ("properties", "patternProperties", "$defs", "definitions")


class Schema:
    """A schema (draft 2020-12, as JSON); ``strict``: every listed property is required, and no other is
    allowed. Raises InvalidRequest: it is not valid.
    """

    def __init__(self, source: str, *, strict: bool = True) -> None:
        try:
            self.schema = _strict(json.loads(source)) if strict else json.loads(source)
            # Without its check of patterns, which are of ECMA-262 and not Python's.
            _Validator.check_schema(self.schema, format_checker=jsonschema.FormatChecker(formats=()))
        except (ValueError, RecursionError, jsonschema.SchemaError) as error:
            raise InvalidRequest(f"`schema_str` is not a valid JSON schema: {str(error)[:500]}") from None
        validator = _WithIds if '"$id"' in source else _Validator
        self._validator: Validator = validator(self.schema, registry=referencing.Registry())

    def problem_of(self, value: Any) -> str | None:
        """Why ``value`` does not fit, in a sentence; None if it fits. Raises InvalidRequest: the schema
        refers to what is not there.
        """
        token = _followed.set({})
        try:
            error = next(self._validator.iter_errors(value), None)
        except referencing.exceptions.Unresolvable as unresolvable:
            raise InvalidRequest(f"schema_str: cannot resolve {unresolvable}") from None
        except jsonschema.ValidationError as unfit:
            return unfit.message
        except (RecursionError, TypeError, ValueError, ArithmeticError) as unfit:
            # YAML's keys need not be strings, and a number may be larger than a float.
            return f"{type(unfit).__name__}: {unfit}"
        finally:
            _followed.reset(token)
        return None if error is None else f"{error.json_path}: {error.message}"


@lru_cache(maxsize=1024)
def schema_of(source: str, strict: bool) -> Schema:
    """`Schema` of a text; the repeats of a row share it."""
    return Schema(source, strict=strict)


def _strict(schema: Any) -> Any:
    # Not inside allOf, anyOf, if, not and the like: they speak of a part of the same object.
    if not isinstance(schema, dict):
        return schema
    strict = dict(schema)
    for key in _SUBSCHEMAS:
        if key in schema:
            strict[key] = _strict(schema[key])
    for key in _MAPS_OF_SUBSCHEMAS:
        if isinstance(schema.get(key), dict):
            strict[key] = {name: _strict(inner) for name, inner in schema[key].items()}
    if isinstance(schema.get("properties"), dict):
        strict |= {"required": list(schema["properties"]), "additionalProperties": False}
    return strict


# Patterns


def _matches(pattern: str, text: str) -> bool:
    try:
        match = regex.search(ecma(pattern), text, timeout=_PATTERN_SECONDS, concurrent=True)
        return match is not None
    except TimeoutError:
        raise jsonschema.ValidationError(f"{text[:80]!r} took too long to match {pattern!r}") from None
    except regex.error as error:
        raise InvalidRequest(f"schema_str: the pattern {pattern!r} is invalid: {error}") from None


_ECMA = re.compile(r"\\k<\w{1,99}>|\\u\{[0-9A-Fa-f]{1,8}\}|\\c[A-Za-z]|\\.|\[\^?\]?|\]|\$", re.DOTALL)
_ASCII = {r"\d": "0-9", r"\w": "A-Za-z0-9_"}


@lru_cache(4096)
def ecma(pattern: str) -> str:
    """A pattern of ECMA-262, as JSON Schema has them, in the syntax of the `regex` package.

    There ``\\d`` and ``\\w`` are ASCII, U+FEFF is a space, and ``$`` is the very end. The package knows
    the rest, such as ``\\p{L}`` and named groups.
    """
    in_class = False

    def translated(match: re.Match[str]) -> str:
        nonlocal in_class
        text = match[0]
        if text == "$":
            return text if in_class else r"\Z"
        if text.startswith(r"\k<"):
            return f"(?P={text[3:-1]})"
        if text.startswith((r"\u{", r"\c")) and len(text) > 2:
            code = ord(text[2]) % 32 if text[1] == "c" else int(text[3:-1], 16)
            return rf"\U{code:08x}"
        if text == r"\s" or (text == r"\S" and not in_class):
            return r"\s\ufeff" if in_class else f"[{'^' * text.isupper()}\\s\\ufeff]"
        if text == "]":
            in_class = False
        elif text[0] == "[" and not in_class:
            in_class = True
        elif text.lower() in _ASCII:
            own = _ASCII[text.lower()]
            if text.islower():
                return own if in_class else f"[{own}]"
            return text if in_class else f"[^{own}]"
        return text

    return _ECMA.sub(translated, pattern)


def _multiple_of(validator: Any, factor: Any, value: Any, schema: JSON) -> _Errors:
    """By the decimal digits that both are written with: 19.99 is a multiple of 0.01."""
    if not validator.is_type(value, "number"):
        return
    if (Fraction(repr(value)) / Fraction(repr(factor))).denominator != 1:
        yield jsonschema.ValidationError(f"{str(value)[:80]} is not a multiple of {factor}")


def _pattern(validator: Any, pattern: str, value: Any, schema: JSON) -> _Errors:
    if validator.is_type(value, "string") and not _matches(pattern, value):
        yield jsonschema.ValidationError(f"{value[:80]!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: JSON, value: Any, schema: JSON) -> _Errors:
    if validator.is_type(value, "object"):
        for pattern, subschema in patterns.items():
            for key, item in value.items():
                if _matches(pattern, key):
                    yield from validator.descend(item, subschema, path=key, schema_path=pattern)


def _additional_properties(validator: Any, allowed: Any, value: Any, schema: JSON) -> _Errors:
    if not validator.is_type(value, "object"):
        return
    patterns = schema.get("patternProperties", {})
    for key, item in value.items():
        if key not in schema.get("properties", {}) and not any(_matches(one, key) for one in patterns):
            if allowed is False:
                yield jsonschema.ValidationError(f"additional property {key!r}")
            else:
                yield from validator.descend(item, allowed, path=key)


# Parts that occur often


def _unique_items(validator: Any, unique: bool, value: Any, schema: JSON) -> _Errors:
    if unique and validator.is_type(value, "array"):
        earlier = set()
        for item in map(_frozen, value):
            if item in earlier:
                yield jsonschema.ValidationError(f"{str(item)[:80]} occurs twice")
                return
            earlier.add(item)


def _frozen(value: Any) -> Hashable:
    """What is equal for equal values: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, dict):
        return "object", frozenset((key, _frozen(item)) for key, item in value.items())
    if isinstance(value, list):
        return "array", tuple(map(_frozen, value))
    return ("boolean", value) if isinstance(value, bool) else value


_followed: ContextVar[dict[tuple[str, int], jsonschema.ValidationError | None]] = ContextVar("followed")
_AT_WORK = jsonschema.ValidationError("at work")


def _ref(validator: Any, ref: str, value: Any, schema: JSON) -> _Errors:
    # A part of the value is the same object each time, and lives as long as the validation.
    followed, place = _followed.get(), (ref, id(value))
    if place not in followed:
        followed[place] = _AT_WORK
        followed[place] = next(_STANDARD["$ref"](validator, ref, value, schema), None)
    error = followed[place]
    if error is _AT_WORK:
        raise InvalidRequest(f"schema_str: {ref} refers to itself")
    if error is not None:  # a copy, as each place that yields it adds to its path
        yield jsonschema.ValidationError(error.message, path=error.path, schema_path=error.schema_path)


_STANDARD: Any = jsonschema.Draft202012Validator.VALIDATORS
_extend: Any = jsonschema.validators.extend  # its type stub has no annotations
_KEYWORDS = {
    "multipleOf": _multiple_of,
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "uniqueItems": _unique_items,
}
_WithIds: Any = _extend(jsonschema.Draft202012Validator, _KEYWORDS)
"""For a schema with ``$id``, where one reference means several things."""
_Validator: Any = _extend(_WithIds, {"$ref": _ref})

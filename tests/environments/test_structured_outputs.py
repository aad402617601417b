"""Fixtures, examples, strictness, types of XML and CSV, and documents that attack their parser."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import regex
from hypothesis import given
from hypothesis import strategies as st
from support.environments import Bench, called, examples, said

from gym_serve.environments.structured_outputs import StructuredOutputs
from gym_serve.environments.structured_outputs.schemas import Schema, ecma
from gym_serve.environments.structured_outputs.worker import (
    Format,
    Unparsable,
    check,
    coerce_csv,
    coerce_xml,
    parse_text,
)
from gym_serve.types.errors import InvalidRequest

FORMATS: tuple[Format, ...] = ("json", "yaml", "xml", "toml", "csv")
FLAT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}


LOOP = pytest.mark.asyncio(loop_scope="module")  # one pool of workers for all


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[StructuredOutputs]:
    server = StructuredOutputs(num_workers=1)
    await server.start()
    yield server
    await server.stop()


async def verify(
    server: StructuredOutputs, schema: Any, output: list[dict[str, Any]], /, **row: Any
) -> dict[str, Any]:
    schema = schema if isinstance(schema, str) else json.dumps(schema)
    return await Bench(server).verify({"schema_str": schema, **row}, output)


@pytest.mark.parametrize("row", examples(StructuredOutputs), ids=lambda row: row.get("schema_type", "call"))
async def test_example_row(row: dict[str, Any]) -> None:
    (message,) = row["responses_create_params"]["input"]
    if "schema_type" in row:
        assert row["schema_str"] in message["content"]
    else:
        (tool,) = row["responses_create_params"]["tools"]
        wrapped = tool["parameters"]["properties"][row["tool_payload_key"]]
        assert {**wrapped, **json.loads(row["schema_str"])} == wrapped


def fits(schema: Any, value: Any) -> bool:
    return Schema(json.dumps(schema)).problem_of(value) is None


@pytest.mark.parametrize(
    ("schema", "value", "fit"),
    [
        (FLAT, {"a": 1, "b": ""}, True),
        (FLAT, {"a": 1}, False),
        (FLAT, {"a": 1, "b": "", "c": 1}, False),
        (FLAT, {"a": True, "b": ""}, False),
        (FLAT, {"a": 1.0, "b": ""}, True),
        ({"multipleOf": 0.01}, 19.99, True),
        ({"multipleOf": 0.01}, 19.995, False),
        ({"type": "array", "items": FLAT}, [{"a": 1}], False),
        ({"type": "object", "additionalProperties": FLAT}, {"x": {"a": 1}}, False),
        ({"type": "object", "properties": {"x": {"anyOf": [FLAT, {"type": "null"}]}}}, {"x": {"a": 1}}, True),
        ({"type": "object", "properties": {"properties": {"type": "object"}}}, {"properties": {}}, True),
        ({"$defs": {"f": FLAT}, "type": "array", "items": {"$ref": "#/$defs/f"}}, [{"a": 1}], False),
        (
            {"type": "object", "properties": {"a": {"const": {"properties": 1}}}},
            {"a": {"properties": 1}},
            True,
        ),
        (
            {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"},
            [[[]]],
            True,
        ),
    ],
)
def test_a_strict_schema(schema: Any, value: Any, fit: bool) -> None:
    assert fits(schema, value) is fit


@pytest.mark.parametrize(
    ("value", "fit"), [({"a": 1, "b": ""}, True), ({"a": 1, "c": 1}, True), ({}, True), ({"a": "1"}, False)]
)
def test_a_schema_as_it_is(value: Any, fit: bool) -> None:
    assert (Schema(json.dumps(FLAT), strict=False).problem_of(value) is None) is fit


@pytest.mark.parametrize(
    "schema",
    [
        '"text"',
        "[]",
        "{",
        '{"type": 5}',
        '{"$ref": "https://example.com/s"}',
        '{"$ref": "#/$defs/none"}',
        '{"pattern": "("}',
    ],
)
def test_a_broken_schema_is_no_zero(schema: str) -> None:
    with pytest.raises(InvalidRequest):
        Schema(schema).problem_of("x")


@pytest.mark.parametrize(
    ("kind", "value", "read"),
    [
        ("integer", "3", 3),
        ("integer", "3.0", "3.0"),
        ("number", "3", 3.0),
        ("number", "inf", "inf"),
        ("boolean", "True", True),
        ("boolean", "0", False),
        ("boolean", "no", "no"),
        ("string", "3", "3"),
        ("string", None, ""),
        ("integer", None, None),
        (["integer", "null"], "3", 3),
        (["string", "integer"], "3", 3),
        (["string", "null"], "x", "x"),
        (["null", "boolean"], None, None),
    ],
)
def test_types_of_xml(kind: Any, value: str | None, read: Any) -> None:
    assert coerce_xml({"x": value}, {"type": "object", "properties": {"x": {"type": kind}}}) == {"x": read}


@pytest.mark.parametrize("value", [["1", "2"], {"i": ["1", "2"]}])
def test_lists_of_xml(value: Any) -> None:
    assert coerce_xml(value, {"type": "array", "items": {"type": "integer"}}) == [1, 2]


@pytest.mark.parametrize(("value", "read"), [(None, []), ("1", [1]), ({"i": "1"}, [1]), ({"i": None}, [])])
def test_short_lists_of_xml(value: Any, read: list[int]) -> None:
    assert coerce_xml(value, {"type": "array", "items": {"type": "integer"}}) == read


@LOOP
async def test_xml_without_coercion_holds_strings(server: StructuredOutputs) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert (await verify(server, schema, said("<a>1</a>"), schema_type="xml"))["reward"] == 1.0
    server.reconfigure({"xml_coerce_types": False})
    try:
        verdict = await verify(server, schema, said("<a>1</a>"), schema_type="xml")
    finally:
        server.reconfigure({"xml_coerce_types": True})
    assert verdict["error_type"] == "validation_error"


_NAMED = {"type": "object", "properties": {"name": {"type": "string"}}}


@pytest.mark.parametrize(
    ("kind", "format_", "written", "fits"),
    [
        *(("number", "yaml", text, False) for text in (".nan", "no", "x")),
        *(("string", "yaml", text, False) for text in ("no", "12:30", "2024-01-05")),
        *(("number", "toml", text, False) for text in ("nan", "-nan")),
        ("number", "json", "1e999", True),
        *(("number", "xml", text, True) for text in ("1e3", "+5", "-.5")),
        *(("number", "xml", text, False) for text in ("1_000", "\u0665", "1e999", "NaN")),
        *(("integer", "xml", text, False) for text in ("1_000", "\u0665", "1.5")),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "xml", "3", True),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "xml", "", True),
        ({"anyOf": [{"type": "integer"}, {"type": "boolean"}]}, "xml", "x", False),
        ({"enum": [1, 2]}, "xml", "2", True),
        ({"const": True}, "xml", "false", False),
        ({"$ref": "#/$defs/n"}, "xml", "3", True),
        ({"$ref": "#/$defs/n"}, "xml", "x", False),
        ({"type": ["array", "null"], "items": {"type": "integer"}}, "xml", "3", True),
        ({"type": "array", "items": _NAMED}, "xml", "<name>A</name>", True),
        ({"type": "array", "items": _NAMED}, "xml", "<i><name>A</name></i>", True),
        ({"type": "array", "items": _NAMED}, "xml", "<i>A</i>", False),
        ({"anyOf": [_NAMED, {"type": "null"}]}, "xml", "<name>1</name>", True),
    ],
)
def test_values_as_their_formats_spell_them(kind: Any, format_: Format, written: str, fits: bool) -> None:
    schema = {"type": kind} if isinstance(kind, str) else kind
    frame = {"yaml": "v: {}", "toml": "v = {}", "json": '{{"v": {}}}', "xml": "<v>{}</v>"}[format_]
    whole = {"type": "object", "properties": {"v": schema}, "$defs": {"n": {"type": "integer"}}}
    text, own = frame.format(written), {"format": format_, "key": None, "coerce": True}
    assert (check({"schema": json.dumps(whole), "strict": True, "text": text, **own}) == {}) == fits


def test_cells_of_csv() -> None:
    schema = {
        "items": {
            "properties": {
                "n": {"type": ["number", "null"]},
                "i": {"type": "integer"},
                "t": {"type": "string"},
            }
        }
    }
    rows = [{"n": "", "i": "", "t": "", "u": "1"}, {"n": "1.5", "i": "2", "t": "3", "u": ""}]
    assert coerce_csv(rows, schema) == [
        {"n": None, "i": "", "t": "", "u": "1"},
        {"n": 1.5, "i": 2, "t": "3", "u": ""},
    ]
    assert coerce_csv(rows[1:], schema["items"]) == [{"n": 1.5, "i": 2, "t": "3", "u": ""}]


def test_csv_with_quotes_and_blank_lines() -> None:
    text = '\na,b\n"1,5","x\ny"\n\n'
    assert parse_text(text, "csv") == [{"a": "1,5", "b": "x\ny"}]


@LOOP
@pytest.mark.parametrize("mode", [None, "text"])
async def test_the_text_is_the_value_in_any_other_mode(server: StructuredOutputs, mode: str | None) -> None:
    verdict = await verify(server, FLAT, said('{"a": 1, ', '"b": "x"}'), response_mode=mode)
    assert verdict["reward"] == 1.0


@LOOP
async def test_any_tool_will_do_without_a_name(server: StructuredOutputs) -> None:
    output = [called("anything", {"a": 1, "b": "x"})]
    assert (await verify(server, FLAT, output, response_mode="tool_call"))["reward"] == 1.0


async def test_a_failed_response_has_no_call() -> None:
    row = {"schema_str": json.dumps(FLAT), "response_mode": "tool_call"}
    response = {"output": [called("f", {"a": 1, "b": "x"})], "error": {"code": "server_error"}}
    verdict = await Bench(StructuredOutputs()).call("verify", {**row, "response": response})
    assert verdict["error_type"] == "api_error"


def problem_in(text: str, format_: Format) -> str | None:
    """Why a text is not a value of `FLAT`."""
    try:
        return Schema(json.dumps(FLAT)).problem_of(parse_text(text, format_))
    except Unparsable as refused:
        return str(refused)


@pytest.mark.parametrize(
    ("text", "format_"),
    [
        ('{"a": 1, "a": 1}', "json"),
        ('{"b": [{"a": 1, "\\u0061": 2}]}', "json"),
        ("a: 1\na: 2", "yaml"),
        ('b: [{a: 1, "a": 2}]', "yaml"),
        ("a = 1\na = 2", "toml"),
        ("a,a\n1,2", "csv"),
    ],
)
def test_a_key_twice_is_no_object(text: str, format_: Format) -> None:
    with pytest.raises(Unparsable):
        parse_text(text, format_)


def test_keys_that_are_merged_are_no_key_twice() -> None:
    assert parse_text("x: &x {a: 1}\ny: {<<: *x, a: 2}", "yaml")["y"] == {"a": 2}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize(
    "piece", ["[", "{", "<a>", "- ", "&a ", "a.", "a: ", '"', ",", "\n", "!", "? ", "&#0;", "9"]
)
def test_a_long_text_is_no_burden(format_: Format, piece: str) -> None:
    assert problem_in(piece * 19_000, format_)


@given(st.text(), st.sampled_from(FORMATS))
def test_any_text_is_parsed_or_not(text: str, format_: Format) -> None:
    try:
        value = parse_text(text, format_)
    except Unparsable:
        return
    problem = Schema(json.dumps(FLAT)).problem_of(value)
    assert problem is None or isinstance(problem, str)


@pytest.mark.parametrize(
    "text",
    [
        "2001-13-45",
        "!!float x",
        "0b",
        "1:99:",
        "!!binary é",
        "? [a]\n: b",
        "!!timestamp x",
        "!!int ''",
        "<<: 1",
    ],
)
def test_yaml_that_its_library_chokes_on(text: str) -> None:
    assert problem_in(text, "yaml")


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^(?<a>x|y)\k<a>$", "yy", "xy"),
        (r"^\u{1F600}$", "\U0001f600", "u"),
        (r"^[\u{61}-\u{63}]$", "b", "d"),
        (r"^\cA\cj$", "\x01\n", "cA"),
        (r"^\s[\s]$", "\ufeff\ufeff", "x "),
        (r"^\S$", "x", "\ufeff"),
        (r"^\u0041$", "A", "B"),
    ],
)
def test_patterns_are_those_of_ecma(pattern: str, good: str, bad: str) -> None:
    assert regex.search(ecma(pattern), good)
    assert not regex.search(ecma(pattern), bad)


@pytest.mark.parametrize(
    ("pattern", "translated"),
    [
        (r"^\d+$", r"^[0-9]+\Z"),
        (r"[\d\w-]\W\D", r"[0-9A-Za-z0-9_-][^A-Za-z0-9_][^0-9]"),
        (r"\$[$\]]\\d", r"\$[$\]]\\d"),
        (r"^\p{L}+$", r"^\p{L}+\Z"),
    ],
)
def test_translations_of_patterns(pattern: str, translated: str) -> None:
    assert ecma(pattern) == translated


REFERENCES = {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(60)}
BOMB = {"$defs": {**REFERENCES, "a60": {"type": "integer"}}, "$ref": "#/$defs/a0"}
"""2^60 ways to one integer."""

_EITHER = {"anyOf": [{"properties": {"l": {"$ref": "#/$defs/tree"}}, "minProperties": 1}] * 2}
TREE = {"$defs": {"tree": _EITHER}, "$ref": "#/$defs/tree"}
"""2^n ways to what is n levels deep in a value."""


@pytest.mark.parametrize(
    ("schema", "value", "problem"),
    [
        (BOMB, 1, None),
        (BOMB, "x", "$: 'x' is not valid under any of the given schemas"),
        (TREE, json.loads('{"l":' * 90 + "{}" + "}" * 90), "is not valid under any"),
        ({"patternProperties": {"^(a+)+$": {"type": "integer"}}}, {"a" * 27 + "!": 1}, None),
        (
            {"patternProperties": {"(a|a)*$": {}}, "additionalProperties": False},
            {"a" * 40 + "!": 1},
            "took too",
        ),
        ({"not": {"pattern": "(a|a)*$"}}, "a" * 40 + "!", "took too long"),
        ({"patternProperties": {"^a": {"type": "integer"}}}, {"a": "x", "b": "x"}, "$.a: 'x' is not of type"),
        (
            {"patternProperties": {"^a": {}}, "properties": {"b": {}}, "additionalProperties": False},
            {"a": 1, "b": 1, "c": 1},
            "$: additional property 'c'",
        ),
        ({"additionalProperties": {"type": "integer"}}, {"x": "y"}, "$.x: 'y' is not of type 'integer'"),
        ({"uniqueItems": True}, [{"n": n} for n in range(19_000)], None),
        ({"uniqueItems": True}, [{"a": [1]}, {"a": [1.0]}], "occurs twice"),
        ({"uniqueItems": True}, [1, True, 0, False, "1", [1], [True], {"a": 1}, {"a": True}, None], None),
        ({"uniqueItems": True}, [[1, 2], [2, 1]], None),
        ({"multipleOf": 0.1}, 10**400, None),
    ],
)
def test_what_takes_long_elsewhere(schema: Any, value: Any, problem: str | None) -> None:
    found = Schema(json.dumps(schema)).problem_of(value)
    assert found is None if problem is None else problem in str(found)


def test_a_reference_to_itself_is_the_rows_fault() -> None:
    loop = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    with pytest.raises(InvalidRequest, match="refers to itself"):
        Schema(json.dumps(loop)).problem_of(1)


INTEGER = {"type": "object", "properties": {"a": {"type": "integer"}}}


@LOOP
@pytest.mark.parametrize(
    ("format_", "text"),
    [
        ("json", '{"a": ' + "9" * 5_000 + "}"),
        ("yaml", "a: " + "9" * 5_000),
        ("yaml", "a: 0x" + "f" * 5_000),
        ("yaml", "a: 1" + ":59" * 5_000),
        ("yaml", "a: 1" + ":59" * 5_000 + ".5"),
        ("yaml", "0x" + "f" * 5_000 + ": 1"),
        ("toml", "a = " + "9" * 5_000),
        ("toml", "a = 0x" + "f" * 5_000),
        ("xml", "<a>" + "9" * 5_000 + "</a>"),
        ("csv", "a\n" + "9" * 5_000),
    ],
)
async def test_a_number_without_end_is_wrong(server: StructuredOutputs, format_: Format, text: str) -> None:
    verdict = await verify(server, INTEGER, said(text), schema_type=format_)
    assert (verdict["reward"], bool(verdict["error_message"])) == (0.0, True)
    assert verdict["error_type"] in ("parse_error", "validation_error")


@LOOP
async def test_a_document_that_uses_up_its_cpu_time_is_wrong(server: StructuredOutputs) -> None:
    pairs = {"anyOf": [{"properties": {"l": {"$dynamicRef": "#t"}}, "minProperties": 1}] * 2}
    schema = {"$defs": {"t": {"$dynamicAnchor": "t", **pairs}}, "$ref": "#/$defs/t"}
    server.reconfigure({"validation_timeout_seconds": 0.3})
    try:
        verdict = await verify(server, schema, said('{"l":' * 40 + "{}" + "}" * 40))
    finally:
        server.reconfigure({"validation_timeout_seconds": 5.0})
    assert verdict["error_type"] == "limit_exceeded"
    assert verdict["error_message"] == "to check it, it takes more than 0.3 s of CPU time"
    assert (await verify(server, INTEGER, said('{"a": 1}')))["reward"] == 1.0


@LOOP
async def test_a_broken_schema_is_an_invalid_row(server: StructuredOutputs) -> None:
    with pytest.raises(InvalidRequest, match="schema_str"):
        await verify(server, "{", said("{}"))

"""Fixtures, examples, pairing, and equality of JSON values."""

from __future__ import annotations

import json
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.environments import Bench, called, examples

from gym_serve.environments.xlam_fc import XlamFc
from gym_serve.grading import MAX_DEPTH, arguments_of, same_value
from gym_serve.types.errors import InvalidRequest

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(SCALARS, lambda v: st.lists(v) | st.dictionaries(st.text(), v), max_leaves=10)


@pytest.mark.parametrize(
    "row", examples(XlamFc), ids=lambda row: row["responses_create_params"]["input"][0]["content"]
)
async def test_example_row(row: dict[str, Any]) -> None:
    tools = {tool["name"]: tool["parameters"] for tool in row["responses_create_params"]["tools"]}
    for answer in row["expected_answers"]:
        schema = tools[answer["name"]]
        assert set(schema["required"]) <= answer["arguments"].keys() <= schema["properties"].keys()
    calls = [called(answer["name"], answer["arguments"]) for answer in row["expected_answers"]]
    assert (await Bench(XlamFc()).verify(row, calls))["reward"] == 1.0
    assert (await Bench(XlamFc()).verify(row, [*calls, called("f", {})]))["reward"] == 0.0


@pytest.mark.parametrize("order", list(permutations(range(3))))
async def test_the_order_of_calls_does_not_matter(order: tuple[int, ...]) -> None:
    # Each expectation is fitted by all calls with at least its arguments; only one pairing works.
    arguments: list[dict[str, Any]] = [{}, {"a": 1}, {"a": 1, "b": 2}]
    row = {"expected_answers": [{"name": "f", "arguments": given} for given in arguments]}
    output = [called("f", arguments[i]) for i in order]
    verdict = await Bench(XlamFc()).verify(row, output)
    assert (verdict["reward"], verdict["num_correct"]) == (1.0, 3)


async def test_a_row_that_expects_nothing_wants_no_call() -> None:
    row: dict[str, Any] = {"expected_answers": []}
    assert (await Bench(XlamFc()).verify(row, []))["reward"] == 1.0
    verdict = await Bench(XlamFc()).verify(row, [called("f", "?")])
    assert (verdict["reward"], verdict["predicted_calls"]) == (0.0, [{"name": "f", "arguments": {}}])
    assert verdict["reason"] == "0 calls were expected, and 1 made: 'f(?)'"


@pytest.mark.parametrize("row", [{}, {"expected_answers": None}, {"expected_answers": "f"}])
async def test_a_row_without_its_calls_is_invalid(row: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="expected_answers"):
        await Bench(XlamFc()).verify(row, [])


@pytest.mark.parametrize("arguments", ["{{{", "[]", "1", "null and void", '{"a": '])
async def test_arguments_that_cannot_be_read_are_not_those_of_a_call_without_any(arguments: str) -> None:
    verdict = await Bench(XlamFc()).verify({"expected_answers": [{"name": "f"}]}, [called("f", arguments)])
    assert verdict["reward"] == 0.0
    assert verdict["reason"].startswith("no call is f('{}'); the calls made: 'f(")


async def test_arguments_that_are_no_object_are_shown_and_count_as_none() -> None:
    row = {"expected_answers": [{"name": "f", "arguments": {"0": "x"}}]}
    verdict = await Bench(XlamFc()).verify(row, [called("f", '["x"]')])
    assert (verdict["reward"], verdict["predicted_calls"]) == (0.0, [{"name": "f", "arguments": ["x"]}])


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (1, 1.0, True),
        (1, True, False),
        (0, False, False),
        ("1", 1, False),
        (None, False, False),
        ([1, [True]], [1.0, [True]], True),
        ([1, [True]], [1, [1]], False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"a": None}, {}, False),
        ([], {}, False),
    ],
)
def test_equality(first: Any, second: Any, same: bool) -> None:
    assert same_value(first, second) is same
    assert same_value(second, first) is same


@given(VALUES)
def test_a_value_equals_itself_after_a_round_trip(value: Any) -> None:
    assert same_value(json.loads(json.dumps(value)), value)


@given(st.text() | VALUES)
def test_any_arguments_are_read_or_not(arguments: Any) -> None:
    found = arguments_of({"arguments": arguments})
    assert found is None or isinstance(found, dict)


@pytest.mark.parametrize("levels", [MAX_DEPTH - 1, MAX_DEPTH, 500, 100_000])
async def test_a_deep_nest_is_scored(levels: int) -> None:
    arguments = '{"a": ' + "[" * levels + "]" * levels + "}"
    verdict = await Bench(XlamFc()).verify({"expected_answers": [{"name": "f"}]}, [called("f", arguments)])
    assert verdict["reward"] == float(levels < MAX_DEPTH)
    assert (verdict["predicted_calls"][0]["arguments"] == {}) is (levels >= MAX_DEPTH)


@pytest.mark.parametrize("arguments", ["{}", "", " \n", "null"])
async def test_a_call_without_any_arguments_may_leave_them_out(arguments: str) -> None:
    verdict = await Bench(XlamFc()).verify({"expected_answers": [{"name": "f"}]}, [called("f", arguments)])
    assert verdict["reward"] == 1.0

"""Fixtures, examples, and the settings: how values are compared, and what the number of calls is worth."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from support.environments import Bench, examples, said

from gym_serve.environments.tool_argument_comparison import Category, ToolArgumentComparison
from gym_serve.grading import pair_up
from gym_serve.types.errors import InvalidRequest


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function_call", "name": name, "arguments": json.dumps(arguments)}


def batch(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function_call_batch", "calls": list(calls)}


A, B, C = call("f", {"a": 1}), call("g", {"b": "x y z"}), call("h", {})


async def verdict(
    expected: dict[str, Any], output: list[dict[str, Any]], **settings: Any
) -> tuple[float, str]:
    bench = Bench(ToolArgumentComparison(tool_call_comparator_config=settings))
    found = await bench.verify({"expected_action": expected}, output)
    assert (found["reward"] == 1.0) == ("reason" not in found)
    return found["reward"], found["category"]


def made(*calls: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**one, "call_id": f"call_{i}"} for i, one in enumerate(calls)]


@pytest.mark.parametrize("text", ["", " \n", "\u200b\ufeff"])
async def test_a_blank_text_is_no_message(text: str) -> None:
    found = await verdict({"type": "message", "content": "Hello."}, said(text))
    assert found == (0.0, Category.NOTHING)


@pytest.mark.parametrize("number", range(6))
async def test_example_row(number: int) -> None:
    row = examples(ToolArgumentComparison)[number]
    expected = row["expected_action"]
    tools = {tool["name"]: tool["parameters"] for tool in row["responses_create_params"]["tools"]}
    calls = expected.get("calls", [] if expected["type"] == "message" else [expected])
    for one in calls:
        schema = tools[one["name"]]
        assert set(schema["required"]) <= json.loads(one["arguments"]).keys() <= schema["properties"].keys()
    right = made(*calls) or said(expected["content"])
    wrong = said("Hm.") if calls else made(A)
    assert (await Bench(ToolArgumentComparison()).verify(row, right))["reward"] == 1.0
    assert (await Bench(ToolArgumentComparison()).verify(row, wrong))["reward"] == 0.0


@pytest.mark.parametrize(
    ("expected", "given", "category"),
    [
        ("one", "one", Category.CALL),
        ("one", "One", Category.OTHER_VALUE),
        ("one", "one two", Category.OTHER_VALUE),
        ("", "", Category.CALL),
        ("one two", " TWO\none ", Category.CALL),
        ("a b c d e", "a v w x y", Category.CALL),  # one of ten
        ("a b c d e", "a v w x y z", Category.OTHER_VALUE),  # one of eleven
        (1, 1, Category.CALL),
        (1, 1.0, Category.OTHER_TYPE),
        (1.0, 1, Category.OTHER_TYPE),
        (1, True, Category.OTHER_TYPE),
        (True, 1, Category.OTHER_TYPE),
        (0.3, 0.1 + 0.2, Category.CALL),
        (1.0, 1.00001, Category.OTHER_VALUE),
        (None, None, Category.CALL),
        (None, "None", Category.OTHER_TYPE),
        ([1, 2], [2, 1], Category.OTHER_VALUE),
        ([1, 2], [1], Category.OTHER_LENGTH),
        ({"a": {"b": "x"}}, {"a": {"b": "x"}}, Category.CALL),
        ({"a": {"b": "x"}}, {"a": {"c": "x"}}, Category.OTHER_KEYS),
    ],
)
async def test_values(expected: Any, given: Any, category: Category) -> None:
    found = await verdict(call("f", {"v": expected}), made(call("f", {"v": given})))
    assert found == (float(category is Category.CALL), category.value)


@pytest.mark.parametrize("expected", ["{}", "", "null"])
@pytest.mark.parametrize("given", ["{}", "", " \n", "null", None])
async def test_no_arguments_are_an_empty_object(expected: str, given: Any) -> None:
    found = await verdict({**C, "arguments": expected}, made({**C, "arguments": given}))
    assert found == (1.0, Category.CALL)


@pytest.mark.parametrize(
    ("calls", "settings", "reward", "category"),
    [
        ([B, A], {}, 1.0, Category.CALLS),
        ([A, C, B], {}, 1.0, Category.CALLS),
        ([A, B, A], {}, 1.0, Category.CALLS),
        ([A, C, B, C], {}, 0.0, Category.HEDGE),
        ([A, B, call("f", {"a": 2})], {}, 0.0, Category.HEDGE),
        ([*(call("f", {"a": n}) for n in range(70)), B], {}, 0.0, Category.HEDGE),
        ([A], {}, 0.0, Category.OTHER_COUNT),
        ([A, C], {}, 0.0, Category.OTHER_TOOL),
        ([B, A], {"parallel_tool_call_rewarding": True}, 1.0, Category.CALLS),
        ([A, C, B], {"parallel_tool_call_rewarding": True}, 0.0, Category.OTHER_COUNT),
        ([A], {"parallel_tool_call_rewarding": True}, 0.0, Category.OTHER_COUNT),
        ([A], {"parallel_tool_call_rewarding": True, "allow_subset": True}, 1.0, Category.CALLS),
        ([A, C, B], {"parallel_tool_call_rewarding": True, "allow_superset": True}, 1.0, Category.CALLS),
        ([C], {"parallel_tool_call_rewarding": True, "allow_subset": True}, 0.0, Category.OTHER_TOOL),
    ],
)
async def test_the_number_of_calls(
    calls: list[Any], settings: dict[str, Any], reward: float, category: Category
) -> None:
    assert await verdict(batch(A, B), made(*calls), **settings) == (reward, category.value)


@pytest.mark.parametrize(
    ("mode", "calls", "reward"),
    [
        ("fractional", [A, C], 0.5),
        ("fractional", [A], 1.0),
        ("fractional", [A, B, C], 1.0),
        ("f1", [A, C], 0.5),
        ("f1", [A], 2 / 3),
        ("f1", [A, B, C], 0.8),
        ("f1", [A, B], 1.0),
        ("binary_strict", [A, C], 0.0),
    ],
)
async def test_parts_of_the_reward(mode: str, calls: list[Any], reward: float) -> None:
    settings = {"parallel_tool_call_rewarding": True, "allow_subset": True, "allow_superset": True}
    found = await verdict(batch(A, B), made(*calls), parallel_tool_call_reward_mode=mode, **settings)
    assert found[0] == pytest.approx(reward)


async def test_the_category_is_that_of_the_nearest_call() -> None:
    calls = made(call("k", {}), call("f", {"a": 2}), call("f", {}))
    assert await verdict(A, calls) == (0.0, Category.OTHER_VALUE.value)


async def test_thousands_of_calls_are_compared() -> None:
    calls = made(*[call("f", {"a": n}) for n in range(2, 5_000)], A)
    assert await verdict(batch(A, A), calls) == (0.0, Category.OTHER_VALUE.value)
    assert await verdict(A, calls) == (0.0, Category.HEDGE.value)


async def test_a_threshold_that_nothing_reaches_is_refused() -> None:
    with pytest.raises((ValidationError, InvalidRequest), match="word_count_similarity_threshold"):
        ToolArgumentComparison(tool_call_comparator_config={"word_count_similarity_threshold": 0.6})


@given(st.lists(st.lists(st.integers(0, 4), unique=True), max_size=5))
def test_pairs_are_as_many_as_possible(candidates: list[list[int]]) -> None:
    def most(left: int, used: frozenset[int]) -> int:
        if left == len(candidates):
            return 0
        taken = [1 + most(left + 1, used | {one}) for one in candidates[left] if one not in used]
        return max([most(left + 1, used), *taken])

    assert len(pair_up(candidates)) == most(0, frozenset())


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("expected", "made"), [(1500, 1500), (1500, 1400), (1000, 1500)])
def test_many_equal_calls_find_their_pairs(expected: int, made: int) -> None:
    assert len(pair_up([range(made)] * expected)) == min(expected, made)
    chain = [[i, i + 1] for i in range(expected - 1)]  # the last one makes all others change
    assert len(pair_up([*chain, [0, 0, 0]])) == expected

"""Fixtures, examples, each component on its own, and metrics per component."""

from __future__ import annotations

from typing import Any

import pytest
from support.environments import Bench, called, examples, said

from gym_serve.environments.tool_call_multireward import ToolCallMultireward
from gym_serve.types.errors import InvalidRequest

CALL = {"name": "f", "arguments": {}}


async def components(row: dict[str, Any], *output: dict[str, Any]) -> tuple[float, ...]:
    verdict = await Bench(ToolCallMultireward()).verify({"expected_call": CALL, **row}, list(output))
    assert (verdict["reward"] == 3.0) == ("reason" not in verdict)
    assert verdict["reward"] == sum(verdict["reward_components"].values())
    assert all(verdict[name] == value for name, value in verdict["reward_components"].items())
    return tuple(verdict["reward_components"].values())


@pytest.mark.parametrize(
    "row", examples(ToolCallMultireward), ids=lambda row: row["expected_call"]["arguments"]["city"]
)
async def test_an_oracle_solves_the_example_row(row: dict[str, Any]) -> None:
    assert row["responses_create_params"]["tools"] == [t.openai() for t in ToolCallMultireward.tools.values()]
    city = row["expected_call"]["arguments"]["city"]
    assert city in row["responses_create_params"]["input"][0]["content"]
    assert await components(row, called("get_weather", {"city": city})) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("expected", "arguments", "correct"),
    [
        ({"name": "f", "arguments": {"a": 1}}, {"a": 1, "b": 2}, 1.0),
        ({"name": "f", "arguments": {"a": 1}}, {"a": 1.0}, 1.0),
        ({"name": "f", "arguments": {"a": 1}}, {"a": True}, 0.0),
        ({"name": "f", "arguments": {"a": None}}, {}, 0.0),
        ({"name": "f", "arguments": {}}, {"a": 1}, 1.0),
        ({"name": "f"}, {"a": 1}, 1.0),
    ],
)
async def test_correctness(expected: dict[str, Any], arguments: dict[str, Any], correct: float) -> None:
    assert (await components({"expected_call": expected}, called("f", arguments)))[0] == correct


@pytest.mark.parametrize(
    ("parameters", "valid"),
    [
        ({"required": ["a"]}, 1.0),
        ({"required": ["a", "b"]}, 0.0),
        ({"required": None}, 1.0),
        ({}, 1.0),
        (None, 1.0),
    ],
)
async def test_required_parameters(parameters: Any, valid: float) -> None:
    tools = [{"type": "web_search"}, {"type": "function", "name": "f", "parameters": parameters}]
    row = {"responses_create_params": {"input": "x", "tools": tools}}
    assert (await components(row, called("f", {"a": 1})))[1] == valid


@pytest.mark.parametrize("expected", [None, {}, {"arguments": {}}, {"name": "f", "arguments": "a"}])
async def test_a_row_without_its_call_is_invalid(expected: Any) -> None:
    with pytest.raises(InvalidRequest, match="expected_call"):
        await components({"expected_call": expected}, called("f", {}))


@pytest.mark.parametrize(
    ("calls", "found"),
    [
        ([("nonexistent", {})], (0.0, 0.0, 1.0)),
        ([("nonexistent", {}), ("f", {"a": 1})], (1.0, 1.0, 0.0)),
        ([("f", "{{{")], (0.0, 0.0, 1.0)),
    ],
)
async def test_a_call_of_an_unknown_tool_has_no_valid_arguments(
    calls: list[tuple[str, Any]], found: tuple[float, ...]
) -> None:
    tools = [{"type": "function", "name": "f", "parameters": {"required": ["a"]}}]
    row = {"responses_create_params": {"input": "x", "tools": tools}}
    assert await components(row, *(called(*call) for call in calls)) == found


async def test_format() -> None:
    call = called("f", {})
    assert (await components({}, call))[2] == 1.0
    assert (await components({}, {"type": "reasoning", "summary": []}, call))[2] == 1.0
    assert (await components({}, call, call))[2] == 0.0
    assert (await components({}, *said("x"), call))[2] == 0.0
    assert (await components({}))[2] == 0.0


async def test_the_tool() -> None:
    report = await Bench(ToolCallMultireward()).tool("get_weather", city=" Bergen ")
    assert report == {"city": "Bergen", "weather_description": "The weather in Bergen is sunny."}
    with pytest.raises(InvalidRequest):
        await Bench(ToolCallMultireward()).tool("get_weather", city=" ")


async def test_metrics_of_each_component() -> None:
    bench = Bench(ToolCallMultireward())
    row = {"expected_call": {"name": "f", "arguments": {"a": 1}}, "_ng_task_index": 0}
    rollouts = [
        {**row, "_ng_rollout_index": index, **(await bench.verify(row, [called("f", {"a": value})]))}
        for index, value in enumerate([1, 2])
    ]
    answer = await bench.call("aggregate_metrics", {"verify_responses": rollouts})
    metrics = answer["agent_metrics"]
    assert metrics["pass@1[avg-of-2]/correctness"] == 50.0
    assert metrics["pass@1[avg-of-2]/format"] == 100.0

"""Fixtures, an oracle for the example rows, the tools, and answers of any shape."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.environments import Bench, called, examples

from gym_serve.environments.multi_step_synonyms import MultiStepSynonyms, value_of
from gym_serve.types.errors import InvalidRequest

ROW = {
    "expected_synonyms": ["b", "c"],
    "expected_synonym_values": [98, 99],
    "minefield_label": "a",
    "minefield_label_value": 97,
}


def handed_in(values: Any) -> list[dict[str, Any]]:
    return [called("extract_synonym_values", {"synonym_values": values})]


@pytest.mark.parametrize("row", examples(MultiStepSynonyms), ids=lambda row: row["minefield_label"])
async def test_an_oracle_solves_the_example_row(row: dict[str, Any]) -> None:
    assert row["responses_create_params"]["tools"] == [t.openai() for t in MultiStepSynonyms.tools.values()]
    prompt = row["responses_create_params"]["input"][0]["content"]
    term = row["minefield_label"]
    listed = [line.partition(": ")[2] for line in prompt.splitlines() if line.startswith(f"- {term}: ")]
    assert listed == row["expected_synonyms"]
    bench = Bench(MultiStepSynonyms())
    values = [(await bench.tool("get_synonym_value", synonym=word))["synonym_value"] for word in listed]
    assert await bench.tool("extract_synonym_values", synonym_values=values) == {"success": True}
    assert (await bench.verify(row, handed_in(values)))["reward"] == 1.0
    assert row["minefield_label_value"] == value_of(term)


@pytest.mark.parametrize("arguments", [{}, {"synonym": 3}, {"synonym": "x" * 1001}, {"word": "x"}])
async def test_arguments_that_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        await Bench(MultiStepSynonyms()).tool("get_synonym_value", **arguments)


@pytest.mark.parametrize(
    ("values", "reward", "overlap"),
    [
        ([98, 99], 1.0, 1.0),
        ([98.0, 99], 1.0, 1.0),
        ([99, 98], 0.0, 1.0),
        ([98, 98], 0.0, 0.5),
        ([], 0.0, 0.0),
    ],
)
async def test_overlap(values: list[Any], reward: float, overlap: float) -> None:
    verdict = await Bench(MultiStepSynonyms()).verify(ROW, handed_in(values))
    assert (verdict["reward"], verdict["set_overlap"]) == (reward, overlap)
    assert verdict["order_instruction_following_failure"] is (overlap == 1.0 and not reward)


async def test_a_value_that_is_expected_twice() -> None:
    row = {**ROW, "expected_synonym_values": [98, 98]}
    verdict = await Bench(MultiStepSynonyms()).verify(row, handed_in([98, 98]))
    assert (verdict["reward"], verdict["set_overlap"]) == (1.0, 1.0)


@given(
    st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists, max_leaves=8)
)
async def test_any_answer_has_a_verdict(values: Any) -> None:
    verdict = await Bench(MultiStepSynonyms()).verify(ROW, handed_in(values))
    assert verdict["reward"] == float(values == [98, 99])
    assert 0.0 <= verdict["set_overlap"] <= 1.0

import json
from pathlib import Path
from typing import Any

import pydantic
import pytest
from support.environments import said

import gym_serve.environments.mcqa as package
from gym_serve.environments.mcqa import Mcqa
from gym_serve.testing import TestClient
from gym_serve.types.errors import GymError

FOLDER = Path(package.__file__).parent


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / name).read_text("utf-8").splitlines()]


def verify(row: dict[str, Any], output: list[dict[str, Any]], **config: Any) -> dict[str, Any]:
    with TestClient(Mcqa(**config)) as client:
        return client.episode(row).verify(output).model_dump()


@pytest.mark.parametrize("row", lines("data/example.jsonl"), ids=lambda row: row["expected_answer"])
def test_example_row(row: dict[str, Any]) -> None:
    letter = row["expected_answer"]
    prompt = row["responses_create_params"]["input"][0]["content"]
    for option in row["options"]:
        ((key, text),) = option.items()
        assert f"\n{key}: {text}\n" in prompt
        answer = f"Answer: {key}\n\n\\boxed{{{key}}}"
        assert verify(row, said(answer))["reward"] == float(key == letter)


ROW = {"options": [{"A": "yes"}, {"B": "no"}], "expected_answer": "B"}


@pytest.mark.parametrize(
    ("row_mode", "config_mode", "reward"),
    [
        ({}, {}, 0.0),
        ({"grading_mode": "lenient_answer_colon"}, {}, 1.0),
        ({"grading_mode": "lenient_answer_colon_md"}, {}, 1.0),
        ({}, {"grading_mode": "lenient_answer_colon"}, 1.0),
        ({"grading_mode": "lenient_answer_colon"}, {"grading_mode": "lenient_boxed"}, 0.0),
        ({"grading_mode": "lenient_answer_colon"}, {"grading_mode": None}, 1.0),
    ],
)
def test_the_config_decides_the_mode_before_the_row(
    row_mode: dict[str, str], config_mode: dict[str, str | None], reward: float
) -> None:
    verdict = verify({**ROW, **row_mode}, said("Answer: B"), **config_mode)
    assert verdict["reward"] == reward


def test_output_regex_goes_before_the_config() -> None:
    row = {**ROW, "template_metadata": {"output_regex": "pick (.)"}}
    config = {"grading_mode": "lenient_answer_colon"}
    assert verify(row, said("Answer: A, but I pick B"), **config)["extracted_answer"] == "B"
    assert verify(row, said("Answer: A"), **config)["extracted_answer"] == "A"


@pytest.mark.parametrize("metadata", [None, {}, {"output_regex": None}, {"output_regex": []}])
def test_a_template_without_patterns(metadata: dict[str, Any] | None) -> None:
    assert verify({**ROW, "template_metadata": metadata}, said(r"\boxed{B}"))["reward"] == 1.0


def test_all_messages_make_up_the_text() -> None:
    assert verify(ROW, said(r"\boxed{B}") + said(""))["reward"] == 1.0
    assert verify(ROW, said(r"\boxed{") + said("B}"))["reward"] == 1.0


@pytest.mark.parametrize("expected", [" b ", "B"])
def test_the_expected_letter_is_normalized(expected: str) -> None:
    verdict = verify({**ROW, "expected_answer": expected}, said(r"\boxed{B}"))
    assert verdict == {"reward": 1.0, "extracted_answer": "B", "expected_answer": "B"}


def test_an_unknown_mode_in_the_config_is_an_error() -> None:
    with pytest.raises(pydantic.ValidationError, match="grading_mode"):
        Mcqa(grading_mode="psychic")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"expected_answer": None}, "expected_answer is missing"),
        ({"expected_answer": " "}, "expected_answer is missing"),
        ({"expected_answer": "C"}, "'C' is no letter of options"),
        ({"options": None}, "options is missing"),
    ],
)
def test_rows_without_the_right_answer_are_invalid(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(GymError, match=message) as caught:
        verify({**ROW, **fields}, said(r"\boxed{B}"))
    assert caught.value.code == "invalid_request"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (r"\boxed{A}", "expected B, got A"),
        (
            "C: yes",
            r"expected B, but no \boxed{X} with the letter of one option found: the text ends 'C: yes'",
        ),
        ("", r"expected B, but no \boxed{X} with the letter of one option found: the response has no text"),
    ],
)
def test_a_verdict_below_the_full_reward_says_why(text: str, reason: str) -> None:
    assert verify(ROW, said(text))["reason"] == reason

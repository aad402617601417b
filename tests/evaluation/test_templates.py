"""Prompts and mapped fields: by Jinja's sandbox, from one row."""

from typing import Any

import pytest

from gym_serve.evaluation.templates import evaluate, render
from gym_serve.types.errors import InvalidRequest

ROW: dict[str, Any] = {
    "question": "2+2?",
    "choices": {"text": ["a", "b"]},
    "answer": "so #### 4",
    "Right One": "x",
}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("answer | search('#### (.+)')", "4"),
        ("choices.text[1]", "b"),
        ("choices.text | lettered", [{"A": "a"}, {"B": "b"}]),
        ("choices.text.index('b') | letter", "B"),
        ("_['Right One']", "x"),
        ("{'n': 2}", {"n": 2}),
        ("'[1, 2]' | from_json", [1, 2]),
        ("choices.text | shuffled('seed') | sort", ["a", "b"]),
    ],
)
def test_an_expression_keeps_the_type_of_its_value(expression: str, value: Any) -> None:
    assert evaluate(expression, ROW) == value


def test_a_seed_decides_the_order() -> None:
    letters = list("abcdefgh")
    orders = {tuple(evaluate(f"letters | shuffled({seed})", {"letters": letters})) for seed in range(20)}
    assert len(orders) > 10
    assert evaluate("letters | shuffled(1)", {"letters": letters}) == evaluate(
        "letters | shuffled(1)", {"letters": letters}
    )


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("nosuch", "`nosuch`: the row has no such field; it has question, choices"),
        ("answer | search('x+')", "no match of 'x[+]' in 'so #### 4'"),
        ("choices.", "does not fit this row"),
        ("question.__class__.__mro__", "unsafe"),
        ("answer | search('(a+)+$')", "no match"),
    ],
)
def test_what_does_not_fit_is_told(expression: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        evaluate(expression, ROW)


def test_a_prompt_has_the_fields_as_they_are() -> None:
    assert (
        render("Q: {{ question }}\n{{ answer }}", {**ROW, "answer": "{{ question }}"})
        == "Q: 2+2?\n{{ question }}"
    )

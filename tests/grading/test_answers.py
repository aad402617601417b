"""Answers without what Markdown and LaTeX put around them; boxes, labels and blocks: where they are read."""

import time

import pytest

from gym_serve.grading import code_blocks, plain_answer


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("5", "5"),
        ("**-3123**", "-3123"),
        ("`5`", "5"),
        ("$5$", "5"),
        ("5.", "5"),
        (r"**$\boxed{5}$.**", "5"),
        (r"\boxed{\text{5}}", "5"),
        (r"\[\boxed{5}\]", "5"),
        (r"\boxed 5", "5"),
        ("\n```text\n5\n```\n", "5"),
        ("~~~\n5\n~~~", "5"),
        ('"5"', "5"),
        ("**Zoey** is a **fool**.", "Zoey is a fool"),
        ('{"a": {"b": 1}}', '{"a": {"b": 1}}'),
        ("`{'a': 1}`", "{'a': 1}"),
        (r"\boxed{5} or \boxed{6}", r"\boxed{5} or \boxed{6}"),
        ("~~5~~", "~~5~~"),  # is crossed out
        ("x**2", "x**2"),
        ("2**3**4", "2**3**4"),
        ("", ""),
    ],
)
def test_an_answer_without_what_stands_around_it(text: str, plain: str) -> None:
    assert plain_answer(text) == plain


@pytest.mark.parametrize(
    "unit",
    [
        "`",
        "```\n",
        "```a",
        "~",
        "``` ",
        "```a`",
        " ",
        "> ",
        "- ",
        "```py\n",
        "**",
        "$",
        "{",
        "\\boxed{",
        '"',
        "_ ",
        "a\n",
    ],
)
def test_hostile_texts_take_linear_time(unit: str) -> None:
    text = unit * (200_000 // len(unit))
    before = time.process_time()
    for hostile in (text, f"```python\n{text}x", f"{text}\n```"):
        code_blocks(hostile)
        plain_answer(hostile)
    assert time.process_time() - before < 10

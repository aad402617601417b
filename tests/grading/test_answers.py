"""Answers without what Markdown and LaTeX put around them; boxes, labels and blocks: where they are read."""

import time

import pytest

from gym_serve.grading import code_blocks, plain_answer, same_text


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
        ("**5** (five)", "5 (five)"),
        ("5 ✅", "5"),
        ("1, 2, ...", "1, 2, ..."),
        ("~~5~~", "~~5~~"),  # is crossed out
        ("x**2", "x**2"),
        ("2**3**4", "2**3**4"),
        ("", ""),
    ],
)
def test_an_answer_without_what_stands_around_it(text: str, plain: str) -> None:
    assert plain_answer(text) == plain


@pytest.mark.parametrize(
    ("expected", "answer", "same"),
    [
        ("6", "**6**", True),
        ("Paris", '"Paris".', True),
        ("1200", "1,200", True),
        ("1200", "1{,}200", True),
        ("-5", "\N{MINUS SIGN}5", True),
        ("5", "5.0", True),
        ("1200", "1,20", False),
        ("007", "7", False),
        ("5", "-5", False),
        ("6", "6 or 7", False),
        ("", "", False),
    ],
)
def test_the_same_answer(expected: str, answer: str, same: bool) -> None:
    assert same_text(expected, answer) is same


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

"""Answers without what Markdown and LaTeX put around them; boxes, labels and blocks: where they are read."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tables import each

from gym_serve.grading import code_blocks, last_box, plain_answer, same_text


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        *each("5", "5", "`5`", "$5$", "5.", r"**$\boxed{5}$.**", r"\boxed{\text{5}}", r"\[\boxed{5}\]"),
        *each("5", r"\boxed 5", "\n```text\n5\n```\n", "~~~\n5\n~~~", '"5"', "5 ✅"),
        ("**-3123**", "-3123"),
        ("**Zoey** is a **fool**.", "Zoey is a fool"),
        ('{"a": {"b": 1}}', '{"a": {"b": 1}}'),
        ("`{'a': 1}`", "{'a': 1}"),
        (r"\boxed{5} or \boxed{6}", r"\boxed{5} or \boxed{6}"),
        ("**5** (five)", "5 (five)"),
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
        ("50%", "50\\%", True),
        ("$5", "\\$5", True),
        ("R&D", "R\\&D", True),
        ("New York", "New~York", True),
        ("New York", "New\\ York", True),
        ("don't", "don’t", True),
        ("50", "50\\%", False),
        ("5", "~5", False),
        ("5", "-5", False),
        ("6", "6 or 7", False),
        ("", "", False),
        ("1", " 1 ", True),
        ("$1$", "1", True),
        ("\\( x  y \\)", "x y", True),
        ("\\text{no}", "no", True),
        ("$\\text{no}$", "no", True),
        ("$1$ and $2$", "1$ and $2", False),
        ("\\text{a} b \\text{c}", "a} b \\text{c", False),
        ("\\text{\\frac{\\pi}{8}}", "\\frac{\\pi}{8}", True),
        ("\\text{4 \\text{ days}}", "4 \\text{ days}", True),
        ("\\text{a} or \\text{b}", "a} or \\text{b", False),
    ],
)
def test_the_same_answer(expected: str, answer: str, same: bool) -> None:
    assert same_text(expected, answer) is same


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("", None),
        ("\\boxed{1}", "1"),
        ("\\boxed{1} \\boxed{2}", "2"),
        ("\\boxed{1} or \\boxed{2}", "1, 2"),
        ("\\boxed{1}, \\boxed{2} and $\\boxed{1}$", "1, 2"),
        ("**\\boxed{1}** (or maybe **\\boxed{2}**)", "1, 2"),
        ("\\boxed{2}, and in \\boxed{answer}, \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}} }", "\\frac{1}{2}"),
        ("\\boxed{1", None),
        ("\\boxed{ }", None),
        ("\\boxed {1}", "1"),
        ("}{\\boxed{a{}b}", "a{}b"),
    ],
)
def test_last_box(text: str, box: str | None) -> None:
    assert last_box(text) == box


@given(st.text("\\boxed{}1 "))
def test_a_box_is_a_part_of_the_text(text: str) -> None:
    box = last_box(text)
    assert box is None or (box in text and box.count("{") == box.count("}"))


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
        "}",
        "\\text{",
        "\\boxed{",
        "\\boxed{}",
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
        assert last_box(hostile) is None
        assert not same_text(hostile, "1")
    assert time.process_time() - before < 10

"""Golds and numerals as math-verify takes them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_serve.grading import boxed_gold, plain_numerals
from gym_serve.grading.math_worker import compare


@pytest.mark.parametrize(
    ("gold", "boxed"),
    [
        ("  17 ", "17"),
        ("$x^2$", "x^2"),
        ("$$ x^2 $$", "x^2"),
        ("\\(x^2\\)", "x^2"),
        ("\\[ x^2 \\]", "x^2"),
        ("$1$ and $2$", "$1$ and $2$"),
        ("\\(1\\), \\(2\\)", "\\(1\\), \\(2\\)"),
        ("$", "$"),
        ("", ""),
        ("12 500", "12500"),
        ("\\boxed{3}", "\\boxed{3}"),
    ],
)
def test_boxed_gold(gold: str, boxed: str) -> None:
    assert boxed_gold(gold) == f"\\boxed{{{boxed}}}"


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("\\boxed{7.}", "\\boxed{7}"),
        ("\\boxed{ -12 345.50 }", "\\boxed{-12345.50}"),
        ("\\boxed{12\\,345}", "\\boxed{12345}"),
        ("\\boxed{12~345\\ 678}", "\\boxed{12345678}"),
        ("\\boxed{12\u202f345}", "\\boxed{12345}"),
        ("\\boxed{۱۲}", "\\boxed{12}"),
        ("\\boxed{１２}", "\\boxed{12}"),
        ("\\boxed{12 34}", "\\boxed{12 34}"),
        ("\\boxed{1 000, 2 000}", "\\boxed{1 000, 2 000}"),
        ("\\boxed{1000 000}", "\\boxed{1000 000}"),
        ("1 000 is not boxed.", "1 000 is not boxed."),
        ("\\boxed{x²}", "\\boxed{x²}"),
    ],
)
def test_plain_numerals(text: str, plain: str) -> None:
    assert plain_numerals(text) == plain


@given(st.integers(0, 10**30), st.sampled_from([" ", "\u00a0", "\u2009", "\\,", "~"]))
def test_grouping_keeps_the_value(number: int, space: str) -> None:
    assert plain_numerals(f"\\boxed{{{number:,}.}}".replace(",", space)) == f"\\boxed{{{number}}}"


@given(st.text() | st.text(alphabet="\\boxed{}0123456789. ,~٤"))
def test_any_text(text: str) -> None:
    once = plain_numerals(text)
    assert plain_numerals(once) == once
    assert boxed_gold(text).startswith("\\boxed{")


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        ("\\(\\frac{5}{8}\\)", "\\boxed{0.625}", True),
        ("2\\sqrt{3}", "\\boxed{\\sqrt{12}}", True),
        ("2\\sqrt{3}", "\\boxed{3.46}", False),
        ("[0,2)", "\\boxed{0 \\le x < 2}", True),
        ("[0,2)", "\\boxed{0 \\le x \\le 2}", False),
        ("x \\ge 4", "\\boxed{[4,\\infty)}", True),
        ("(-\\infty,-2)\\cup(2,\\infty)", "\\boxed{|x| > 2}", True),
        ("\\{1,4\\}", "\\boxed{x = 4 \\text{ or } x = 1}", True),
        ("40\\%", "\\boxed{40}", True),
        ("40\\%", "\\boxed{0.4}", True),
        ("0.4", "\\boxed{40}", False),
        ("\\text{odd}", "\\boxed{Odd}", True),
        ("\\text{odd}", "\\boxed{even}", False),
        ("6", "\\boxed{5}, \\boxed{6}", False),
        ("", "\\boxed{1}", False),
        ("", "", False),
    ],
)
def test_compare(gold: str, answer: str, equal: bool) -> None:
    assert compare(boxed_gold(gold), plain_numerals(answer)).equal is equal


def test_unprintable_numbers_have_no_notation() -> None:
    comparison = compare("\\boxed{1}", "\\boxed{10^{5000}}")
    assert not comparison.equal
    assert comparison.written == "10^{5000}"


TEXTS = (
    r"\frac{1}{2}x^2-3x+\sqrt{5}",
    r"\left[-3, \infty\right) \cup \{1, 2\}",
    r"(x+1)(x-2) \le 4 < y",
    r"y = 3x+2, x \neq 1",
    r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
    r"\ln x^2 \sin 2x \log_{2} 8",
    r"\sum_{n=1}^{3} n \int_0^1 x dx",
    "1,000,000",
    r"5\text{ cm}",
    "x = = 2",
    r"\frac{1}{",
    "",
)


@pytest.mark.parametrize("text", TEXTS)
def test_the_parser_in_two_stages_finds_the_same_tree(text: str) -> None:
    compare("\\boxed{1}", "\\boxed{1}")  # the library is loaded then
    from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy

    def tree(create: Any) -> str:
        try:
            return str(create(_Latex2Sympy(), text).math().toStringTree(recog=create(_Latex2Sympy(), "1")))
        except Exception as error:
            return f"error: {error}"

    in_two_stages = _Latex2Sympy.create_parser
    assert tree(in_two_stages) == tree(in_two_stages.__wrapped__)

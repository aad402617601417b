r"""Answers as people and models write them, and what they are equal to.

The kinds are those of public bug reports: upright constants, words and units, small numbers, boxes, mixed and
scientific numbers, bases, relations, times, numbers without end.
"""

from __future__ import annotations

import pytest

from gym_serve.grading import ask, boxed_gold
from gym_serve.grading.math_worker import arithmetic, work

BOXED: dict[str, list[tuple[str, str, bool]]] = {
    "exact numbers": [
        (r"2^{2023}-1", r"2^{2023}", False),
        (r"10^{100}", r"10^{100}+1", False),
        (r"2020!", r"2020!+1", False),
        (r"2020!", r"2020 \cdot 2019!", True),
        (r"4^{1000}", r"2^{2000}", True),
        (r"\binom{200}{100}", r"\binom{200}{100}+1", False),
        (r"\frac{3^{200}-1}{2}", r"\frac{3^{200}}{2}", False),
        (r"2^{-200}", r"\frac{1}{4^{100}}", True),
        (r"(1,10^{100})", r"(1,10^{100}+1)", False),
        (r"\{1,50!\}", r"\{1,50!-1\}", False),
        (r"x=50!", r"x=50!-1", False),
        (r"\sqrt{3+2\sqrt{2}}", r"1+\sqrt{2}", True),
        (r"0.0000123\%", r"0.0000119\%", False),
        (r"50\%", "0.5", True),
    ],
    "upright constants": [
        (r"3+4\mathrm{i}", "3+4i", True),
        (r"3+4\mathrm{i}", "7", False),
        (r"\frac{2}{\mathrm{e}^2}", r"\frac{2}{e^2}", True),
        (r"\frac{2}{\mathrm{e}^2}", r"\frac{2}{\mathrm{e}^3}", False),
        (r"\sqrt{\mathrm{e}+1}", r"\sqrt{e+1}", True),
        (r"\sqrt{\mathrm{e}+1}", r"\sqrt{\mathrm{e}+2}", False),
        (r"2\mathrm{e}", "2e", True),
        (r"2\mathrm{e}", "2", False),
        (r"\pi", r"\mathrm{\pi}", True),
    ],
    "words": [
        (r"2 \text{ hours } 30 \text{ minutes}", r"2 \text{ hrs } 30 \text{ minutes}", True),
        (r"2 \text{ hours } 30 \text{ minutes}", r"2 \text{ hours } 45 \text{ minutes}", False),
        (r"2 \text{ hours } 30 \text{ minutes}", "2", False),
        (r"5 \text{ feet } 6 \text{ inches}", r"5 \text{ feet } 9 \text{ inches}", False),
        (r"n^2 \text{ if } n \text{ is odd}", r"n^{2}\text{ if }n\text{ is odd}", True),
        (r"n^2 \text{ if } n \text{ is odd}", r"n^2 \text{ if } n \text{ is even}", False),
        (r"\frac{3}{\text{speed}}", r"\frac{6}{2\text{speed}}", True),
        (r"\frac{3}{\text{speed}}", r"\frac{3}{\text{time}}", False),
        ("listen", "silent", False),
        ("True", "True", True),
        (r"\text{yes}", "Yes", True),
        (r"\text{Area}=5", "5", True),
        (r"2 \text{ and } 3", "3, 2", True),
        ("19, 46, 82", r"19, 46, \text{ and } 82", True),
        ("19, 46, 82", r"19, 46, \text{ and } 83", False),
        ("C", r"\text{C}", True),
    ],
    "units": [
        ("5", r"5\text{ cm}", True),
        ("$125$ miles", r"125\textnormal{ miles}", True),
        ("$125$ miles", r"125\text{ km}", False),
        (r"5\text{ cm}", "5", True),
        (r"10\text{ cm}", r"10\text{ m}", False),
        ("10 cm", "10 centimeters", True),
        ("5 apples", "5", True),
        ("2t", "2t", True),
        ("2t", "2", False),
        (r"\frac12 h", r"\frac12", False),
        (r"45^\circ", r"45 \text{ degrees}", True),
        (r"45^\circ", "45°", True),
        (r"5^\circ C", r"5^\circ F", False),
        (r"\$32", "32", True),
        (r"\$5.50", "€5.50", False),
        ("10:30 a.m.", "10:30 p.m.", False),
        (r"10:30 \text{ a.m.}", r"10:30\text{ AM}", True),
    ],
    "small numbers": [
        (r"6.63\times10^{-34}", "6.63e-34", True),
        (r"6.63\times10^{-34}", r"6.63 \cdot 10^{-34} \text{ J s}", True),
        (r"6.63\times10^{-34}", r"9.11\times10^{-31}", False),
        (r"1.6\times10^{-19}", r"-1.6\times10^{-19}", False),
        ("1/2^{97}", "1/2^{96}", False),
        ("e^{-100}", "e^{-200}", False),
        ("0.0000123", "0.0000119", False),
        ("10^{-30}", "0", False),
        (r"x=6.63\times10^{-34}", r"x=9.11\times10^{-31}", False),
        (r"6.63\times10^{-34}x", r"9.11\times10^{-31}x", False),
        (r"(1,1.6\times10^{-19})", r"(1,2.6\times10^{-19})", False),
        (r"\{1.6\times10^{-19},2\}", r"\{1.7\times10^{-19},2\}", False),
        (r"\begin{pmatrix}10^{-20}\\1\end{pmatrix}", r"\begin{pmatrix}10^{-21}\\1\end{pmatrix}", False),
        ("[0,10^{-9}]", "[0,10^{-8}]", False),
        (r"\frac{1}{81}", "0.012346", True),
    ],
    "numerals": [
        (r"\frac{5}{4}", "1 1/4", True),
        (r"-\frac{5}{4}", "-1 1/4", True),
        (r"\frac{4}{3}", "2 2/3", False),
        ("1.5", "1½", True),
        ("0.00015", "1.5e-4", True),
        ("10^{-34}", "10^-34", True),
        ("10^{-34}", "10⁻³⁴", True),
        ("x^2", "x²", True),
        (r"\sqrt{3}", "√3", True),
        ("1010_2", "1010_{2}", True),
        ("1010_2", "1010_3", False),
        ("1010_2", "1010", False),
        ("1,234.5", r"\frac{2469}{2}", True),
        (r"25\%", "25", True),
        ("0.4", ".4", True),
        ("-0.4", "-.4", True),
        ("0.4", "4", False),
        ("0.4", "1.4", False),
        ("(0.4,0.5)", "(.4, .5)", True),
        ("32349", r"32,\! 349", True),
    ],
    "numerals of other places": [
        ("12.5", "12,5", True),
        ("12.5", "12{,}5", True),
        ("12.5", "(12,5)", False),
        ("12.5", r"12.5\%", True),
        ("0.375", "0,375", True),
        ("1.25", "1,250", False),
        ("2,3", "2.3", False),
        (r"\frac34", ".75", True),
        ("1234567", "1.234.567", True),
        ("1234567", "1’234’567", True),
        ("1234567", "12,34,567", True),
        ("1234567", r"1{\,}234{\,}567", True),
        ("1234567", "１，２３４，５６７", True),
        ("1234567", "1.234567", False),
        ("5000000", r"5\text{ million}", True),
        ("5000000", "5 million", True),
        ("5000000", "5 billion", False),
        (r"6.02\times10^{23}", "6.02e23", True),
        (r"6.02\times10^{23}", r"602\times10^{21}", True),
        (r"6.02\times10^{23}", "6.03e23", False),
        ("5", "\u200b5\u200f", True),
    ],
    "spellings of LaTeX and of programs": [
        ("10^6", "10**6", True),
        (r"4\pi", "4*pi", True),
        (r"\frac34", r"\nicefrac{3}{4}", True),
        ("5", r"\textcolor{red}{5}", True),
        ("5", r"5 \\", True),
        ("5", r"\text{Answer: } 5", True),
        ("5", r"5\ \mathrm{m\,s^{-1}}", True),
        (r"\emptyset", r"\varnothing", True),
        (r"x\in\mathbb{R}", r"x \in \mathbb R", True),
        (r"45^\circ", r"45^{\text{o}}", True),
        (r"\frac{\sqrt3}{2}", r"\sin 60^\circ", True),
        (r"\frac{\sqrt3}{2}", r"\sin 30^\circ", False),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", True),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}", False),
        ("3:5", r"3\colon 5", True),
        ("Yes", "YES", True),
        ("Yes", "No", False),
    ],
    "both signs and lists": [
        ("2,-2", r"\pm 2", True),
        (r"\pm 2", r"2\text{ or }-2", True),
        (r"\pm 2", "2", False),
        ("2", r"\pm 2", False),
        (r"\pm1,\pm2", "1,-1,2,-2", True),
        (r"\{1,2,3\}", r"1, 2, \text{ and } 3", True),
        ("2,3", "2 or 3", True),
        ("2", "2 or 3", False),
        ("5", r"\gtrsim 5", False),
    ],
    "relations and tuples": [
        ("5", r"\ne 5", False),
        ("5", r"\leq 5", False),
        (r"\leq 5", r"\le 5", True),
        ("(1,2)", "(2,1)", False),
        ("(1,2,3)", "(3,2,1)", False),
        (r"(\frac12,3)", r"\left(0.5, 3\right)", True),
        ("x=1,y=2", "x=1, y=2", True),
        ("x=1,y=2", "x=2, y=1", False),
        (r"\pm 2", "2, -2", True),
        (r"\{-2,2\}", r"\pm 2", True),
        (r"\pm 2", "2", False),
        (r"\pm 2", "-2", False),
        ("2", r"\pm 2", False),
        (r"\pm \sqrt{3}", r"\pm\sqrt 3", True),
        (r"\pm 2", r"\pm 3", False),
    ],
    "numbers without end": [
        ("9^{9^{9}}", "9^{9^{9}}", True),
        ("42", "9^{9^{9}}", False),
        ("42", "9^{9^{9^9}}", False),
        ("42", "((10^3)!)!", False),
        ("42", "(10^9)!", False),
        ("42", "e^{e^{e^{e^{e}}}}", False),
        ("42", r"\sin(9^{9^9})", False),
        ("42", r"\{9^{9^9}, 1\}", False),
        ("42", r"9^{9^9}\%", False),
        ("x", "x^{9^{9^9}}", False),
        ("x", "(x+1)^{10^6}", False),
        ("2^{100}+1", "2^{100}", False),
        ("5050", r"\sum_{n=1}^{100} n", True),
    ],
}
"""Gold, content of the box, whether they are equal."""

TEXTS: list[tuple[str, str, bool]] = [
    ("5", "\\boxed{**5**}", True),
    ("5", "\\boxed{`5`}", True),
    ("5", "Answer: **5** (five)", True),
    ("5", "**Final answer:** 5 ✅", True),
    ("5", "Answer:\n* 5", True),
    ("6", "Answer: ~~5~~ 6 or 5", False),
    ("-5", "-5", True),
    ("5", "-5", False),
    ("-10/9", "-\\frac{10}{9}", True),
    ("x + 1", "- x + 1", True),
    ("23", "\\boxed {23}", True),
    ("23", "\\boxed\n{23}", True),
    ("23", "\\fbox{23}", True),
    ("23", "\\boxed{23}. I put it in \\boxed{} as asked.", True),
    ("5", "in \\boxed{answer}. So \\boxed{5}", True),
    ("5", "so \\boxed{5} in \\boxed{answer}", True),
    ("5", "\\boxed{4}. No wait, \\boxed{5}", True),
    ("4", "\\boxed{4}. No wait, \\boxed{5}", False),
    ("5", "\\boxed{4}, \\boxed{5}", False),
    ("4, 5", "$\\boxed{4} \\quad \\text{and} \\quad \\boxed{5}$", True),
    ("5", "$\\boxed{4} \\quad \\text{and} \\quad \\boxed{5}$", False),
    ("5", "\\boxed{4} \\quad \\text{or rather} \\quad \\boxed{5}", True),
    ("34", "Final Answer: The largest $n$ is 34.", True),
    ("34", "Final Answer: The largest $n$ is 35.", False),
    ("34", "Answer: it is 34.", True),
    ("x", "The answer is $x$, not 5.", True),
    ("23", "\\boxed 23", True),
    ("1/2", "\\boxed\\frac{1}{2}", True),
    ("23", "$\\boxed{\\large 23}$", True),
    ("23", "\\boxed{\\textbf{23}}", True),
    ("2", "The answer is 2 2/3", False),
    ("\\frac83", "The answer is 2 2/3.", True),
    ("0.00015", "**Answer:** 1.5e-4", True),
    ("42", "First $41$ then $42$", True),
    ("42", "So x = 42", True),
    ("-3", "$-3$", True),
    ("5", "The answer is $\\ne 5$", False),
    ("3", "__import__('os').getcwd()", False),
    # Labels and marks
    ("5", "答案：5", True),
    ("12.5", "Antwort: 12,5", True),
    ("5", "**5**", True),
    ("-7", "The answer is −7.", True),
    ("6", "The answer is 6, not 5.", True),
    ("6", "It is not 5 but 6. Thus $\\boxed{6}$", True),
    ("6", "Each pack has 4 or 5 cards, so there are 6.", True),
    ("6", "So one needs at least 6.", True),
    # Hedges
    ("5", "The answer is \\leq 5", False),
    ("5", "The answer is ≤ 5", False),
    ("5", "The answer is not 5.", False),
    ("5", "The answer is at least 5.", False),
    ("5", "The answer is 5 or 6.", False),
    ("6", "The answer is 5 or 6.", False),
    ("5", "The answer could be 5, or 6, or 7.", False),
    ("5", "4 or 5", False),
    ("6", "between 5 and 6", False),
    ("5", "I think 5 is not the answer", False),
    ("5", "Answer: anything but 5", False),
    ("5", "The answer is ±5", False),
    ("5", "The answer is 5x", False),
    ("5", "It is not \\boxed{5}", False),
    ("6", "$x \\ne \\boxed{6}$", False),
    ("6", "\\boxed{6}, not \\boxed{5}", True),
    ("5", "\\boxed{6}, not \\boxed{5}", False),
    ("5", "\\boxed{6} and maybe \\boxed{5}", False),
]
"""Gold, the whole text, whether it gives the gold."""


def is_equal(gold: str, text: str) -> bool:
    question = ask(boxed_gold(gold), text)
    if question.difference is not None or not question.pairs:
        return question.difference is None
    return bool(work([list(pair) for pair in question.pairs])["equal"])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", BOXED)
def test_answers_in_boxes(kind: str) -> None:
    wrong = [case for case in BOXED[kind] if is_equal(case[0], f"\\boxed{{{case[1]}}}") != case[2]]
    assert wrong == []


@pytest.mark.parametrize(("gold", "text", "equal"), TEXTS)
def test_answers_in_texts(gold: str, text: str, equal: bool) -> None:
    assert is_equal(gold, text) == equal


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "x.\uff4eame",
        "S('1')",
        "1 if 1 else 2",
        "[1]",
        "2(3)",
        "1_000",
        "\uff11",
        "1 .real",
    ],
)
def test_arithmetic_reads_nothing_but_arithmetic(text: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        arithmetic(text)


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize(("text", "value"), [("1+2*3", 7), ("-(2**3)/4", -2), ("2--1", 3), ("1.5*2", 3)])
def test_arithmetic(text: str, value: float) -> None:
    assert float(arithmetic(text).doit()) == value

"""Math-Verify's own tests (its sdist), through math_with_judge without a judge."""

from __future__ import annotations

import importlib
import sys

import pytest
from support.environments import Bench, said
from tables import TABLES, needs_table

from gym_serve.environments.math_with_judge import MathWithJudge
from gym_serve.types.errors import InvalidRequest

FOLDER = TABLES / "math_verify"

_COMMA = "ours: `1,22` is a list; whoever writes 1.22 with a comma is not understood"
_IS_NINE = "ours: space within the dollars changes nothing"
_ROUNDING = "neither: the test asks for 2 digits; math_with_judge asks for 6, and has no such setting"
_WORDS_BETWEEN = (
    "math-verify: both boxes are the answer; ours takes the last, as a try and its correction look the same"
)
_SEVERAL = "ours: a row's gold is one value, not a text with two boxes"

DISAGREEMENTS = {
    ("1,22", "1.22"): _COMMA,
    ("$9$", "Answer $ \n 9 \n $"): _IS_NINE,
    ("$9$", "Answer \\( \n 9 \n \\)"): _IS_NINE,
    (
        "$10/9$",
        r"Answer $ \frac{1}{2} \$ = \frac{10}{9} $",
    ): "ours: LaTeX reads `\\$` as a sign, so this is no formula",
    (
        r"$(\begin{pmatrix}\frac{1}{3}\\ \frac{1}{5} \end{pmatrix})$",
        r"$\begin{pmatrix}0.33\\0.2 \end{pmatrix}$",
    ): _ROUNDING,
    (r"$(\frac{3}{5},\frac{8}{3}]$", "$(0.6,2.6667]$"): _ROUNDING,
    (r"$\boxed{1}\boxed{2}$", r"$\boxed{1,2}$"): _SEVERAL,
    (r"\boxed{1} papers and \boxed{2} bins", r"$\boxed{1,2}$"): _SEVERAL,
    (r"$\\boxed{35 cm} ++++++ \\boxed{4}$", "${35 cm,4}$"): _SEVERAL,
    (
        r"$x \in [-2,7]$",
        r"$-2 \\le x \\le 7$",
    ): "ours: an inequality and its interval are one set (README); the test forbids that",
    (
        "$$(3, 3), (1, 1)$$",
        r"$$\boxed{(3, 3)} \text{ for part (a) and } \boxed{(1, 1)}$$",
    ): _WORDS_BETWEEN,
    (
        "$y_{1}=-2 x^{2}+4 x+3, y_{2}=3 x^{2}+12 x+10$",
        r"\($y_1 = \boxed{-2(x - 1)^2 + 5} \) and \( y_2 = \boxed{3(x + 2)^2 - 2} \) ",
    ): _WORDS_BETWEEN,
    ("$f(x)$", "$f(y)$"): "ours: two variables are two; the test sets strict=False",
    (
        r"$1 - \frac{1}{\mathrm{e}}$",
        r"$1 + \frac{1}{\mathrm{e}}$",
    ): "ours: math-verify drops what follows `\\mathrm`, and so the sign does not count",
}
"""(gold, answer) with another verdict, and who is right."""


def cases(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, bool]]:
    """The gold, the answer and the verdict of each parametrized test."""
    monkeypatch.syspath_prepend(FOLDER)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        monkeypatch.delitem(sys.modules, name)
    found = []
    for path in sorted((FOLDER / "tests").glob("test_*.py")):
        for test in vars(importlib.import_module(f"tests.{path.stem}")).values():
            for mark in getattr(test, "pytestmark", ()):
                names = [name.strip() for name in mark.args[0].split(",")]
                if names[:2] == ["gold", "pred"]:
                    result = names.index("result" if "result" in names else "expected")
                    found += [(case[0], case[1], bool(case[result])) for case in mark.args[1]]
    return found


@needs_table("math_verify")
async def test_every_disagreement_is_argued(monkeypatch: pytest.MonkeyPatch) -> None:
    server = MathWithJudge(should_use_judge=False)
    await server.start()
    bench = Bench(server)
    found: set[tuple[str, str]] = set()
    total = 0
    try:
        for gold, answer, expected in cases(monkeypatch):
            total += 1
            try:
                reward = (await bench.verify({"question": "?", "expected_answer": gold}, said(answer)))[
                    "reward"
                ]
            except InvalidRequest as error:
                reward = error.message
            if reward != float(expected):
                found.add((gold, answer))
    finally:
        await server.stop()
    assert total == 275
    assert [key for key in found if key not in DISAGREEMENTS] == []
    assert [key for key in DISAGREEMENTS if key not in found] == []

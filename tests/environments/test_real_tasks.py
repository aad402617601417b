"""The rows of `examples/real_tasks.py`: what is held out, and what their environments say of answers."""

from __future__ import annotations

import importlib
import json
import re
from typing import Any

import pytest
from support.docs import ROOT
from support.environments import Bench, said

from gym_serve.graph.classes import find_class


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("real_tasks")


def answers(task: str, row: dict[str, Any], question: str) -> tuple[str, str]:
    """A right one and a wrong one."""
    if task == "yaml":
        text, number = json.loads(row["schema_str"])["properties"]
        name, value = question.split(maxsplit=1)[0], re.findall(r"\d+", question)[0]
        return f"{text}: {name}\n{number}: {value}", f"{text}: {name}\n{number}: {value} km"
    words = question.replace(" or ", " ").split()
    if task == "swap":
        return " ".join(reversed(words)), " ".join(words)
    return max(words, key=int), min(words, key=int)


@pytest.mark.parametrize("task", ["swap", "yaml", "numbers"])
async def test_right_answers_are_paid_and_wrong_ones_are_not(tasks: Any, task: str) -> None:
    settings = dict(tasks.TASKS[task].resources)
    server = find_class("resources", settings.pop("type"))(**settings)
    await server.start()
    try:
        for row in tasks.rows(task, 5, seed=0):
            right, wrong = answers(task, row, tasks.question_of(row))
            assert (await Bench(server).verify(row, said(right)))["reward"] == 1.0
            assert (await Bench(server).verify(row, said(wrong)))["reward"] == 0.0
            assert (await Bench(server).verify(row, said(f"Sure! {right}")))["reward"] == 0.0
    finally:
        await server.stop()


@pytest.mark.parametrize("task", ["swap", "yaml", "numbers"])
def test_no_two_rows_have_the_same_words_and_a_seed_gives_the_same_rows(tasks: Any, task: str) -> None:
    rows = tasks.rows(task, 1152, seed=1)  # as many as a training has
    words = {frozenset(tasks.question_of(row).split()) for row in rows}
    assert len(words) == len(rows) == 1152
    assert tasks.rows(task, 50, seed=1) == rows[:50]
    assert tasks.rows(task, 50, seed=2) != rows[:50]

"""Rows that cannot be scored are found before a model is asked, and no row says how its rollout ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from typer.testing import CliRunner

from gym_serve import AsyncGym, Gym, InvalidRequest, ModelServer, ResourcesServer, Response
from gym_serve.cli import main
from gym_serve.rollouts.rows import Problems
from gym_serve.rollouts.runner import _alike
from gym_serve.rollouts.scheduling import RepeatedFailures
from gym_serve.types.endings import FAILURES, Cause, ending_of
from gym_serve.types.errors import RepeatedFailure
from gym_serve.types.rows import failed_rollout

asked: list[Any] = []


class Asked(ModelServer):
    async def responses(self, body: dict[str, Any]) -> dict[str, Any]:
        asked.append(body["input"])
        content = [{"type": "output_text", "text": "4", "annotations": []}]
        return {
            "id": "r",
            "output": [{"type": "message", "role": "assistant", "content": content}],
            "usage": None,
        }


class Sums(ResourcesServer):
    class Row(BaseModel):
        expected_answer: str

    def verify(self, row: Row, response: Response) -> float:
        if row.expected_answer == "broken":
            raise ZeroDivisionError
        return float(response.last_text == row.expected_answer)


GRAPH = {
    "models": {"policy": {"type": Asked}},
    "resources": {"sums": {"type": Sums}},
    "agents": {"agent": {"type": "single_turn_agent", "model": "policy", "resources": "sums"}},
}


@pytest.fixture
def gym() -> Any:
    asked.clear()
    with Gym.from_graph(GRAPH, ray=False) as gym:
        yield gym


def rows(number: int, **keys: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"2 + 2? ({n})", **keys} for n in range(number)]


async def test_collect_asks_no_model_for_rows_without_their_gold(gym: Gym, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as error:
        await AsyncGym.of(gym).collect(rows(300), tmp_path / "out.jsonl")
    assert asked == []
    lines = str(error.value).splitlines()
    assert lines[0].startswith("300 rows cannot be used")
    assert lines[1:] == ["  - row 1: invalid row: expected_answer: Field required (and 299 more like this)"]


def test_rows_of_the_caller_are_not_paid_for_either(gym: Gym) -> None:
    found = gym.run(rows(3))
    assert [rollout["failure"]["kind"] for rollout in found] == ["invalid_request"] * 3
    assert [rollout["failure"]["stage"] for rollout in found] == ["seed"] * 3
    assert asked == []


@pytest.mark.parametrize(
    "marks",
    [
        {"failure": "of the engine"},
        {"failure": {}},
        {"failure": None},
        {"failure": {"kind": "unavailable"}},
        {"mask_sample": True},
        {"instance_config": {"mask_sample": True}},
        {"_ng_failure_terminal": True},
        {"_ng_failure_class": "unavailable"},
        {"stopped_by": "tool_deadline"},
        {"verification_skipped": True},
        {"branches": [{"output": []}], "captured_input": []},
    ],
)
def test_marks_of_a_row_end_no_rollout(gym: Gym, marks: dict[str, Any], tmp_path: Path) -> None:
    row = {"prompt": "2 + 2?", "expected_answer": "4", **marks}
    (rollout,) = gym.run([row])
    assert (rollout.reward, rollout.failure, rollout.masked) == (1.0, None, False)
    assert ending_of(rollout).counts == "reward"
    assert not rollout.keys() & {"stopped_by", "verification_skipped", "branches", "captured_input"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    checked = CliRunner().invoke(main, ["dataset", "validate", str(tmp_path / "rows.jsonl")])
    if "_ng_failure_class" not in marks:  # the row of a failed rollout, which may be tried again
        assert checked.exit_code == 1
        assert "only a run sets this key" in checked.stderr


async def test_failures_alike_end_a_run_and_leave_its_rows_open(gym: Gym, tmp_path: Path) -> None:
    for number in (200, 20):
        out = tmp_path / f"{number}.jsonl"
        report = await AsyncGym.of(gym).collect(rows(number, expected_answer="broken"), out, concurrency=1)
        assert isinstance(report.operator_error, RepeatedFailure)
        assert report.operator_error.message.startswith(
            "20 rollouts in a row failed alike, with verify_failed in the verify stage of sums: "
        )
        assert (report.complete, report.progress.remaining) == (False, number)
        failures = tmp_path / f"{number}_failures.jsonl"
        assert not failures.exists() or not failures.read_text()
    assert len(asked) < 60


async def test_fewer_failures_alike_are_those_of_their_rows(gym: Gym, tmp_path: Path) -> None:
    broken, good = rows(19, expected_answer="broken"), rows(1, expected_answer="4")
    again = {**broken[0], "prompt": "again"}
    await AsyncGym.of(gym).collect([*broken, *good, again], tmp_path / "out.jsonl", concurrency=1)
    failures = (tmp_path / "out_failures.jsonl").read_text().splitlines()
    assert len(failures) == 20
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("row 7: gold 'hhh' cannot be read", 'row 12: gold "it\'s" cannot be read', True),
        ("gold `a b`: no number", "gold `c`: no number", True),
        ("the row's gold is empty", "the row's gold is unknown", False),
        ("gold 'a' cannot be read", "gold 'a' is too long", False),
    ],
)
def test_failures_are_alike_but_for_numbers_and_quoted_values(one: str, other: str, alike: bool) -> None:
    first, second = (_alike(failed_rollout({}, InvalidRequest(text))) for text in (one, other))
    assert (first == second) is alike


KINDS = st.sampled_from(["score", "machine", "a", "b"])


@given(st.lists(KINDS, max_size=80))
def test_what_is_held_back_is_handed_over_in_order_or_the_run_ends(kinds: list[str]) -> None:
    repeats: RepeatedFailures[int] = RepeatedFailures()
    row, scored = FAILURES[Cause.ROW], ending_of({"reward": 1.0})
    recorded: list[int] = []
    streak, last = 0, ""
    for number, kind in enumerate(kinds):
        ending = {"score": scored, "machine": FAILURES[Cause.MACHINE]}.get(kind, row)
        alike = (kind, "verify", "env", "why") if kind in "ab" else None
        recorded += repeats.passed(number, number, alike, ending)
        if kind in "ab":
            streak, last = (streak + 1 if kind == last else 1), kind
        elif kind == "score":
            streak, last = 0, ""
        if streak >= 20:
            assert repeats.fatal is not None
            return
        assert repeats.fatal is None
    recorded += repeats.released()
    assert sorted(recorded) == list(range(len(kinds)))


def test_the_repeats_of_one_row_end_no_run() -> None:
    repeats: RepeatedFailures[int] = RepeatedFailures()
    for number in range(64):
        repeats.passed(number, 7, ("kind", "verify", "env", "why"), FAILURES[Cause.ROW])
    assert repeats.fatal is None
    assert len(repeats.released()) == 64


def test_equal_problems_are_one_line() -> None:
    problems = Problems()
    for number in range(50):
        problems.add(f"rows.jsonl:{number}: expected_answer: Field required")
    problems.add("rows.jsonl:51: not JSON")
    problems.add("there is nothing")
    assert problems.count == 52
    assert problems.kept == [
        "rows.jsonl:0: expected_answer: Field required (and 49 more like this)",
        "rows.jsonl:51: not JSON",
        "there is nothing",
    ]

"""Scores of a run: means, reducers, breakdowns, differences, and what looks wrong."""

import math
from itertools import product
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_serve.evaluation.report import write_html
from gym_serve.evaluation.results import Results, holm, results_of
from gym_serve.metrics.estimators import sign_flip

AGENTS = {"sums--m": ("sums", "m")}


def rollout(row: int, reward: float, text: str = "4", **changes: Any) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text}]
    response = {
        "output": [{"type": "message", "role": "assistant", "content": content}],
        "usage": {"input_tokens": 10, "output_tokens": 2},
        **changes.pop("response", {}),
    }
    return {
        "benchmark_row": f"sums/{row}",
        "agent_ref": {"name": "sums--m"},
        "reward": reward,
        "response": response,
        **changes,
    }


def run(
    folder: Path,
    rollouts: list[dict[str, Any]],
    asked: int | None = None,
    questions: list[str] | None = None,
    **options: Any,
) -> Results:
    folder.mkdir(exist_ok=True)
    file = folder / "rollouts.jsonl"
    file.write_bytes(b"".join(orjson.dumps(one) + b"\n" for one in rollouts))
    rows = [
        {"agent_ref": {"name": "sums--m"}, "benchmark_row": f"sums/{n}"}
        for n in range(len(rollouts) if asked is None else asked)
    ]
    if questions is not None:
        rows = [
            {**row, "sum": question, "responses_create_params": {"input": question}}
            for row, question in zip(rows, questions, strict=True)
        ]
    inputs = b"".join(orjson.dumps(row) + b"\n" for row in rows)
    (folder / "rollouts_materialized_inputs.jsonl").write_bytes(inputs)
    record = {"gym_serve": "0", "models": [{"label": "m"}], "benchmarks": []}
    return results_of(file, AGENTS, record, **options)


def test_a_score_is_the_mean_over_rows(tmp_path: Path) -> None:
    (cell,) = run(tmp_path, [rollout(0, 1), rollout(1, 0), rollout(1, 1), rollout(1, 1), rollout(0, 1)]).cells
    assert cell.score is not None
    assert cell.score.mean == pytest.approx((1 + 2 / 3) / 2)
    assert cell.reducers == {
        "pass@2": pytest.approx((1 + 1) / 2),
        "pass^2": pytest.approx((1 + 1 / 3) / 2),
        "best@2": 1.0,
    }
    assert (cell.input_tokens, cell.output_tokens) == (50, 10)


def test_a_masked_rollout_is_no_score(tmp_path: Path) -> None:
    (cell,) = run(tmp_path, [rollout(0, 1), rollout(1, 0, mask_sample=True)]).cells
    assert cell.score is not None
    assert (cell.score.mean, cell.scored, cell.asked) == (1.0, 1, 2)
    assert cell.health[0] == "1 of 2 rollouts have no score"


def test_rows_that_are_solved_half_the_time_leave_their_mean_uncertain(tmp_path: Path) -> None:
    (cell,) = run(tmp_path, [rollout(n, reward, level="one") for n in range(4) for reward in (0, 1)]).cells
    for score in (cell.score, run(tmp_path, [rollout(n, n % 2) for n in range(8)]).cells[0].score):
        assert score is not None
        assert score.low is not None
        assert score.high is not None
        assert (score.mean, round(score.low, 3), round(score.high, 3)) == (0.5, 0.215, 0.785)


def test_the_first_rollouts_of_a_row_are_not_the_quickest(tmp_path: Path) -> None:
    short = [rollout(1, 0, said="7", _ng_rollout_index=n) for n in (1, 0)]
    by_end = [rollout(0, float(n == 2), said=str(n), _ng_rollout_index=n) for n in (2, 1, 0)]
    (cell,) = run(tmp_path, by_end + short, answers={"sums": "said"}).cells
    assert (cell.reducers["best@2"], cell.reducers["majority@2"]) == (0.0, 0.0)


def test_rollouts_that_end_at_a_limit_are_told(tmp_path: Path) -> None:
    stopped = [rollout(n, 0, stopped_by="max_episode_tokens") for n in range(2)]
    (cell,) = run(tmp_path, [*stopped, rollout(2, 1, stopped_by="max_steps"), rollout(3, 1)]).cells
    assert cell.scored == 4
    assert [line for line in cell.health if "stopped by" in line] == [
        "2 of 4 rollouts were stopped by max_episode_tokens, and are scored as they stand",
        "1 of 4 rollouts were stopped by max_steps, and are scored as they stand",
    ]


def test_a_majority_votes(tmp_path: Path) -> None:
    votes = [("7", 0), ("4", 1), ("4", 1)]
    rollouts = [rollout(0, reward, extracted=answer) for answer, reward in votes]
    (cell,) = run(tmp_path, rollouts, answers={"sums": "extracted"}).cells
    assert cell.reducers["majority@3"] == 1.0


def test_a_field_breaks_it_down(tmp_path: Path) -> None:
    rollouts = [rollout(n, n % 2, level="hard" if n < 4 else "easy") for n in range(6)]
    (cell,) = run(tmp_path, rollouts, by=["level", "nosuch"]).cells
    assert {value: score.rows for value, score in cell.by["level"].items()} == {"easy": 2, "hard": 4}
    assert "nosuch" not in cell.by


def test_a_baseline_is_paired_by_row(tmp_path: Path) -> None:
    run(tmp_path / "before", [rollout(n, 0) for n in range(12)])
    now = [rollout(n, 1) for n in (*range(2, 14), 99)]
    results = run(tmp_path / "now", now, baseline=tmp_path / "before" / "rollouts.jsonl")
    difference = results.cells[0].difference
    assert difference is not None
    assert (difference.rows, difference.baseline, difference.mean) == (10, 0.0, 1.0)
    assert difference.p == 2 / 2**10
    assert difference.is_clear


def test_a_baseline_of_other_rows_is_not_compared(tmp_path: Path) -> None:
    asked = [f"{n} + 1" for n in range(13)]
    run(tmp_path / "before", [rollout(n, n % 2) for n in range(12)], questions=asked[:12])
    shifted = [asked[0], *asked[2:]]
    now = run(
        tmp_path / "now",
        [rollout(n, n % 2) for n in range(12)],
        questions=shifted,
        baseline=tmp_path / "before" / "rollouts.jsonl",
    )
    (cell,) = now.cells
    assert cell.difference is not None
    assert cell.difference.rows == 1
    assert cell.health[-1] == "11 rows asked something else in the baseline, and are not compared"


def test_a_difference_may_go_either_way(tmp_path: Path) -> None:
    run(tmp_path / "before", [rollout(n, 0) for n in range(12)])
    now = run(
        tmp_path / "now", [rollout(n, 0) for n in range(12)], baseline=tmp_path / "before" / "rollouts.jsonl"
    )
    difference = now.cells[0].difference
    assert difference is not None
    assert (difference.low, difference.high) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("rollouts", "line"),
    [
        ([rollout(n, n % 2, text=" ") for n in range(4)], "4 of 4 answers are empty"),
        ([rollout(0, 1, response={"status": "incomplete"})], "1 of 1 answers end at a limit of tokens"),
        (
            [rollout(0, 1, response={"usage": None})],
            "1 of 1 answers have text, and no output tokens in their usage",
        ),
        ([rollout(n, n % 2, extracted="B") for n in range(12)], "all answers are B"),
        ([rollout(n, 0) for n in range(12)], "no row is solved"),
        ([rollout(n, 1) for n in range(12)], "every row is solved"),
        (
            [rollout(0, 0, responses_create_params={"tools": [{"name": "t"}]})],
            "no answer calls a tool, though 1 have tools",
        ),
    ],
)
def test_what_looks_wrong_is_told(tmp_path: Path, rollouts: list[dict[str, Any]], line: str) -> None:
    (cell,) = run(tmp_path, rollouts, answers={"sums": "extracted"}).cells
    assert line in cell.health


def test_rollouts_without_a_score_are_told(tmp_path: Path) -> None:
    (cell,) = run(tmp_path, [rollout(0, 1)], asked=3).cells
    assert cell.health[0] == "2 of 3 rollouts have no score"
    assert run(tmp_path, [], asked=3).lowest is None


@given(st.lists(st.integers(-3, 3), max_size=8))
def test_few_differences_are_flipped_in_all_ways(differences: list[int]) -> None:
    total = abs(sum(differences))
    flips = [
        math.sumprod(differences, signs)
        if hasattr(math, "sumprod")
        else sum(d * s for d, s in zip(differences, signs, strict=True))
        for signs in product((1, -1), repeat=len(differences))
    ]
    assert sign_flip(differences) == pytest.approx(sum(abs(flip) >= total for flip in flips) / len(flips))


def test_many_differences_are_sampled_alike_each_time() -> None:
    differences = [1.0] * 40 + [-1.0] * 10
    assert sign_flip(differences) == sign_flip(differences) < 0.01
    assert sign_flip([1.0, -1.0] * 30) == 1.0


def test_holms_correction() -> None:
    corrected = holm([0.01, None, 0.04, 0.03])
    assert [None if p is None else round(p, 6) for p in corrected] == [0.03, None, 0.06, 0.06]


def test_a_page_escapes_what_models_write(tmp_path: Path) -> None:
    results = run(tmp_path, [rollout(0, 0, text="<script>alert(1)</script>", reason="<b>no</b>")])
    results.record["benchmarks"] = [
        {
            "name": "sums",
            "version": 1,
            "metric": "accuracy",
            "rows": "made",
            "license": "CC0",
            "published": [],
            "prompt": {"system": "Add <numbers>.", "user": "{{ sum }}"},
            "contamination": "Models have read these sums.",
        }
    ]
    results.record["notes"] = ["stopped before its end"]
    write_html(results, tmp_path / "report.html", tmp_path / "rollouts.jsonl", "http://127.0.0.1:7433")
    page = (tmp_path / "report.html").read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "&lt;b&gt;no" in page
    shown = ("Add &lt;numbers&gt;.", "{{ sum }}", "Contamination: Models have", "stopped before its end")
    assert "http://127.0.0.1:7433/#/rollouts?where=row.benchmark_row+%3D+%27" in page
    assert all(text in page for text in shown)

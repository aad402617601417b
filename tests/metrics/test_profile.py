"""Reward profile: rows joined with their rollouts."""

from __future__ import annotations

from typing import Any

import pytest

from gym_serve.metrics import completion_summary, reward_profile
from gym_serve.types.errors import InvalidRequest


def row(task: int, index: int, agent: str = "solver") -> dict[str, Any]:
    return {
        "_ng_task_index": task,
        "_ng_rollout_index": index,
        "agent_ref": {"name": agent},
        "topic": f"t{task}",
    }


def result(task: int, index: int, reward: float, **fields: Any) -> dict[str, Any]:
    return {"_ng_task_index": task, "_ng_rollout_index": index, "reward": reward, **fields}


ROWS = [row(5, 0), row(5, 1), row(2, 0, "other"), row(2, 1, "other"), row(8, 0)]


def test_complete_collection() -> None:
    profile = reward_profile(
        ROWS[:4], [result(5, 1, 1.0), result(2, 0, 0.5), result(2, 1, 0.5), result(5, 0, 0.0)]
    )
    two, five = profile["group_level_metrics"]
    assert two["sample"] == {"agent_ref": {"name": "other"}, "topic": "t2"}
    assert five["mean/reward"] == 0.5
    assert [info["reward"] for info in five["rollout_infos"]] == [0.0, 1.0]
    assert [(a["agent_ref"]["name"], a["std/reward"]) for a in profile["agent_level_metrics"]] == [
        ("other", 0.0),
        ("solver", pytest.approx(0.5**0.5)),
    ]
    assert profile["completion"]["reward_profile_completion_pct"] == 100.0


def test_partial_collection() -> None:
    results = [
        result(5, 0, 1.0),
        result(2, 0, 0.0),
        result(2, 1, 1.0),
        result(8, 0, 0.0, _ng_failure_class="session_lost"),
    ]
    with pytest.raises(InvalidRequest, match=r"2 rows have no result: 5:1, 8:0"):
        reward_profile(ROWS, results)
    profile = reward_profile(ROWS, results, allow_partial=True)
    assert [g["_ng_task_index"] for g in profile["group_level_metrics"]] == [2, 5]
    assert profile["group_level_metrics"][1]["missing_num_rollouts"] == 1
    assert profile["group_level_metrics"][1]["reward_profile_completion_pct"] == 50.0
    assert profile["completion"] == {
        "expected_rollout_rows": 5,
        "completed_rollout_rows": 3,
        "missing_rollout_rows": 2,
        "extra_rollout_rows": 0,
        "reward_profile_completion_pct": 60.0,
        "total_input_rows": 3,
        "complete_input_rows": 1,
        "partial_input_rows": 1,
        "missing_input_rows": 1,
    }


def test_results_without_rows_are_refused_and_counted() -> None:
    extra = [result(task, 0, 1.0) for task in range(20, 32)]
    with pytest.raises(InvalidRequest, match=r"12 results have no materialized row: 20:0, .*, \.\.\."):
        reward_profile(ROWS, extra, allow_partial=True)
    assert completion_summary(ROWS, extra)["extra_rollout_rows"] == 12


def test_duplicates_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="two rows for rollout 0 of task 5"):
        reward_profile([ROWS[0], ROWS[0]], [])
    with pytest.raises(InvalidRequest, match="two results for rollout 1 of task 2"):
        completion_summary(ROWS, [result(2, 1, 0.0)] * 2)


def test_empty() -> None:
    profile = reward_profile([], [])
    assert (profile["group_level_metrics"], profile["agent_level_metrics"]) == ([], [])
    assert profile["completion"]["reward_profile_completion_pct"] == 100.0


def test_rows_without_an_agent_name_belong_to_the_agent() -> None:
    rows = [{"_ng_task_index": 0, "_ng_rollout_index": 0, "agent_ref": "solver"}]
    profile = reward_profile(rows, [result(0, 0, 1.0)])
    assert profile["agent_level_metrics"][0]["agent_ref"] == {"name": "agent"}

"""The table after a run."""

from typing import Any

import pytest

from gym_serve.metrics import (
    LATENCY_FIELD,
    SUMMARY_COLUMNS,
    Aggregator,
    Failures,
    SummaryRow,
    summarize,
)
from gym_serve.metrics.aggregator import mean_of


def test_rows_of_two_environments() -> None:
    math = Aggregator()
    for task, rewards in enumerate([(1.0, 0.0), (0.0, 0.0), (1.0,)]):
        for index, reward in enumerate(rewards):
            math.add(
                {
                    "_ng_task_index": task,
                    "_ng_rollout_index": index,
                    "reward": reward,
                    "response": {"usage": {"input_tokens": 100, "output_tokens": 20 * (index + 1)}},
                    LATENCY_FIELD: 1.5,
                }
            )
    math.add({"_ng_task_index": 2, "_ng_rollout_index": 1, "reward": 0.0, "_ng_failure_class": "overloaded"})
    rows = summarize({"math": math, "idle": Aggregator()}, asked={"idle": 3})
    interval = rows[0].interval
    assert rows == [
        SummaryRow(
            name="math",
            scored=5,
            asked=6,
            mean_reward=0.5,  # over tasks: 0.5, 0 and 1
            interval=interval,
            pass_at_k=50.0,
            k=2,
            input_tokens=100.0,
            output_tokens=28.0,
            seconds=1.5,
            failures=1,
        ),
        SummaryRow("idle", 0, 3, None, {"num_tasks": 0}, None, 0, None, None, None, 0),
    ]
    assert (interval["num_tasks"], interval["method"]) == (3, "wilson")
    assert rows[0].cells() == ("math", "5/6", "0.500", "0.161 to 0.839", "50.0 (k=2)", "100/28", "1.50")
    assert rows[1].cells() == ("idle", "0/3", "-", "", "-", "-/-", "-")
    assert len(rows[0].cells()) == len(SUMMARY_COLUMNS)


ROLLOUTS: dict[str, dict[str, Any]] = {
    "1": {"reward": 1.0},
    "0": {"reward": 0.0},
    "1/2": {"reward": 0.5},
    "failed": {"reward": 0.0, "mask_sample": True, "_ng_failure_class": "model_timeout"},
    "masked": {"reward": 1.0, "mask_sample": True},
}


@pytest.mark.parametrize(
    ("tasks", "failures", "coverage", "mean", "pass_at_1"),
    [
        (["1 1", "0"], "mask", (3, 3), 0.5, 50.0),
        (["1 failed", "1 failed"], "mask", (2, 4), 1.0, 100.0),
        (["1 failed", "1 failed"], "zero", (2, 4), 0.5, 50.0),
        (["1 1 1 0", "failed"], "zero", (4, 5), 0.375, 37.5),
        (["1 masked", "0 masked"], "zero", (2, 4), 0.5, 50.0),
        (["masked", "failed"], "mask", (0, 2), None, None),
        (["masked", "failed"], "zero", (0, 2), 0.0, 0.0),
        (["1/2 1", "0"], "mask", (3, 3), 0.375, None),
    ],
)
def test_what_counts(
    tasks: list[str],
    failures: Failures,
    coverage: tuple[int, int],
    mean: float | None,
    pass_at_1: float | None,
) -> None:
    aggregator = Aggregator()
    for task, rollouts in enumerate(tasks):
        for index, name in enumerate(rollouts.split()):
            aggregator.add({"_ng_task_index": task, "_ng_rollout_index": index, **ROLLOUTS[name]})
    (row,) = summarize({"env": aggregator}, failures=failures)
    assert (row.scored, row.asked) == aggregator.coverage() == coverage
    assert row.mean_reward == mean
    assert mean_of([row]) == mean
    if row.k == 1:
        assert row.pass_at_k == pass_at_1
    metrics = aggregator.overall()["agent_metrics"]
    assert ("mean/reward" in metrics) == bool(row.scored)  # NeMo Gym's key never counts a failure


def test_a_failure_that_a_later_attempt_made_good_is_none() -> None:
    aggregator = Aggregator()
    for name in ("failed", "1", "failed"):
        aggregator.add({"_ng_task_index": 0, "_ng_rollout_index": 0, **ROLLOUTS[name]})
    (row,) = summarize({"env": aggregator}, failures="zero")
    assert (row.scored, row.asked, row.mean_reward, row.failures) == (1, 1, 1.0, 2)


def test_k_is_a_size_that_half_of_the_groups_reach() -> None:
    aggregator = Aggregator()
    for task, size in enumerate([8, 8, 6, 1]):
        for index in range(size):
            aggregator.add({"_ng_task_index": task, "_ng_rollout_index": index, "reward": 1.0})
    (row,) = summarize({"env": aggregator})
    assert (row.k, row.pass_at_k) == (6, 100.0)

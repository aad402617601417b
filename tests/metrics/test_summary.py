"""The table after a run."""

from __future__ import annotations

from gym_serve.metrics import LATENCY_FIELD, SUMMARY_COLUMNS, Aggregator, SummaryRow, summarize


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
    rows = summarize({"math": math, "idle": Aggregator()})
    assert rows == [
        SummaryRow(
            name="math",
            rollouts=5,
            mean_reward=0.4,
            pass_at_1=50.0,
            pass_at_k=50.0,
            k=2,
            input_tokens=100.0,
            output_tokens=28.0,
            seconds=1.5,
            failures=1,
        ),
        SummaryRow("idle", 0, None, None, None, 0, None, None, None, 0),
    ]
    assert rows[0].cells() == ("math", "5", "0.400", "50.0", "50.0 (k=2)", "100", "28", "1.50", "1")
    assert rows[1].cells() == ("idle", "0", "-", "-", "-", "-", "-", "-", "0")
    assert len(rows[0].cells()) == len(SUMMARY_COLUMNS)


def test_k_is_a_size_that_half_of_the_groups_reach() -> None:
    aggregator = Aggregator()
    for task, size in enumerate([8, 8, 6, 1]):
        for index in range(size):
            aggregator.add({"_ng_task_index": task, "_ng_rollout_index": index, "reward": 1.0})
    (row,) = summarize({"env": aggregator})
    assert (row.k, row.pass_at_k) == (6, 100.0)

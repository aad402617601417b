"""`Aggregator`: order does not matter, duplicates count once, failures count apart."""

import random
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_serve.metrics import LATENCY_FIELD, Aggregator, MetricSpec, Score, aggregate_metrics
from gym_serve.types.errors import InvalidRequest

SPEC = MetricSpec(scores=(Score("accuracy"),), answer="answer", subset="level")


def make_rollout(rng: random.Random, task: int, index: int) -> dict[str, Any]:
    rollout: dict[str, Any] = {
        "_ng_task_index": task,
        "_ng_rollout_index": index,
        "reward": rng.choice([0.0, 1.0]),
        "answer": rng.choice(["a", "b", None]),
        "level": "easy" if task % 2 else "hard",
        "response": {"usage": {"input_tokens": rng.randrange(100), "output_tokens": rng.randrange(100)}},
        LATENCY_FIELD: rng.random(),
    }
    if rng.random() < 0.3:
        rollout["extra"] = rng.random() < 0.5
    return rollout


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32), st.integers(0, 4), st.integers(1, 4))
def test_a_stream_in_any_order_gives_what_the_list_gives(seed: int, tasks: int, repeats: int) -> None:
    rng = random.Random(seed)
    rollouts = [make_rollout(rng, task, index) for task in range(tasks) for index in range(repeats)]
    expected = aggregate_metrics(rollouts, SPEC)
    rng.shuffle(rollouts)
    aggregator = Aggregator(SPEC)
    for rollout in rollouts:
        aggregator.add(rollout)
    assert aggregator.result() == expected
    assert aggregator.result() == expected  # asking changes nothing


def test_a_rollout_added_again_counts_once_as_last_added() -> None:
    aggregator = Aggregator()
    for reward in (0.0, 0.0, 1.0):
        aggregator.add({"_ng_task_index": 3, "_ng_rollout_index": 0, "reward": reward})
    result = aggregator.result()
    assert result["agent_metrics"]["mean/reward"] == 1.0
    assert result["group_level_metrics"][0]["num_rollouts"] == 1


def test_failed_attempts_are_counted_by_class_and_leave_rollouts_missing() -> None:
    aggregator = Aggregator(SPEC)
    for task, index, failure in [
        (1, 0, "model_timeout"),
        (1, 0, "model_timeout"),
        (1, 1, "verifier_failed"),
        (0, 0, None),
        (2, 0, "model_timeout"),
        (2, 0, None),
    ]:
        failed = {"_ng_failure_class": failure, "mask_sample": True} if failure else {}
        reward = float(failure is None)
        aggregator.add({"_ng_task_index": task, "_ng_rollout_index": index, "reward": reward, **failed})
    result = aggregator.result()
    assert result["failures"] == {"model_timeout": 3, "verifier_failed": 1}
    assert result["agent_metrics"]["mean/reward"] == 1.0
    groups = result["group_level_metrics"]
    assert [g["_ng_task_index"] for g in groups] == [0, 1, 2]
    assert [g["missing_num_rollouts"] for g in groups] == [0, 2, 0]  # task 2 was made good
    assert [g["num_rollouts"] for g in groups] == [1, 0, 1]


def test_integers_stay_integers_and_large_ones_stay_numbers() -> None:
    aggregator = Aggregator()
    values = {"count": 3, "ratio": 3.0, "huge": 2**70, "endless": 10**400, "nan": float("nan")}
    aggregator.add({"_ng_task_index": 0, "_ng_rollout_index": 0, **values})
    (info,) = aggregator.result()["group_level_metrics"][0]["rollout_infos"]
    assert isinstance(info["count"], int)
    assert isinstance(info["ratio"], float)
    assert info["huge"] == 2.0**70
    assert not {"endless", "nan"} & info.keys()


@pytest.mark.parametrize(
    "rollout", [{}, {"_ng_task_index": 0}, {"_ng_task_index": 0, "_ng_rollout_index": "0"}]
)
def test_indices_are_required(rollout: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="_ng_"):
        Aggregator().add(rollout)


def test_memory_is_a_few_numbers_for_each_rollout() -> None:
    rng = random.Random(0)
    aggregator = Aggregator(SPEC)
    aggregator.add(make_rollout(rng, 0, 0))
    count = 4000
    tracemalloc.start()
    for position in range(1, count):
        rollout = make_rollout(rng, position // 8, position % 8)
        rollout["response"]["output"] = ["x" * 2000]
        aggregator.add(rollout)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held / count < 250  # bytes; the rollouts themselves are about 4,000 each

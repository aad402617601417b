"""The answer of ``POST /aggregate_metrics``: its shape, its keys, and who counts where."""

import json
import statistics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_serve.metrics import (
    Breakdown,
    MetricSpec,
    Score,
    aggregate_metrics,
    pass_majority_metrics,
    select_key_metrics,
)
from gym_serve.types.errors import InvalidRequest

QA = MetricSpec(
    scores=(Score("accuracy"),),
    answer="choice",
    key_metrics=("mean/reward", "pass@1[avg-of-{k}]/*", "pass@{k}/no_answer"),
)


def rollout(task: int, index: int, reward: float, **fields: Any) -> dict[str, Any]:
    return {"_ng_task_index": task, "_ng_rollout_index": index, "reward": reward, **fields}


def test_nothing_in_nothing_out() -> None:
    assert aggregate_metrics([]) == {
        "group_level_metrics": [],
        "agent_metrics": {},
        "key_metrics": {},
        "confidence": {},
        "failures": {},
    }
    assert aggregate_metrics([], QA)["agent_metrics"] == {}


def test_statistics_of_a_group_and_of_all() -> None:
    usage = {"input_tokens": 30, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 2}}
    result = aggregate_metrics(
        [
            rollout(9, 0, 0.25, solved=True, note="text", response={"usage": usage}),
            rollout(4, 1, 1.0, solved=False),
            rollout(4, 0, 0.0, solved=True),
        ]
    )
    four, nine = result["group_level_metrics"]
    assert four["_ng_task_index"] == 4
    assert (four["num_rollouts"], four["expected_num_rollouts"], four["missing_num_rollouts"]) == (2, 2, 0)
    assert four["reward_profile_completion_pct"] == 100.0
    assert four["sample"] == {"agent_ref": {"name": "agent"}}
    assert [info["rollout_id"] for info in four["rollout_infos"]] == ["4:0", "4:1"]
    assert four["mean/solved"] == 0.5
    assert "mean/input_tokens" not in four
    assert nine["std/reward"] == 0.0
    assert nine["rollout_infos"] == [
        {
            "rollout_id": "9:0",
            "_ng_task_index": 9,
            "_ng_rollout_index": 0,
            "reward": 0.25,
            "solved": 1,
            "input_tokens": 30,
            "output_tokens": 4,
        }
    ]
    overall = result["agent_metrics"]
    assert overall["mean/reward"] == pytest.approx(1.25 / 3)
    assert overall["median/reward"] == 0.25
    assert overall["max/input_tokens"] == 30.0
    assert "std/input_tokens" not in overall  # one rollout of three has it
    assert not any("note" in key or "index" in key for key in overall)
    assert result["key_metrics"] == {k: v for k, v in overall.items() if k.startswith("mean/")}


def test_scores_of_two_tasks_by_hand() -> None:
    result = aggregate_metrics(
        [
            rollout(0, 0, 1.0, choice="B"),
            rollout(0, 1, 0.0, choice="C"),
            rollout(0, 2, 1.0, choice="B"),
            rollout(1, 0, 0.0, choice=None),
            rollout(1, 1, 0.0, choice="A"),
            rollout(1, 2, 0.0),
        ],
        QA,
    )
    metrics = result["agent_metrics"]
    expected = {
        "pass@1/accuracy": 100 * (2 / 3 + 0) / 2,
        "pass@2/accuracy": 50.0,
        "pass@1[avg-of-2]/accuracy": 25.0,
        "pass@1[avg-of-3]/accuracy": 100 / 3,
        "majority@1/accuracy": 50.0,
        "majority@2/accuracy": 25.0,
        "majority@3/accuracy": 50.0,
        "pass@1/no_answer": 100 / 3,
        "pass@2/no_answer": 50.0,
        "majority@3/no_answer": 0.0,
        "pass@1[avg-of-3]/accuracy/std_dev_across_runs": statistics.stdev([50.0, 0.0, 50.0]),
        "pass@1[avg-of-3]/accuracy/std_err_across_runs": statistics.stdev([50.0, 0.0, 50.0]) / 3**0.5,
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected)
    assert metrics["per_sample_aggregate"] == {"accuracy": [50.0, 0.0, 50.0], "no_answer": [50.0, 0.0, 50.0]}
    assert list(result["key_metrics"]) == [
        "mean/reward",
        "pass@1[avg-of-3]/accuracy",
        "pass@1[avg-of-3]/no_answer",
        "pass@3/no_answer",
    ]


def test_every_figure_has_the_number_of_tasks_behind_it() -> None:
    result = aggregate_metrics(
        [rollout(task, index, float(task == index), choice="A") for task in (0, 1) for index in range(2)]
        + [rollout(2, 0, 1.0, choice="A", bonus=3)],
        QA,
    )
    confidence = result["confidence"]
    assert confidence.keys() == result["agent_metrics"].keys() - {"per_sample_aggregate"}
    assert confidence["pass@1/accuracy"]["num_tasks"] == 3
    assert confidence["pass@2/accuracy"]["num_tasks"] == 2  # the third task has one rollout
    assert confidence["max/bonus"] == {"num_tasks": 1}
    low, value, high = (
        confidence["pass@1/accuracy"]["low"],
        result["agent_metrics"]["pass@1/accuracy"],
        confidence["pass@1/accuracy"]["high"],
    )
    assert low <= value <= high


def test_the_first_k_are_those_given_first() -> None:
    spec = MetricSpec(scores=(Score("quality"),))
    metrics = aggregate_metrics([rollout(0, 1, 0.3), rollout(0, 0, 0.9)], spec)["agent_metrics"]
    assert metrics["pass@1/quality"] == pytest.approx(30.0)
    assert metrics["pass@2/quality"] == pytest.approx(90.0)


def test_scores_with_a_threshold_and_a_condition() -> None:
    spec = MetricSpec(scores=(Score("passed", above=0.5), Score("judged", requires="verdict")))
    metrics = aggregate_metrics(
        [rollout(0, 0, 0.6), rollout(0, 1, 0.5, verdict="yes"), rollout(1, 0, 0.75, verdict=None)], spec
    )["agent_metrics"]
    assert metrics["pass@1/passed"] == 75.0
    assert metrics["pass@1/judged"] == 50.0
    assert "pass@2/judged" not in metrics


def test_a_score_that_only_later_rollouts_have() -> None:
    spec = MetricSpec(scores=(Score("judged", requires="verdict"),))
    rollouts = [rollout(0, i, float(i == 3), **({"verdict": "x"} if i > 1 else {})) for i in range(4)]
    result = aggregate_metrics(rollouts, spec)
    metrics = result["agent_metrics"]
    assert "pass@1[avg-of-2]/judged" not in metrics
    assert metrics["pass@1[avg-of-4]/judged"] == 50.0
    assert metrics["per_sample_aggregate"] == {"judged": [0.0, 100.0]}
    key = "pass@1[avg-of-2]/judged/std_dev_across_runs"  # over the first two runs that have the score
    assert metrics[key] == pytest.approx(statistics.stdev([0.0, 100.0]))
    assert result["confidence"][key] == {"num_tasks": 1}


def test_subsets_split_the_tasks() -> None:
    spec = MetricSpec(
        scores=(Score("accuracy"),),
        subset="level",
        sample_std_dev=True,
        key_metrics=("*/pass@1[avg-of-{k}]/accuracy",),
    )
    result = aggregate_metrics(
        [
            rollout(0, 0, 1.0, level="hard"),
            rollout(0, 1, 0.0, level="hard"),
            rollout(1, 0, 1.0, level="easy"),
            rollout(2, 0, 0.0, level=None),
        ],
        spec,
    )
    metrics = result["agent_metrics"]
    assert metrics["hard/pass@1/accuracy"] == 50.0
    assert metrics["easy/pass@1/accuracy"] == 100.0
    assert result["confidence"]["easy/pass@1/accuracy"] == {"num_tasks": 1}
    assert metrics["pass@1[avg-of-2]/accuracy/avg_sample_std_dev"] == pytest.approx(0.5**0.5)
    assert result["key_metrics"] == {
        "hard/pass@1[avg-of-2]/accuracy": 50.0,
        "easy/pass@1[avg-of-1]/accuracy": 100.0,
    }


def test_breakdowns_average_the_reward_by_a_field() -> None:
    spec = MetricSpec(breakdowns=(Breakdown("format", missing="unknown"), Breakdown("strict", "strict_")))
    result = aggregate_metrics(
        [
            rollout(0, 0, 1.0, format="yaml", strict=True),
            rollout(0, 1, 0.0, format="yaml"),
            rollout(1, 0, 0.5, strict=False),
        ],
        spec,
    )
    for key, value in {
        "mean/reward_yaml": 0.5,
        "mean/reward_unknown": 0.5,
        "mean/reward_strict_true": 1.0,
        "mean/reward_strict_false": 0.5,
    }.items():
        assert result["agent_metrics"][key] == value
        assert result["key_metrics"][key] == value
        assert result["confidence"][key]["num_tasks"] == 1


@pytest.mark.parametrize(
    "failed", [{"_ng_failure_class": "model_timeout", "mask_sample": True}, {"mask_sample": True}]
)
def test_failures_are_counted_and_never_scored(failed: dict[str, Any]) -> None:
    result = aggregate_metrics(
        [rollout(0, 0, 1.0, choice="A"), rollout(0, 1, 0.0, **failed), rollout(1, 0, 0.0, **failed)], QA
    )
    assert result["agent_metrics"]["mean/reward"] == 1.0
    assert result["agent_metrics"]["majority@1/accuracy"] == 100.0
    assert result["failures"] == {failed.get("_ng_failure_class", "masked"): 2}
    first, second = result["group_level_metrics"]
    assert (first["num_rollouts"], first["missing_num_rollouts"]) == (1, 1)
    assert first["reward_profile_completion_pct"] == 50.0
    assert (second["num_rollouts"], second["missing_num_rollouts"], second["rollout_infos"]) == (0, 1, [])


def test_answers_of_any_shape_vote() -> None:
    long = "x" * 500
    for same, other in [(long, long + "y"), ([1, {"b": 2, "a": 1}], [1]), (0.5, 0.25), ({"k": 2**70}, "z")]:
        twin = json.loads(json.dumps(same))
        rollouts = [
            rollout(0, 0, 1.0, choice=same),
            rollout(0, 1, 0.0, choice=other),
            rollout(0, 2, 1.0, choice=twin),
        ]
        assert aggregate_metrics(rollouts, QA)["agent_metrics"]["majority@3/accuracy"] == 100.0


def test_indices_default_to_the_order_given() -> None:
    result = aggregate_metrics([{"reward": 1.0}, {"reward": 0.0}])
    (group,) = result["group_level_metrics"]
    assert [info["rollout_id"] for info in group["rollout_infos"]] == ["0:0", "0:1"]


@pytest.mark.parametrize(
    "bad",
    [
        [rollout(0, 0, 1.0), rollout(0, 0, 0.0)],
        [{"_ng_task_index": "first"}],
        [{"_ng_task_index": True}],
        [{"_ng_rollout_index": 10**5000}],
        ["a text"],
    ],
)
def test_wrong_rollouts_are_refused(bad: list[Any]) -> None:
    with pytest.raises(InvalidRequest):
        aggregate_metrics(bad)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=5,
)
_fields = st.sampled_from(["reward", "choice", "level", "response", "_ng_failure_class", "mask_sample", "x"])


@settings(deadline=None)
@given(st.lists(st.dictionaries(_fields, _json | st.just(10**400), max_size=5), max_size=4))
def test_no_rollout_can_break_the_metrics(rollouts: list[dict[str, Any]]) -> None:
    spec = MetricSpec(
        scores=(Score("accuracy"), Score("judged", "x", requires="level")),
        answer="choice",
        subset="level",
        sample_std_dev=True,
        breakdowns=(Breakdown("level"),),
    )
    result = aggregate_metrics(rollouts, spec)
    json.dumps(result, allow_nan=False)
    assert sum(g["num_rollouts"] for g in result["group_level_metrics"]) + sum(
        result["failures"].values()
    ) == len(rollouts)


def test_pass_majority_metrics_of_groups() -> None:
    spec = MetricSpec(scores=(Score("accuracy"),), answer="a")
    assert pass_majority_metrics([], spec) == {}
    assert pass_majority_metrics([[]], spec) == {"per_sample_aggregate": {}}
    metrics = pass_majority_metrics([[{"reward": 1.0, "a": "x"}], []], spec)
    assert metrics["pass@1/accuracy"] == 100.0
    assert metrics["majority@1/accuracy"] == 50.0  # the empty task has no answer


def test_key_metrics_take_the_highest_k_and_no_spread() -> None:
    metrics = dict.fromkeys(
        [
            "mean/a",
            "mean/b/c",
            "pass@9/x",
            "pass@10/x",
            "pass@10/y",
            "pass@1[avg-of-2]/x",
            "pass@1[avg-of-2]/x/std_dev_across_runs",
            "b/pass@1/x",
            "b/pass@2/x",
            "a/pass@1/x",
        ],
        1.0,
    )
    assert list(select_key_metrics(metrics, ["mean/*"])) == ["mean/a", "mean/b/c"]
    assert list(select_key_metrics(metrics, ["pass@{k}/*"])) == ["pass@10/x", "pass@10/y"]
    assert list(select_key_metrics(metrics, ["pass@1[avg-of-{k}]/*"])) == ["pass@1[avg-of-2]/x"]
    assert list(select_key_metrics(metrics, ["*/pass@{k}/x"])) == ["b/pass@2/x", "a/pass@1/x"]
    assert select_key_metrics(metrics, ["absent", "pass@{k}/z"]) == {}

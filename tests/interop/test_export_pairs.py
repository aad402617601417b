import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.export_cases import episode, failed

from gym_serve.interop.export import export


def pairs_of(rollouts, path, **options):
    report = export(rollouts, "dpo", path, overwrite=True, **options)
    return [orjson.loads(line) for line in path.read_bytes().splitlines()], report


def counts(report):
    return {reason: dropped.count for reason, dropped in report.dropped.items()}


def test_the_best_against_the_worst_of_each_task(tmp_path):
    rewards = {0: [0.5, 1.0, 0.0, 1.0], 1: [1.0], 2: [0.0, 0.0], 3: [1.0, 0.5]}
    rollouts = [
        episode(f"answer {task}-{i}", task=task, index=i, reward=reward)
        for task, values in rewards.items()
        for i, reward in enumerate(values)
    ]
    found, report = pairs_of(sorted(rollouts, key=lambda r: r["_ng_rollout_index"]), tmp_path / "out.jsonl")
    assert [(pair["chosen_id"], pair["rejected_id"]) for pair in found] == [("0-1", "0-2"), ("3-0", "3-1")]
    assert found[0]["chosen"][-1]["content"] == "answer 0-1"
    assert found[0]["rejected"][-1]["content"] == "answer 0-2"
    assert (found[0]["chosen_reward"], found[0]["rejected_reward"], found[0]["task"]) == (1.0, 0.0, "0")
    assert [message["role"] for message in found[0]["prompt"]] == ["system", "user"]
    assert found[0]["tools"][0]["function"]["name"] == "weather"
    assert (report.read, report.exported, report.records) == (9, 4, 2)
    assert counts(report) == {"not_extreme": 3, "no_contrast": 2}


def test_a_margin(tmp_path):
    rollouts = [episode("a", reward=0.5), episode("b", index=1, reward=1.0)]
    found, report = pairs_of(rollouts, tmp_path / "out.jsonl", margin=0.5)
    assert found == []
    assert counts(report) == {"small_margin": 2}


def test_no_pair_of_other_prompts_or_of_one_text(tmp_path):
    other = episode("b", index=1, reward=0.0)
    other["responses_create_params"]["instructions"] = "Be long."
    assert counts(pairs_of([episode("a"), other], tmp_path / "out.jsonl")[1]) == {"other_prompt": 2}
    same = [episode("a"), episode("a", index=1, reward=0.0)]
    assert counts(pairs_of(same, tmp_path / "out.jsonl")[1]) == {"same_answer": 2}


def test_a_failure_is_never_the_worse_one(tmp_path):
    found, report = pairs_of([episode("a"), failed(index=1)], tmp_path / "out.jsonl")
    assert found == []
    assert counts(report) == {"failed: model_timeout": 1, "no_contrast": 1}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.25, 0.5, 1.0])), max_size=12))
def test_pairs_agree_with_sorting(tmp_path, scores):
    rollouts = [episode(f"{i}", task=task, index=i, reward=reward) for i, (task, reward) in enumerate(scores)]
    found, report = pairs_of(rollouts, tmp_path / "out.jsonl")
    expected = {}
    for task in {task for task, _ in scores}:
        indices = [i for i, (of, _) in enumerate(scores) if of == task]
        best, worst = max(indices, key=lambda i: scores[i][1]), min(indices, key=lambda i: scores[i][1])
        if scores[best][1] > scores[worst][1]:
            expected[str(task)] = (f"{task}-{best}", f"{task}-{worst}")
    assert {pair["task"]: (pair["chosen_id"], pair["rejected_id"]) for pair in found} == expected
    assert report.read == report.exported + sum(counts(report).values())


@pytest.mark.parametrize("arguments", ["string", "object"])
def test_forms_of_arguments(tmp_path, arguments):
    rollouts = [episode("a"), episode("b", index=1, reward=0.0)]
    ((pair,), _) = pairs_of(rollouts, tmp_path / "out.jsonl", arguments=arguments)
    made = pair["chosen"][0]["tool_calls"][0]["function"]["arguments"]
    assert made == ({"city": "Oslo"} if arguments == "object" else '{"city": "Oslo"}')

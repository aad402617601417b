import pickle

import pytest
from support.export_cases import episode, failed

from gym_serve.interop.export import NotExportable, Rollout


def test_the_facts_of_a_rollout():
    rollout = Rollout.read(episode(task=3, index=2, reward=True))
    assert (rollout.id, rollout.task, rollout.index) == ("3-2", "3", 2)
    assert (rollout.agent, rollout.model, rollout.created_at) == ("weather_agent", "policy", 1700000000.0)
    assert rollout.reward == 1.0
    assert not rollout.masked
    assert rollout.failure_class is None
    assert rollout.extras.keys().isdisjoint({"responses_create_params", "response"})
    rollout.require_trainable()


def test_without_metadata_a_task_is_its_prompt():
    raw = episode()
    for key in ("_ng_task_index", "_ng_rollout_id", "_ng_rollout_index"):
        del raw[key]
    first = Rollout.read(raw)
    other = Rollout.read({**raw, "responses_create_params": {"input": "another question"}})
    assert first.task == Rollout.read({**raw, "reward": 0.0}).task != other.task
    assert first.id == f"{first.task}-0"


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (failed(), "failed: model_timeout"),
        (episode(mask_sample=True), "masked"),
        (episode(instance_config={"mask_sample": True}), "masked"),
        (episode(failure={"kind": "session_lost"}), "failed: session_lost"),
    ],
)
def test_what_must_not_be_learned_from(raw, reason):
    with pytest.raises(NotExportable) as error:
        Rollout.read(raw).require_trainable()
    assert error.value.reason == reason


def test_a_failure_before_the_first_answer_has_no_output():
    raw = failed()
    del raw["response"]
    assert Rollout.read(raw).output == []


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ([], "no_rollout"),
        ({"response": {"output": []}}, "no_prompt"),
        ({"responses_create_params": {"input": "x"}}, "no_response"),
        (episode(response="x"), "no_response"),
        (episode(response={"output": "x"}), "no_response"),
        (episode(response={"output": ["x"]}), "no_response"),
        (episode(note={1}), "no_json"),
    ],
)
def test_what_is_no_rollout(raw, reason):
    with pytest.raises(NotExportable) as error:
        Rollout.read(raw)
    assert error.value.reason == reason


@pytest.mark.parametrize("reward", [None, "1", float("nan"), float("inf"), [1]])
def test_a_reward_is_a_finite_number(reward):
    with pytest.raises(NotExportable, match="must be a finite number"):
        Rollout.read(episode(reward=reward)).reward  # noqa: B018


def test_odd_values_are_as_good_as_missing():
    raw = episode(agent_ref="x", _ng_task_index="x", _ng_rollout_index=1 << 63, _ng_rollout_id=7)
    raw["response"] |= {"model": 5, "created_at": "now"}
    rollout = Rollout.read(raw)
    assert (rollout.agent, rollout.task_index, rollout.index) == ("agent", None, None)
    assert (rollout.model, rollout.created_at) == (None, 0.0)


def test_the_error_travels():
    error = pickle.loads(pickle.dumps(NotExportable("masked", "why")))
    assert (type(error), error.reason, error.message) == (NotExportable, "masked", "why")


@pytest.mark.parametrize(("note", "read"), [(1 << 80, 1 << 80), ("\ud800", "\ufffd"), ({1: 2}, {"1": 2})])
def test_what_orjson_cannot_write_is_read(note, read):
    assert Rollout.read(episode(note=note)).raw["note"] == read

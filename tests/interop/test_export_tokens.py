import pytest
from hypothesis import given
from support.export_cases import bundle, call, episode, episodes, returned, rollout, said

from gym_serve.interop.export import NotExportable, Rollout
from gym_serve.interop.export.chat_messages import trl_tokens
from gym_serve.interop.export.token_data import nemo_rl_record
from gym_serve.training.rollout import token_turns
from gym_serve.training.samples import sample_of


def turns(*output):
    return token_turns(Rollout.read(rollout(output)))


def test_a_turn_has_the_new_prompt_tokens():
    found = token_turns(Rollout.read(episode()))
    assert [(t.prompt, t.generation, t.logprobs) for t in found] == [
        ([1, 2, 3], [4, 5], [-0.25, -0.5]),
        ([6, 7], [8], [-1.0]),
    ]
    sample = sample_of(Rollout.read(episode()))
    assert (sample.prompt_ids, sample.response_ids) == ([1, 2, 3], [4, 5, 6, 7, 8])
    assert (sample.loss_mask, sample.logprobs) == ([1, 1, 0, 0, 1], [-0.25, -0.5, 0.0, 0.0, -1.0])


def test_a_call_that_produced_nothing_is_no_turn():
    empty = {**call(), **bundle([1, 2], [])}
    (turn,) = turns(empty, returned(), {**said("x"), **bundle([1, 2, 3], [4])})
    assert turn.prompt == [1, 2, 3]


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ([said("x")], "no_tokens"),
        ([{**said("x"), **bundle([1], [])}], "no_tokens"),
        ([{**call(), **bundle([1, 2], [3])}, {**said("x"), **bundle([1, 2, 9, 4], [5])}], "broken_prefix"),
        ([{**call(), **bundle([1, 2], [3])}, {**said("x"), **bundle([1, 2], [5])}], "broken_prefix"),
        ([{**said("x"), "prompt_token_ids": [1]}], "bad_tokens"),
        ([{**said("x"), **bundle([1], [2, 3], [-1.0])}], "bad_tokens"),
        ([{**said("x"), **bundle([1], [2], ["-1"])}], "bad_tokens"),
        ([{**said("x"), **bundle([1], [2], [float("nan")])}], "bad_tokens"),
        ([{**said("x"), **bundle([1], [2], [float("-inf")])}], "bad_tokens"),
        ([{**said("x"), **bundle([1.5], [2])}], "bad_tokens"),
        ([{**said("x"), **bundle([1], [-2])}], "bad_tokens"),
        ([{**said("x"), **bundle([1], [1 << 31])}], "bad_tokens"),
        ([{**said("x"), **bundle([True], [1])}], "bad_tokens"),
        ([{**said("x"), **bundle("12", [1])}], "bad_tokens"),
    ],
)
def test_tokens_that_would_be_trained_on_wrongly(output, reason):
    with pytest.raises(NotExportable) as error:
        turns(*output)
    assert error.value.reason == reason


@given(episodes(with_tokens=True))
def test_tokens_in_are_tokens_out(raw):
    rollout = Rollout.read(raw)
    bundles = [item for item in rollout.output if item.get("generation_token_ids")]
    if not bundles:
        return
    record, example = nemo_rl_record(rollout), trl_tokens(rollout)
    everything = bundles[-1]["prompt_token_ids"] + bundles[-1]["generation_token_ids"]
    generated = [token for item in bundles for token in item["generation_token_ids"]]
    logprobs = [value for item in bundles for value in item["generation_log_probs"]]
    log = record["message_log"]
    assert [token for message in log for token in message["token_ids"]] == everything == example["input_ids"]
    assert [token for message in log[1::2] for token in message["token_ids"]] == generated
    assert [value for message in log[1::2] for value in message["generation_logprobs"]] == logprobs
    learned = [i for i, bit in enumerate(example["assistant_masks"]) if bit]
    assert [example["input_ids"][i] for i in learned] == generated
    assert [example["logprobs"][i] for i in learned] == logprobs


def test_the_message_log_of_nemo_rl():
    raw = episode(_rowidx=7)
    record = nemo_rl_record(Rollout.read(raw))
    assert record["message_log"] == [
        {"role": "user", "content": "", "token_ids": [1, 2, 3]},
        {"role": "assistant", "content": "", "token_ids": [4, 5], "generation_logprobs": [-0.25, -0.5]},
        {"role": "user", "content": "", "token_ids": [6, 7]},
        {"role": "assistant", "content": "", "token_ids": [8], "generation_logprobs": [-1.0]},
    ]
    assert record["input_message_log"] == record["message_log"][:1]
    assert (record["length"], record["total_reward"], record["loss_multiplier"]) == (3, 1.0, 1.0)
    assert (record["mask_sample"], record["_rowidx"]) == (False, 7)
    assert record["agent_ref"] == raw["agent_ref"]
    output = record["full_result"]["response"]["output"]
    assert not any("prompt_token_ids" in item for item in output)
    assert [item["type"] for item in output] == [item["type"] for item in raw["response"]["output"]]
    assert raw["response"]["output"][2]["prompt_token_ids"] == [1, 2, 3]

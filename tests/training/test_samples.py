"""`samples`: every token that the model produced is trained on exactly once, or not at all."""

import math
import sys
from itertools import chain
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.export_cases import (
    RETRY,
    SUBAGENT,
    bundle,
    captured,
    episode,
    episodes,
    failed,
    returned,
    rollout,
    said,
)

from gym_serve import InvalidRequest
from gym_serve.training import TrainingSample, advantages, collate, samples


def test_an_episode_is_one_sample_with_the_tools_tokens_masked() -> None:
    [sample] = samples(episode(reward=0.5))
    assert sample.prompt_ids == [1, 2, 3]
    assert sample.response_ids == [4, 5, 6, 7, 8]
    assert sample.loss_mask == [1, 1, 0, 0, 1]
    assert sample.logprobs == [-0.25, -0.5, 0.0, 0.0, -1.0]
    assert (sample.reward, sample.group, sample.task, sample.rollout_id) == (0.5, "0", "0", "0-0")
    assert samples(episode(), group="step 7")[0].group == "step 7"
    assert (sample.truncated, sample.failure, sample.media) == (False, None, [])


def test_each_token_tells_the_version_of_the_policy_that_produced_it() -> None:
    output = [
        {**said("a"), **bundle([1], [2]), "weight_version": "3"},
        {**said("b"), **bundle([1, 2, 9], [4, 5]), "weight_version": "4"},
    ]
    [sample] = samples(rollout(output))
    assert sample.versions == ["3", None, "4", "4"]


def test_a_history_that_was_tokenized_again_begins_another_sample() -> None:
    output = [{**said("a"), **bundle([1], [2])}, {**said("b"), **bundle([1, 7], [8])}]
    first, second = samples(rollout(output))
    assert (first.prompt_ids, first.response_ids, first.part) == ([1], [2], 0)
    assert (second.prompt_ids, second.response_ids, second.part) == ([1, 7], [8], 1)


def test_branches_are_samples_of_the_same_rollout() -> None:
    found = samples(captured(SUBAGENT, RETRY))
    assert [(s.branch, s.response_ids) for s in found] == [(0, [4, 5, 6, 7, 8]), (1, [42]), (2, [50, 51])]
    assert {s.rollout_id for s in found} == {"0-0"}


def test_a_failed_rollout_keeps_its_tokens_and_trains_nothing() -> None:
    [sample] = samples(failed())
    assert sample.failure == "model_timeout"
    assert sample.response_ids == [4, 5, 6, 7, 8]
    assert sample.loss_mask == [0] * 5
    assert sample.reward == 0.0


def test_a_failure_before_the_first_token_still_gives_a_sample() -> None:
    row = {**failed(), "response": None}
    [sample] = samples(row, pad_token_id=7)
    assert (sample.prompt_ids, sample.response_ids, sample.loss_mask) == ([7], [7], [0])
    assert sample.failure == "model_timeout"


def test_a_rollout_without_tokens_is_masked_and_told(caplog: pytest.LogCaptureFixture) -> None:
    [sample] = samples(rollout([said("no tokens")]))
    assert sample.failure == "no_tokens"
    assert sample.loss_mask == [0]
    assert "return_token_ids" in caplog.text


def test_an_answer_that_was_cut_off_is_truncated() -> None:
    row = rollout([{**said("a"), **bundle([1], [2])}])
    row["response"] |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    assert samples(row)[0].truncated


def test_media_are_given_in_their_order() -> None:
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    sound = {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}
    row = rollout([returned(output=[sound]), {**said("a"), **bundle([1], [2])}, returned(output=[picture])])
    row["responses_create_params"]["input"] = [{"role": "user", "content": [picture]}]
    assert samples(row)[0].media == [picture, sound]
    of_chat = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    row["responses_create_params"]["input"] = [{"role": "user", "content": [of_chat]}]
    assert samples(row)[0].media == [of_chat, sound]


def test_malformed_tokens_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="no id"):
        samples(rollout([{**said("a"), **bundle([1], [-2])}]))


@given(episodes(with_tokens=True), st.booleans())
def test_every_sampled_token_is_in_one_sample_once(row: dict, fails: bool) -> None:
    if fails:
        row = {**row, "mask_sample": True}
    found = samples(row)
    calls = [item for item in row["response"]["output"] if item.get("generation_token_ids")]
    produced = list(chain.from_iterable(item["generation_token_ids"] for item in calls))
    assert found
    for sample in found:
        lengths = (sample.response_ids, sample.loss_mask, sample.logprobs, sample.versions)
        assert {len(values) for values in lengths} == {max(1, len(sample.response_ids))}
    trained = [
        token
        for sample in found
        for token, mask in zip(sample.response_ids, sample.loss_mask, strict=True)
        if mask
    ]
    assert trained == ([] if fails else produced)
    if calls:  # these episodes never break off, so that the whole of the last call is one sequence
        assert found[0].input_ids == calls[-1]["prompt_token_ids"] + calls[-1]["generation_token_ids"]


def sample(reward: float, group: str = "g", rollout_id: str = "0", **fields: object) -> TrainingSample:
    return TrainingSample(
        [1], [2, 3], [1, 1], [-1.0, -2.0], [None] * 2, reward, group, group, rollout_id, **fields
    )


def test_a_baseline_counts_rollouts_not_branches_and_no_failure() -> None:
    batch = [
        sample(1.0, rollout_id="a"),
        sample(1.0, rollout_id="a", branch=1),
        sample(0.0, rollout_id="b"),
        sample(0.0, rollout_id="c", failure="timeout"),
        sample(1.0, "other", "d"),
    ]
    assert advantages(batch, scale=False) == [0.5, 0.5, -0.5, 0.0, 0.0]
    scaled = advantages(batch)
    assert scaled[0] == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-4))


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_arrays_are_padded_on_both_sides(library: Literal["numpy", "torch"]) -> None:
    pytest.importorskip(library)
    long = TrainingSample([5, 6], [7], [1], [-0.5], [None], 0.0, "g", "g", "1")
    arrays = collate([sample(1.0), long], pad_token_id=9, library=library)
    assert {str(array.dtype).removeprefix("torch.") for array in arrays.values()} == {"int64", "float32"}
    assert arrays["input_ids"].tolist() == [[9, 1, 2, 3], [5, 6, 7, 9]]
    assert arrays["attention_mask"].tolist() == [[0, 1, 1, 1], [1, 1, 1, 0]]
    assert arrays["loss_mask"].tolist() == [[1, 1], [1, 0]]
    assert arrays["logprobs"].shape == (2, 2)
    assert arrays["advantages"].tolist() == pytest.approx([0.7070, -0.7070], abs=1e-3)


@pytest.mark.parametrize(("library", "needed"), [("numpy", "gym-serve.train"), ("torch", "install torch")])
def test_a_missing_library_is_named(
    library: Literal["numpy", "torch"], needed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError, match=needed):
        collate([sample(1.0)], library=library)


def test_what_is_too_long_loses_the_end_of_its_response() -> None:
    arrays = collate([sample(1.0)], max_length=2, library="numpy")
    assert arrays["input_ids"].tolist() == [[1, 2]]
    with pytest.raises(InvalidRequest, match="max_length"):
        collate([sample(1.0)], max_length=1, library="numpy")
    with pytest.raises(InvalidRequest, match="at least one"):
        collate([])

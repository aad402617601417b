"""`hf_engine` on its tiny model."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.batched_engines import BatchedEngineTests, LogProbs, greedy
from support.engines import MARKS, log_probs_by_transformers

from gym_serve.deployments.hf_engine import HFEngine
from gym_serve.servers.runner import ServerRunner
from gym_serve.servers.transport import Call
from gym_serve.types.errors import BadRequest

pytestmark = MARKS


class TestHFEngine(BatchedEngineTests):
    """Those that every engine has to pass."""

    @pytest.fixture
    def engine(self, hf: HFEngine) -> HFEngine:
        return hf

    @pytest.fixture
    def log_probs(self, tiny: Path) -> LogProbs:
        return partial(log_probs_by_transformers, tiny)


async def test_the_same_prompt_is_read_once_in_a_batch(hf: HFEngine, tiny: Path) -> None:
    assert hf._steps is not None
    model, sizes = hf._steps.model, []

    def counted(module: Any, args: Any, given: dict[str, Any]) -> None:
        sizes.append(tuple(given["input_ids"].shape))

    bodies = [{"input": text, "max_output_tokens": 6, "temperature": 1.0} for text in "aabbbc"]
    await hf.pause("keep")  # so that all of them are in one batch
    calls = [asyncio.create_task(hf.responses(body)) for body in bodies]
    await asyncio.sleep(0.3)
    watched = model.register_forward_pre_hook(counted, with_kwargs=True)
    try:
        await hf.resume()
        responses = await asyncio.gather(*calls)
    finally:
        watched.remove()
    assert sizes[0][0] == 3
    assert sizes[1] == (6, 1)
    for response in responses:
        last = response["output"][-1]
        prompt, made = last["prompt_token_ids"], last["generation_token_ids"]
        expected = log_probs_by_transformers(tiny, prompt, made, 1.0)
        assert last["generation_log_probs"] == pytest.approx(expected, abs=1e-3)
    assert len({tuple(r["output"][-1]["generation_token_ids"]) for r in responses}) > 3  # each is drawn


async def test_weights_change_what_it_says_and_the_version_tells(
    hf: HFEngine, tiny: Path, other: Path
) -> None:
    before = await greedy(hf)
    await hf.update_weights(other, "7")
    after = await greedy(hf)
    assert after["weight_version"] == "7"
    assert after["generation_token_ids"] != before["generation_token_ids"]
    expected = log_probs_by_transformers(other, after["prompt_token_ids"], after["generation_token_ids"], 1.0)
    assert after["generation_log_probs"] == pytest.approx(expected, abs=1e-3)
    await hf.update_weights((tiny / "model.safetensors").read_bytes(), "8")
    again = await greedy(hf)
    assert again["generation_token_ids"] == before["generation_token_ids"]


async def test_weights_of_another_model_change_nothing(hf: HFEngine, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    before, version = await greedy(hf), hf.weight_version
    save_file({"lm_head.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(BadRequest, match=r"lm_head\.weight"):
        await hf.update_weights(tmp_path, "9")
    with pytest.raises(BadRequest, match="read"):
        await hf.update_weights(b"no safetensors", "9")
    after = await greedy(hf)
    assert after["generation_token_ids"] == before["generation_token_ids"]
    assert after["weight_version"] == version


async def test_a_pause_of_an_unknown_kind_is_refused(hf: HFEngine) -> None:
    assert (await ServerRunner(hf).dispatch(Call("weights/pause", b'{"mode": "now"}'))).status == 422

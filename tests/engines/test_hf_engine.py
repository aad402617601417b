"""`hf_engine` on its tiny model."""

from __future__ import annotations

from functools import partial
from pathlib import Path

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

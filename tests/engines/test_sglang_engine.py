"""`sglang_model` with a real tokenizer, template and model; SGLang's protocol is `support.sglang`'s."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engines import log_probs_by_transformers
from support.sglang import SglangServer

from gym_serve import Gym
from gym_serve.training import samples

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default"), pytest.mark.timeout(500)]

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TEMPERATURE = 0.9
ROW = {"responses_create_params": {"input": [{"role": "user", "content": "What is the weather in Paris?"}]}}


class Drawing:
    """Draws from a model of ``transformers``: some tokens and a call of the tool, then an answer."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        added = self.tokenizer.added_tokens_decoder
        self.plain = [token not in added for token in range(self.model.config.vocab_size)]

    def __call__(
        self, prompt: Sequence[int], random: np.random.Generator, temperature: float
    ) -> Iterator[tuple[int, float]]:
        import torch

        answered = "<tool_response>" in self.tokenizer.decode(prompt)
        call = [] if answered else self.tokenizer(CALL, add_special_tokens=False)["input_ids"]
        script: list[int | None] = [*[None] * 12, *call, self.tokenizer.eos_token_id]
        step, past = torch.tensor([list(prompt)]), None
        for said in chain(script, repeat(None)):
            with torch.inference_mode():
                out = self.model(step, past_key_values=past, use_cache=True)
            past = out.past_key_values
            found = (out.logits[0, -1].double() / temperature).log_softmax(-1).numpy()
            drawn = (
                np.exp(found) * self.plain
            )  # what would begin or end something comes from the script alone
            token = int(random.choice(len(found), p=drawn / drawn.sum())) if said is None else said
            yield token, float(found[token])
            step = torch.tensor([[token]])


def test_the_drift_between_what_is_trained_on_and_the_model_is_rounding(tiny: Path) -> None:
    drawing = Drawing(tiny)
    graph: dict[str, Any] = {
        "models": {
            "policy": {
                "type": "sglang_model",
                "tokenizer": str(tiny),
                "sampling_overrides": {"temperature": TEMPERATURE},
            }
        },
        "resources": {"weather": {"type": "simple_weather"}},
        "agents": {"agent": {"type": "simple_agent", "model": "policy", "resources": "weather"}},
    }
    with SglangServer(drawing, drawing.tokenizer.eos_token_id) as server:
        graph["models"]["policy"]["base_url"] = server.url
        with Gym.from_graph(graph, ray=False) as gym:
            rollouts = gym.run([ROW], repeats=16)
    again, drift = 0, 0.0
    for rollout in rollouts:
        assert rollout.failure is None
        assert len(rollout.tokens) == 2
        (sample,) = samples(rollout)
        expected = log_probs_by_transformers(tiny, sample.prompt_ids, sample.response_ids, TEMPERATURE)
        trained = [at for at, mask in enumerate(sample.loss_mask) if mask]
        drift = max(drift, *(abs(sample.logprobs[at] - expected[at]) for at in trained))
        made = rollout.tokens[0]["generation_token_ids"]
        text = drawing.tokenizer.decode(made)
        again += drawing.tokenizer(text, add_special_tokens=False)["input_ids"] != made
    print(
        f"largest difference {drift:.1e}; encoding again would have changed {again} of {len(rollouts)} turns"
    )
    assert drift < 1e-4
    assert again > len(rollouts) // 2

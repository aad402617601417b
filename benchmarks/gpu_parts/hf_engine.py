"""`hf_engine` with SmolLM2, beside `generate` of transformers."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu_parts import engines
from gym_serve import Gym


def figures(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Speed, log-probabilities, new weights."""
    device, on_gpu = arguments.device, arguments.device == "cuda"
    count, tokens = (64, 64) if on_gpu else (8, 16)
    folder = engines.smollm2(arguments)
    policy = engines.engine("hf_engine", folder, device, 0.5, weight_updates=True)
    policy["extra_body"] = {"ignore_eos": True}  # all answers have the same length, as those of `generate`
    model = engines.trainers_model(folder, device)
    with Gym.from_graph(engines.one_answer(policy), name="gpu") as gym:
        engines.collected(gym, count, tokens)  # to warm up
        runs = [engines.collected(gym, count, tokens) for _ in range(3)]
        rate = median(rate for _, rate in runs)
        yield {f"tokens/s, {count} in flight": rate}
        yield engines.named("log-probabilities", engines.drift(model, runs[-1][0]))
        bare = generated(folder, model, count, tokens)
        yield {"generate of transformers on the same batch, tokens/s": bare, "of these, share": rate / bare}
        yield engines.new_weights(gym, model, tokens)


def generated(folder: Path, model: Any, count: int, tokens: int) -> float:
    """Tokens per second of `generate` on one batch; the second of two runs."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    chats = [[{"role": "user", "content": row["prompt"]}] for row in engines.rows(count)]
    texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    batch = tokenizer(texts, padding=True, return_tensors="pt").to(model.device)
    for _ in range(2):
        begun = time.monotonic()
        made = model.generate(**batch, do_sample=True, top_k=0, min_new_tokens=tokens, max_new_tokens=tokens)
        seconds = time.monotonic() - begun
    return (made.shape[1] - batch["input_ids"].shape[1]) * count / seconds

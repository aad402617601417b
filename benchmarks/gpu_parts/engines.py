"""Engines with SmolLM2 in a graph, and what is measured of every engine."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.harness.work import ROOT
from gym_serve import Gym
from gym_serve.training import TrainingSample, samples
from gym_serve.training.weights import encoded

IN_FLIGHT = 256
PROMPT = "Name a colour and say why you like it."
GIB = 1 << 30


def smollm2(arguments: argparse.Namespace) -> Path:
    """Folder of the model, made at first use."""
    sys.path.insert(0, str(ROOT / "examples"))
    from smollm2 import make_smollm2

    return make_smollm2(arguments.folder / "smollm2")


def vllm_args(device: str, cache_gib: float = 4) -> dict[str, Any]:
    """Arguments of an engine that has the GPU not for itself: graphs of CUDA, but nothing compiled."""
    args = {"max_model_len": 2048, "max_num_seqs": IN_FLIGHT, "kv_cache_memory_bytes": int(cache_gib * GIB)}
    if device == "cpu":
        return args | {"dtype": "float32", "enforce_eager": True}
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    return args | {"dtype": "bfloat16", "gpu_memory_utilization": 0.2, "compilation_config": graphs}


def engine(kind: str, model: Path, device: str, share: float, **settings: Any) -> dict[str, Any]:
    """A model server.

    Args:
        kind: ``vllm_engine`` or ``hf_engine``.
        model: its folder.
        device: ``cuda`` or ``cpu``.
        share: part of the GPU.
        **settings: further settings of the server.
    """
    server: dict[str, Any] = {"type": kind, "model": str(model), "max_ongoing_requests": 2 * IN_FLIGHT}
    if device == "cuda":
        server["num_gpus"] = share
    if kind == "vllm_engine":
        server["engine_args"] = vllm_args(device)
    else:
        server |= {"device": device, "max_batch": IN_FLIGHT}
        server["dtype"] = "bfloat16" if device == "cuda" else "float32"
    return {**server, **settings}


def one_answer(policy: Mapping[str, Any]) -> dict[str, Any]:
    """A graph whose agent asks the policy once; each answer gets the reward 0."""
    agent = {"type": "single_turn_agent", "model": "policy", "resources": "none", "inline": ["none"]}
    return {
        "models": {"policy": dict(policy)},
        "resources": {"none": {"type": "string_match"}},
        "agents": {"agent": {**agent, "max_ongoing_requests": 2 * IN_FLIGHT}},
    }


def rows(count: int) -> list[dict[str, Any]]:
    """Rows with different prompts."""
    return [{"prompt": f"{PROMPT} This is question {n}.", "expected_answer": "blue"} for n in range(count)]


def collected(gym: Gym, count: int, tokens: int) -> tuple[list[TrainingSample], float]:
    """Samples of `count` rollouts at once, and their generated tokens per second.

    Raises:
        RuntimeError: a rollout failed.
    """
    begun = time.monotonic()
    params = {"temperature": 1.0, "max_output_tokens": tokens}
    rollouts = gym.run(rows(count), concurrency=count, params=params)
    seconds = time.monotonic() - begun
    failed = [rollout.failure for rollout in rollouts if rollout.failure is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} rollouts failed; the first: {failed[0]}")
    cut = [sample for rollout in rollouts for sample in samples(rollout)]
    return cut, sum(sum(sample.loss_mask) for sample in cut) / seconds


def trainers_model(model: Path, device: str) -> Any:
    """The same model as a trainer holds it."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device).eval()


def drift(model: Any, found: Iterable[TrainingSample], most: int = 64) -> dict[str, float]:
    """How far log-probabilities are from a forward pass of `model`, over generated tokens, in nats."""
    import torch

    away: list[float] = []
    for sample in islice(found, most):
        start = len(sample.prompt_ids)
        ids = torch.tensor([sample.input_ids], device=model.device)
        with torch.inference_mode():
            scores = model(ids).logits[0, start - 1 : -1].float().log_softmax(-1)
        own = scores.gather(1, ids[0, start:, None])[:, 0].tolist()
        pairs = zip(own, sample.logprobs, sample.loss_mask, strict=True)
        away += [abs(mine - its) for mine, its, trained in pairs if trained]
    return {"mean": fmean(away), "largest": max(away)}


def named(what: str, drift: dict[str, float]) -> dict[str, float]:
    """Figures of a drift, for the table."""
    return {f"{what}, {which} difference": value for which, value in drift.items()}


def new_weights(gym: Gym, model: Any, tokens: int) -> dict[str, float]:
    """Change `model`, give the engine its weights, and compare them again."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.02)
    before, _ = collected(gym, 64, tokens)
    stale = drift(model, before)
    packed, updated = [], []
    for number in range(3):
        begun = time.monotonic()
        data = encoded(model.state_dict().items())
        packed.append(time.monotonic() - begun)
        gym.policy.update_weights("policy", str(number + 1), tensors=data)
        updated.append(time.monotonic() - begun)
    after, _ = collected(gym, 64, tokens)
    fresh = drift(model, after)
    return {
        "new weights, MB": len(data) / 1e6,
        "new weights, s (median of 3)": median(updated),
        "of these packing, s": median(packed),
        "log-probabilities before the new weights, mean difference": stale["mean"],
        **named("after them", fresh),
    }

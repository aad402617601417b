"""A policy and a judge on one GPU, each with its share."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from importlib.util import find_spec
from statistics import fmean
from typing import Any

from benchmarks.gpu_parts import engines
from gym_serve import Gym
from gym_serve.training import samples


def figures(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Speed of rollouts, each an answer and a verdict that the judge is held to."""
    device, on_gpu = arguments.device, arguments.device == "cuda"
    count, tokens = (engines.IN_FLIGHT, 128) if on_gpu else (4, 8)
    kind = "vllm_engine" if find_spec("vllm") else "hf_engine"
    folder = engines.smollm2(arguments)
    verdict = {"structured_outputs": {"choice": ["[[A=B]]", "[[A!=B]]"]}, "max_tokens": 16}
    judge = engines.engine(kind, folder, device, 0.25, extra_body=verdict, return_token_ids=False)
    graph = {
        "models": {"policy": engines.engine(kind, folder, device, 0.5), "judge": judge},
        "resources": {
            "judged": {
                "type": "equivalence_llm_judge",
                "judge": "judge",
                "max_ongoing_requests": 2 * engines.IN_FLIGHT,
                "check_twice_swap": False,
            }
        },
        "agents": {
            "agent": {
                "type": "single_turn_agent",
                "model": "policy",
                "resources": "judged",
                "max_ongoing_requests": 2 * engines.IN_FLIGHT,
            }
        },
    }
    params = {"temperature": 1.0, "max_output_tokens": tokens}
    with Gym.from_graph(graph, name="gpu") as gym:
        for _ in range(2):  # the first run warms up
            begun = time.monotonic()
            rollouts = gym.run(engines.rows(count), repeats=2, concurrency=count, params=params)
            seconds = time.monotonic() - begun
    made = sum(sum(sample.loss_mask) for rollout in rollouts for sample in samples(rollout))
    failed = [rollout.failure for rollout in rollouts if rollout.failure is not None]
    yield {
        "engine of both": kind,
        "shares of the GPU, policy and judge": "0.5 and 0.25",
        "rollouts/s": len(rollouts) / seconds,
        "policy's tokens/s": made / seconds,
        "failed rollouts": len(failed),
        "mean reward (a small judge's verdicts)": fmean(rollout.reward or 0.0 for rollout in rollouts),
    }

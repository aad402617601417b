"""`vllm_engine` with SmolLM2, beside vLLM's own server with the same arguments."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks import vllm_overhead
from benchmarks.gpu_parts import engines
from gym_serve import Gym

_ROUTE = "v1/chat/completions"


def figures(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Speed, log-probabilities, new weights, sleep."""
    device, on_gpu = arguments.device, arguments.device == "cuda"
    count, tokens = (engines.IN_FLIGHT, 128) if on_gpu else (8, 16)
    folder = engines.smollm2(arguments)
    model = engines.trainers_model(folder, device)
    args = engines.vllm_args(device) | ({"enable_sleep_mode": True} if on_gpu else {})
    policy = engines.engine("vllm_engine", folder, device, 0.5, weight_updates=True, engine_args=args)
    begun = time.monotonic()
    with Gym.from_graph(engines.one_answer(policy), name="gpu") as gym:
        yield {"graph ready, s": time.monotonic() - begun}
        engines.collected(gym, count, tokens)  # to warm up
        runs = [engines.collected(gym, count, tokens) for _ in range(3)]
        yield {f"rollouts' tokens/s, {count} in flight": median(rate for _, rate in runs)}
        yield engines.named("log-probabilities", engines.drift(model, runs[-1][0]))
        yield beside_vllm(gym, folder, device, args)
        if on_gpu:  # elsewhere nothing sleeps, and tied embeddings take no new weights
            yield sleep(gym)
            yield engines.new_weights(gym, model, tokens)  # last: the model is another then


def sleep(gym: Gym) -> dict[str, float]:
    """How much memory a sleeping engine gives free, how long that takes, and whether it wakes the same."""
    import torch

    def asked(op: str) -> tuple[float, float]:
        begun = time.monotonic()
        gym.call("policy", op, {})
        return time.monotonic() - begun, torch.cuda.mem_get_info()[0] / engines.GIB

    question = {"messages": [{"role": "user", "content": engines.PROMPT}], "temperature": 0, "max_tokens": 64}
    said = gym.call("policy", _ROUTE, question)["choices"][0]["message"]["content"]
    awake = torch.cuda.mem_get_info()[0] / engines.GIB
    slept, asleep = asked("weights/sleep")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(gym.call, "policy", _ROUTE, question)  # it is answered after the wake
        time.sleep(1)
        early = waiting.done()
        woke, again = asked("weights/wake")
        after = waiting.result()["choices"][0]["message"]["content"]
    return {
        "memory that sleep gives free, GiB": asleep - awake,
        "of these taken back by the wake, GiB": asleep - again,
        "sleep, s": slept,
        "wake, s": woke,
        "a call during the sleep waits": float(not early),
        "and has the same greedy answer": float(after == said),
    }


def beside_vllm(gym: Gym, folder: Path, device: str, args: dict[str, Any]) -> dict[str, float]:
    """The rate of chat completions by handle, and of vLLM's own server."""
    on_gpu = device == "cuda"
    load = {"concurrency": 128, "requests": 512, "tokens": 128, "rounds": 3}
    work = argparse.Namespace(
        **load if on_gpu else {"concurrency": 4, "requests": 8, "tokens": 8, "rounds": 1}
    )
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=work.concurrency)
    env = {} if on_gpu else vllm_overhead.ENV
    plain = {"return_token_ids": False}
    with (
        vllm_overhead.own_server(folder, args, env) as url,
        httpx.Client(limits=limits, timeout=60) as client,
    ):
        ways = {
            vllm_overhead.OWN: vllm_overhead.by_http(client, url),
            vllm_overhead.HANDLE: lambda body: gym.call("policy", _ROUTE, body | plain),
        }
        rounds = vllm_overhead.measured(ways, work)
    own, ours = ([one[way] for one in rounds] for way in ways)
    return {
        f"vLLM's own server, tokens/s at {work.concurrency}": median(own),
        "vllm_engine by handle, tokens/s": median(ours),
        "of these, share (median of the rounds)": median(b / a for a, b in zip(own, ours, strict=True)),
    }

"""What `vllm_engine` takes of vLLM's throughput: tokens per second against its own server, on a tiny model.

    OMP_NUM_THREADS=1 .venv-vllm/bin/python -m benchmarks.vllm_overhead [--concurrency 32] [--rounds 5]

The same chat requests go to vLLM's own server, to a `vllm_engine` by handle and to that one by HTTP, in
turns, from the same number of threads. Both engines have the same model and arguments. The smaller the
model, the larger the share of what is not the engine: what a real model loses is a fraction of this.
With ``RAY_SERVE_ENABLE_HA_PROXY=1`` in the environment, HTTP goes by Serve's HAProxy instead of its proxy
in Python.
Writes benchmarks/results/vllm_overhead.json; prints a table of medians, and of the ratios within each round.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.harness.reports import machine, save, table
from benchmarks.harness.work import ROOT
from gym_serve import Gym
from gym_serve.cluster.starting import free_port
from gym_serve.deployments.hf_engine.tiny_model import tiny_model
from gym_serve.deployments.vllm_engine._vllm import command_line

Ask = Callable[[dict[str, Any]], dict[str, Any]]

ENGINE_ARGS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": 1 << 26,
}
# As `vllm_engine` sets it on a CPU.
ENV = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
OWN, HANDLE, HTTP = "vLLM's own server", "vllm_engine by handle", "vllm_engine by HTTP"
_PATIENCE_SECONDS = 240.0
_ROUTE = "v1/chat/completions"
_HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"


@contextmanager
def own_server(model: Path, engine_args: Mapping[str, Any], env: Mapping[str, str]) -> Iterator[str]:
    """vLLM's server in a process of its own; its URL.

    Args:
        model: folder of the model.
        engine_args: vLLM's arguments, as `vllm_engine` takes them.
        env: variables of its environment, besides those of this process.

    Raises:
        RuntimeError: it ended, or does not answer in time.
    """
    port = free_port()
    words = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"]
    words += ["--model", str(model), "--served-model-name", "policy", "--host", "127.0.0.1"]
    words += ["--port", str(port), "--disable-log-stats", "--disable-uvicorn-access-log"]
    words += command_line(engine_args)
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(words, env={**os.environ, **env}, stdout=subprocess.DEVNULL) as process:
        try:
            _wait_for(url, process)
            yield url
        finally:
            process.terminate()


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < give_up and process.poll() is None:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass  # it does not listen yet
        time.sleep(0.5)
    raise RuntimeError(f"vLLM's own server does not answer at {url}; exit status {process.poll()}")


def by_http(client: httpx.Client, base: str) -> Ask:
    """Requests to the route below ``base``."""

    def ask(body: dict[str, Any]) -> dict[str, Any]:
        answer = client.post(f"{base}/{_ROUTE}", json=body)
        answer.raise_for_status()
        completion: dict[str, Any] = answer.json()
        return completion

    return ask


def lengths_of(requests: int, tokens: int) -> list[int]:
    """Lengths of the answers, around ``tokens``.

    They differ, as those of a policy do: answers of one length end together, and then the engine waits
    until all of the next requests have come, one by one.
    """
    random_ = random.Random(0)
    return [random_.randint(tokens // 2, tokens + tokens // 2) for _ in range(requests)]


def tokens_per_second(ask: Ask, arguments: argparse.Namespace) -> float:
    """The rate over one round of ``arguments.requests``, ``concurrency`` at a time, of ``tokens`` each.

    Raises:
        RuntimeError: an answer is shorter than it must be.
    """

    lengths = lengths_of(arguments.requests, arguments.tokens)

    def one(number: int) -> int:
        messages = [{"role": "user", "content": f"Tell me more about number {number}."}]
        limits = {"max_tokens": lengths[number], "ignore_eos": True}
        completion = ask({"model": "policy", "messages": messages, **limits})
        return int(completion["usage"]["completion_tokens"])

    with ThreadPoolExecutor(arguments.concurrency) as pool:
        started = time.perf_counter()
        made = sum(pool.map(one, range(arguments.requests)))
        seconds = time.perf_counter() - started
    if made != sum(lengths):
        raise RuntimeError(f"{made} tokens instead of {sum(lengths)}")
    return made / seconds


def measured(ways: dict[str, Ask], arguments: argparse.Namespace) -> list[dict[str, float]]:
    """The rates of every round; each begins with another way."""
    for ask in ways.values():
        tokens_per_second(ask, arguments)  # to warm up
    rounds = []
    for number in range(arguments.rounds):
        names = [*ways][number % len(ways) :] + [*ways][: number % len(ways)]
        rates = {name: tokens_per_second(ways[name], arguments) for name in names}
        rounds.append({name: rates[name] for name in ways})
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=32, help="requests at a time")
    parser.add_argument("--requests", type=int, default=128, help="of each way in each round")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, in the mean")
    parser.add_argument("--rounds", type=int, default=5, help="how many")
    parser.add_argument("--model", type=Path, help="folder of a model; by default a tiny one is made")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "vllm_overhead.json")
    arguments = parser.parse_args()
    arguments.model = arguments.model or tiny_model()
    policy = {
        "type": "vllm_engine",
        "model": str(arguments.model),
        "return_token_ids": False,
        "engine_args": ENGINE_ARGS,
        "max_ongoing_requests": 1000,
    }
    graph = {"models": {"policy": policy}, "gateway": {"max_ongoing_requests": 1000}}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=arguments.concurrency)
    with (
        own_server(arguments.model, ENGINE_ARGS, ENV) as url,
        Gym.from_graph(graph, name="overhead") as gym,
        httpx.Client(limits=limits, timeout=_PATIENCE_SECONDS) as client,
    ):
        ways = {
            OWN: by_http(client, url),
            HANDLE: lambda body: gym.call("policy", _ROUTE, body),
            HTTP: by_http(client, f"{gym.url}/policy"),
        }
        rounds = measured(ways, arguments)
    ratios = {name: [one[name] / one[OWN] for one in rounds] for name in ways}
    lines = [
        (
            name,
            statistics.median(one[name] for one in rounds),
            statistics.median(ratio),
            min(ratio),
            max(ratio),
        )
        for name, ratio in ratios.items()
    ]
    settings = {key: str(value) for key, value in vars(arguments).items() if key != "output"}
    settings["haproxy"] = os.environ.get(_HAPROXY, "0")
    save(arguments.output, {"machine": machine(), "settings": settings, "rounds": rounds})
    print(table(("", "tokens/s", "of vLLM's own server", "least", "most"), lines))


if __name__ == "__main__":
    main()

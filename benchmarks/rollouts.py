"""Rollouts per second, latency, CPU and memory of one-tool episodes, over every kind of transport.

    python -m benchmarks.rollouts [--transports replica,inline,http] [--concurrency 1,64,256,1024]
    python -m benchmarks.rollouts --tokens 4000   # long answers, with ids and log-probabilities

All set-ups run side by side, and take turns in every round, so that what else runs on the machine hits them
alike; figures are medians over the rounds. The model is an HTTP server on loopback that answers at once.
Writes benchmarks/results/rollouts.json, and prints a table.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import orjson

from benchmarks.harness.reports import machine, medians, save, table
from benchmarks.harness.rounds import Setup, measure
from benchmarks.harness.work import ROOT, model_behaviour, rows
from benchmarks.loopback import run_model_server
from benchmarks.setups import TRANSPORTS, TransportName, setups

_HEADER = (
    "transports",
    "concurrency",
    "rollouts/s",
    "p50 ms",
    "p95 ms",
    "p99 ms",
    "CPU ms",
    "PSS MB",
    "of reference",
    "ms beyond the model",
    "sampled tokens/s",
)


class Round(NamedTuple):
    """The figures of one round; see `measure`."""

    transports: str
    concurrency: int
    figures: dict[str, Any]


async def model_time_ms(model_url: str, repeats: int = 200) -> float:
    """The model's own time: median milliseconds of an episode's two calls, made with aiohttp alone."""
    (row,) = rows(1)
    question = [*row["responses_create_params"]["input"]]
    told = [*question, {"role": "tool", "tool_call_id": "call_0_0", "content": "sunny"}]
    bodies = [orjson.dumps({"model": "loopback", "messages": messages}) for messages in (question, told)]
    headers = {"content-type": "application/json"}
    times = []
    async with aiohttp.ClientSession() as client:
        for _ in range(repeats):
            started = time.perf_counter()
            for body in bodies:
                async with client.post(
                    f"{model_url}/v1/chat/completions", data=body, headers=headers
                ) as answer:
                    await answer.read()
            times.append(time.perf_counter() - started)
    return 1000 * statistics.median(times)


def rollouts_for(concurrency: int, rollouts: int) -> int:
    """How many rollouts a round takes: at low concurrency few suffice, at high one the ends weigh less."""
    return max(4 * concurrency, min(rollouts, 200 * concurrency))


def run(found: Sequence[Setup], arguments: argparse.Namespace, model_url: str) -> list[Round]:
    """All rounds."""
    for setup in found:
        measure(setup, 32, 200)  # connections, caches, and code that is imported when it is first used
    rounds = []
    for number in range(arguments.rounds):
        for concurrency in arguments.concurrency:
            shift = number % len(found)  # no set-up is always the first
            for setup in (*found[shift:], *found[:shift]):
                figures = measure(setup, concurrency, rollouts_for(concurrency, arguments.rollouts))
                if concurrency == 1:
                    model_ms = asyncio.run(model_time_ms(model_url))
                    figures["overhead_ms"] = figures["latency_ms"]["p50"] - model_ms
                rounds.append(Round(setup.name, concurrency, figures))
                shown = f"{figures['rollouts_per_second']:7.1f}/s, {figures['failed']} failed"
                print(f"round {number + 1}: {setup.name:9} at {concurrency:5}: {shown}", file=sys.stderr)
    return rounds


def summarize(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """The medians of every set-up at every concurrency."""
    figures: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for one in rounds:
        figures[one.transports, one.concurrency].append(one.figures)
    return [
        {"transports": transports, "concurrency": concurrency, **medians(of_both)}
        for (transports, concurrency), of_both in figures.items()
    ]


def kb_per_rollout_in_flight(rounds: Sequence[Round]) -> dict[str, float]:
    """What resident memory grew by from the lowest to the highest concurrency, by kind of transports.

    In the first round: heaps that have grown once do not shrink.
    """
    grown = {}
    for transports in dict.fromkeys(one.transports for one in rounds):
        first = {one.concurrency: one for one in reversed(rounds) if one.transports == transports}
        low, high = first[min(first)], first[max(first)]
        if high.concurrency > low.concurrency:
            more = high.figures["rss_mb"]["total"] - low.figures["rss_mb"]["total"]
            grown[transports] = round(1000 * more / (high.concurrency - low.concurrency), 1)
    return grown


def markdown(summary: Sequence[dict[str, Any]]) -> str:
    """The table of a summary."""
    reference = {
        one["concurrency"]: one["rollouts_per_second"] for one in summary if one["transports"] == "reference"
    }
    lines = []
    for one in sorted(summary, key=lambda one: (one["concurrency"], TRANSPORTS.index(one["transports"]))):
        rate, beside = one["rollouts_per_second"], reference.get(one["concurrency"])
        ratio = "" if beside is None else f"{rate / beside:.0%}"
        costs = (one["cpu_ms"]["total"], one["pss_mb"]["total"], ratio, one.get("overhead_ms", ""))
        lines.append(
            (
                one["transports"],
                one["concurrency"],
                rate,
                *one["latency_ms"].values(),
                *costs,
                one["tokens_per_second"] or "",
            )
        )
    return table(_HEADER, lines)


def transport_names(text: str) -> list[TransportName]:
    """Kinds of transports, with commas between them."""
    found = [transport for transport in TRANSPORTS if transport in text.split(",")]
    if len(found) != len(text.split(",")):
        raise ValueError(text)
    return found


def numbers(text: str) -> list[int]:
    """Integers, with commas between them."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--transports", type=transport_names, default=list(TRANSPORTS), help=f"some of {','.join(TRANSPORTS)}"
    )
    parser.add_argument("--concurrency", type=numbers, default=[1, 64, 256, 1024], help="rollouts in flight")
    parser.add_argument("--rollouts", type=int, default=2000, help="rollouts of a round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="of the model")
    parser.add_argument(
        "--tokens", type=int, default=0, help="that each of a rollout's two answers samples, with ids"
    )
    parser.add_argument("--agent-replicas", type=int, default=1, help="replicas of a graph's agent")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "rollouts.json")
    arguments = parser.parse_args()
    settings = {key: value for key, value in vars(arguments).items() if key != "output"}
    result: dict[str, Any] = {"machine": machine(), "settings": settings}
    with (
        run_model_server(model_behaviour(arguments.latency_ms, arguments.tokens)) as model,
        setups(
            arguments.transports,
            model,
            agent_replicas=arguments.agent_replicas,
            token_ids=arguments.tokens > 0,
        ) as found,
    ):
        rounds = run(found, arguments, model.url)
    summary = summarize(rounds)
    grown = kb_per_rollout_in_flight(rounds)
    result |= {"summary": summary, "kb_per_rollout_in_flight": grown}
    save(arguments.output, {**result, "rounds": [one._asdict() for one in rounds]})
    print(markdown(summary))


if __name__ == "__main__":
    main()

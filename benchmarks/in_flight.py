"""Many rollouts in flight at the same moment: that all of them end well, and the memory that each one takes.

    python -m benchmarks.in_flight [--rollouts 10000] [--transports replica|inline]

All are started at once. The model takes so long for each answer that all of them wait in it at the same time:
that is when memory is read, by process. What it was before, with 64 in flight, is taken off.
Writes benchmarks/results/in_flight.json; prints the growth in KB per rollout.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness.processes import Census
from benchmarks.harness.reports import machine, save
from benchmarks.harness.work import ROOT, graph, model_behaviour, rows
from benchmarks.loopback import RunningModelServer, run_model_server
from gym_serve import AsyncGym, Gym
from gym_serve.rollouts.files import read_records

_WARM_UP = 64
_PATIENCE_SECONDS = 300.0
_NOT_COUNTED = ("model server", "idle")


def wait_until_open(model: RunningModelServer, count: int) -> None:
    """Wait until so many requests wait in the model.

    Raises:
        RuntimeError: they do not; the model's latency is too short for this machine.
    """
    give_up = time.monotonic() + _PATIENCE_SECONDS
    most = 0
    while most < count:
        now = model.stats()["open"]
        if now < most or time.monotonic() > give_up:
            raise RuntimeError(f"only {most} of {count} were in the model at once; give --latency-s more")
        most = now
        time.sleep(0.1)


async def collect(
    gym: Gym, model: RunningModelServer, count: int, census: Census
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """So many rollouts at once, and the memory (RSS) by role when all of them wait in the model."""
    work = rows(count)
    with TemporaryDirectory() as folder:
        output = Path(folder) / "rollouts.jsonl"
        collection = asyncio.create_task(
            AsyncGym.of(gym).collect(work, output, concurrency=count, attempts=1)
        )
        await asyncio.to_thread(wait_until_open, model, count)
        memory = census.rss_mb()
        await collection
        return list(read_records(output)), memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=10_000, help="how many")
    parser.add_argument(
        "--transports", choices=("replica", "inline"), default="replica", help="kind of transports"
    )
    parser.add_argument("--latency-s", type=float, default=30.0, help="of the model, for each of two answers")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "in_flight.json")
    arguments = parser.parse_args()
    count = arguments.rollouts
    with run_model_server(model_behaviour(1000 * arguments.latency_s)) as model:
        spec = graph(model.url, inline=arguments.transports == "inline", in_flight=count)
        with Gym.from_graph(spec, name="in_flight") as gym:
            census = Census({model.pid: "model server"}, "in_flight")
            _, before = asyncio.run(collect(gym, model, _WARM_UP, census))
            started = time.perf_counter()
            rollouts, during = asyncio.run(collect(gym, model, count, census))
            seconds = time.perf_counter() - started
    grown = {role: 1000 * (size - before.get(role, 0.0)) / count for role, size in during.items()}
    counted = {role: round(kb, 1) for role, kb in grown.items() if role not in _NOT_COUNTED}
    result = {
        "machine": machine(),
        "settings": {key: value for key, value in vars(arguments).items() if key != "output"},
        "scored": sum(rollout["reward"] == 1.0 for rollout in rollouts),
        "seconds": round(seconds, 1),
        "kb_per_rollout": {**counted, "total": round(sum(counted.values()), 1)},
    }
    save(arguments.output, result)
    print(f"{result['scored']} of {count} scored; KB per rollout: {result['kb_per_rollout']}")


if __name__ == "__main__":
    main()

"""What a cluster needs for so many rollouts in flight, from what one machine measured.

    python -m benchmarks.capacity [--in-flight 1000,100000] [--episode-s 60]

Reads benchmarks/results/rollouts.json (CPU per rollout by process, by handle, at the highest concurrency) and
benchmarks/results/in_flight.json (memory per rollout by process). By Little's law the rate is the rollouts in
flight over the seconds of an episode. A process needs rate x CPU in cores, and in flight x memory.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from benchmarks.harness.reports import table
from benchmarks.harness.work import ROOT

_ROLES = ("driver", "agent", "policy", "weather")
_BUSY = 0.7  # of a core that a process is given: queues grow without bound towards 1


def needs(
    in_flight: int, episode_s: float, cpu_ms: Mapping[str, float], kb: Mapping[str, float]
) -> list[tuple[Any, ...]]:
    """A line for each process: rate, cores, processes of one core, memory of all of them in MB."""
    rate = in_flight / episode_s
    lines = []
    for role in _ROLES:
        cores = rate * cpu_ms[role] / 1000
        lines.append((in_flight, rate, role, cores, math.ceil(cores / _BUSY), in_flight * kb[role] / 1000))
    return lines


def read(folder: Path, benchmark: str) -> dict[str, Any]:
    """What another benchmark has written."""
    path = folder / f"{benchmark}.json"
    if not path.exists():
        raise SystemExit(f"{path} is missing: run `python -m benchmarks.{benchmark}` first")
    result: dict[str, Any] = orjson.loads(path.read_bytes())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--in-flight", default="1000,100000", help="numbers, with commas between them")
    parser.add_argument("--episode-s", type=float, default=60.0, help="seconds of an episode")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    summary = read(arguments.results, "rollouts")["summary"]
    by_handle = [one for one in summary if one["transports"] == "replica"]
    cpu_ms = max(by_handle, key=lambda one: one["concurrency"])["cpu_ms"]
    kb = read(arguments.results, "in_flight")["kb_per_rollout"]
    lines = [
        line
        for number in arguments.in_flight.split(",")
        for line in needs(int(number), arguments.episode_s, cpu_ms, kb)
    ]
    header = ("in flight", "rollouts/s", "process", "cores", f"processes at {_BUSY:.0%} of a core", "MB")
    print(table(header, lines))


if __name__ == "__main__":
    main()

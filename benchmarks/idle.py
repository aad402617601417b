"""What a deployed graph costs while nobody asks anything of it, beside four deployments that do nothing.

    python -m benchmarks.idle [--seconds 20] [--rounds 3] [--stages empty,graph]

The stages are those of `benchmarks.startup`, one after the other. Writes benchmarks/results/idle.json; prints
CPU in percent of a core by kind of process, medians over the rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.ray_processes import cpu_by_kind
from benchmarks.harness.reports import machine, medians, save, table
from benchmarks.harness.work import ROOT
from benchmarks.stages import STAGES

_SETTLING = 20.0  # seconds; Ray and Serve start threads and ask for news more often at first


def percent_of_a_core(seconds: float) -> dict[str, float]:
    """CPU by kind of process in the next ``seconds``, and in total."""
    before, started = cpu_by_kind(), time.perf_counter()
    time.sleep(seconds)
    after, passed = cpu_by_kind(), time.perf_counter() - started
    percent = {kind: 100 * (spent - before.get(kind, 0.0)) / passed for kind, spent in after.items()}
    return {**percent, "total": sum(percent.values())}


def kinds_table(summary: Mapping[str, Mapping[str, float]]) -> str:
    """One line per kind of process: percent of a core at every stage."""
    kinds = dict.fromkeys(kind for percent in summary.values() for kind in percent)
    lines = [(kind, *(percent.get(kind, "") for percent in summary.values())) for kind in kinds]
    return table(("% of a core", *summary), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a round")
    parser.add_argument("--rounds", type=int, default=3, help="of each stage")
    parser.add_argument(
        "--stages", default="empty,graph", help=f"with commas between them: {', '.join(STAGES)}"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "idle.json")
    arguments = parser.parse_args()
    before = machine()
    summary: dict[str, Any] = {}
    for stage in arguments.stages.split(","):
        with STAGES[stage]():
            time.sleep(_SETTLING)
            rounds = [percent_of_a_core(arguments.seconds) for _ in range(arguments.rounds)]
        summary[stage] = medians(rounds)
    settings = {"seconds": arguments.seconds, "rounds": arguments.rounds}
    save(arguments.output, {"machine": before, "settings": settings, "percent_of_a_core": summary})
    print(kinds_table(summary))


if __name__ == "__main__":
    main()

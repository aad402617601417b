"""What it takes from nothing to the first rollout of a graph with four servers, and how much of it is Ray's.

    python -m benchmarks.startup [--runs 5] [--stages ray,serve,empty,graph,inline]

Every run is a process of its own with a Ray of its own; the stages take turns (see `benchmarks.stages`):

- ray: ``ray.init`` alone;
- serve: and ``serve.start``;
- empty: and four deployments that do nothing, until the first of them has answered;
- graph: `Gym.from_graph` of a model, an environment, an agent and the gateway, until the first rollout;
- inline: the same servers with model and environment inside the agent's replica, and none of their own;
- up-empty: ``ray start`` with the options of `gym-serve up`, Serve, and the four deployments that do nothing;
- up: `gym-serve up` of the graph, until it has answered over HTTP.

A run that takes too long ends with the stacks of its threads on stderr, and counts as failed.
Writes benchmarks/results/startup.json; prints medians: a table of the stages, and memory by kind of process.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.ray_processes import count_by_kind, cpu_by_kind, pss_mb_by_kind
from benchmarks.harness.reports import machine, medians, save, table
from benchmarks.harness.work import ROOT
from benchmarks.stages import STAGES


def once(stage: str) -> dict[str, Any]:
    """The figures of one run, in this process: seconds, and by kind of process CPU seconds and PSS in MB."""
    started = time.monotonic()
    with STAGES[stage]():
        seconds = time.monotonic() - started
        cpu = cpu_by_kind()
        return {"seconds": seconds, "cpu_s": cpu, "pss_mb": pss_mb_by_kind(), "processes": count_by_kind()}


def child(stage: str, limit_s: float) -> dict[str, Any] | None:
    """The figures of one run in a process of its own; None for one that failed or took too long."""
    command = [sys.executable, "-m", "benchmarks.startup", "--once", stage, "--limit-s", str(limit_s)]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if run.returncode != 0:
        return None
    figures: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return figures


def stages_table(summary: Mapping[str, Mapping[str, Any]]) -> str:
    """One line per stage: the totals."""
    lines = [
        (stage, *(figures[key] for key in ("seconds", "cpu_s_total", "processes_total", "pss_mb_total")))
        for stage, figures in summary.items()
    ]
    return table(("stage", "seconds", "CPU seconds", "processes", "PSS MB"), lines)


def kinds_table(summary: Mapping[str, Mapping[str, Any]]) -> str:
    """One line per kind of process: how many there are at every stage, their CPU seconds and their PSS."""
    kinds = dict.fromkeys(kind for figures in summary.values() for kind in figures["pss_mb"])

    def cell(figures: Mapping[str, Any], kind: str) -> str:
        if not (count := round(figures["processes"].get(kind, 0))):
            return ""
        return f"{count}: {figures['cpu_s'][kind]:.1f} s, {figures['pss_mb'][kind]:.0f} MB"

    lines = [(kind, *(cell(figures, kind) for figures in summary.values())) for kind in kinds]
    return table(("kind", *summary), lines)


def summarize(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The medians of some runs of a stage, with totals over the kinds of processes."""
    totals = ("cpu_s", "pss_mb", "processes")
    return medians([{**run, **{f"{key}_total": sum(run[key].values()) for key in totals}} for run in runs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="of each stage")
    parser.add_argument("--stages", default=",".join(STAGES), help="with commas between them")
    parser.add_argument("--limit-s", type=float, default=90.0, help="seconds that a run may take")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "startup.json")
    parser.add_argument("--once", choices=STAGES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once:
        faulthandler.dump_traceback_later(arguments.limit_s, exit=True)
        print(json.dumps(once(arguments.once)))
        return
    stages = arguments.stages.split(",")
    before = machine()
    runs: dict[str, list[dict[str, Any]]] = {stage: [] for stage in stages}
    failed = dict.fromkeys(stages, 0)
    for number in range(arguments.runs):
        for stage in stages:
            figures = child(stage, arguments.limit_s)
            if figures is None:
                failed[stage] += 1
            else:
                runs[stage].append(figures)
            shown = f"{figures['seconds']:.1f} s" if figures else "failed"
            print(f"run {number + 1}: {stage:6}: {shown}", file=sys.stderr)
    summary = {stage: summarize(found) for stage, found in runs.items() if found}
    save(arguments.output, {"machine": before, "failed": failed, "summary": summary, "runs": runs})
    print(stages_table(summary), kinds_table(summary), sep="\n\n")


if __name__ == "__main__":
    main()

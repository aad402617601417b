"""A long collection with the scripted model at zero latency: the driver's memory, and every row once.

    python -m benchmarks.soak [--rows 100000] [--concurrency 256] [--output FOLDER] [--engine-only]

Deploys a graph of one environment on a local Ray, collects one rollout a row into files, and reads them
back. With ``--engine-only`` there is no graph: every rollout is scored in this process, so that a million
rows take a minute and the engine's own memory shows. Prints one JSON object: the driver's RSS in MB at the
start and after 10, 50 and 100 percent, rollouts per second, and how many rows have no rollout, or more than
one. Exits with status 1 if there is such a row.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
import psutil

from benchmarks.harness.reports import machine
from gym_serve import Gym, Progress
from gym_serve.rollouts import Collection, Report, RolloutBackend, RunnerOptions, collect
from gym_serve.rollouts.files import read_records

Collect = Callable[..., Awaitable[Report]]

GRAPH = {
    "models": {"policy": {"type": "scripted_model", "environments": []}},
    "resources": {"mcqa": {"type": "mcqa"}},
    "agents": {
        "agent": {
            "type": "simple_agent",
            "model": "policy",
            "resources": "mcqa",
            "inline": ["mcqa", "policy"],
        }
    },
}


def source(count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        question = f"Question {number}: which letter?\nA: this\nB: that"
        yield {
            "responses_create_params": {"input": [{"role": "user", "content": question}]},
            "options": [{"A": "this"}, {"B": "that"}],
            "expected_answer": "A",
            "grading_mode": "strict_single_letter_boxed",
            "number": number,
        }


class Scores(RolloutBackend):
    """Rollouts without a graph."""

    async def run(self, row: dict[str, Any], /) -> dict[str, Any]:
        return {**row, "response": {"output": [], "usage": {"output_tokens": 1}}, "reward": 1.0}


async def collect_in_process(
    rows: Iterator[dict[str, Any]], output: Path, *, concurrency: int, progress: Callable[[Progress], None]
) -> Report:
    collection = Collection(Scores(), options=RunnerOptions(concurrency=concurrency))
    return await collect(rows, output, collection, progress=progress)


async def soak(collect: Collect, arguments: argparse.Namespace, output: Path) -> dict[str, Any]:
    process = psutil.Process()
    rss: dict[str, float] = {}
    times: list[float] = []

    def rss_mb() -> float:
        return round(process.memory_info().rss / 1e6, 1)

    def progress(now: Progress) -> None:
        for percent in (0, 10, 50, 100):
            if f"{percent}%" not in rss and 100 * now.finished >= percent * now.total:
                rss[f"{percent}%"] = rss_mb()
                times.append(time.monotonic())

    report = await collect(
        source(arguments.rows), output, concurrency=arguments.concurrency, progress=progress
    )
    rss["with metrics"] = rss_mb()
    found = Counter(record["number"] for record in read_records(output))
    return {
        "rows": arguments.rows,
        "concurrency": arguments.concurrency,
        "rss_mb": rss,
        "rollouts_per_second": round(arguments.rows / (times[-1] - times[0])),
        "missing": sum(found[number] == 0 for number in range(arguments.rows)),
        "more_than_once": sum(count > 1 for count in found.values()),
        "failed_attempts": dict(report.progress.failed_attempts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000, help="rows")
    parser.add_argument("--concurrency", type=int, default=256, help="rollouts at the same time")
    parser.add_argument("--output", type=Path, help="folder of the files; a temporary one by default")
    parser.add_argument("--engine-only", action="store_true", help="no graph: score in this process")
    arguments = parser.parse_args()
    where = machine()
    with ExitStack() as stack:
        folder = arguments.output or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        run = (
            collect_in_process
            if arguments.engine_only
            else stack.enter_context(Gym.from_graph(GRAPH)).collect
        )
        result = asyncio.run(soak(run, arguments, folder / "out.jsonl"))
    print(orjson.dumps({"machine": where, **result}, option=orjson.OPT_INDENT_2).decode())
    sys.exit(bool(result["missing"] or result["more_than_once"]))


if __name__ == "__main__":
    main()

"""Deploy graphs/quickstart.yaml, collect rollouts of three environments, print a table.

    python examples/quickstart.py [--repeats 4] [--output results]

No GPU, no network, no API key: the policy is the embedded, scripted one.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table

from gym_serve import Gym
from gym_serve.metrics import SUMMARY_COLUMNS, Aggregator, summarize

ROOT = Path(__file__).parent.parent
ENVIRONMENTS = ("simple_weather", "mcqa", "math_with_judge")


async def collect(gym: Gym, environment: str, repeats: int, output: Path) -> Aggregator:
    """Collect the environment's example rows into ``{output}/{environment}.jsonl``."""
    aggregator = Aggregator()
    rows = ROOT / "environments" / environment / "data" / "example.jsonl"
    lines = []
    async for rollout in gym.rollouts(rows, repeats=repeats):
        lines.append(orjson.dumps(rollout, option=orjson.OPT_APPEND_NEWLINE))
        aggregator.add(rollout)
    (output / f"{environment}.jsonl").write_bytes(b"".join(lines))
    return aggregator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=4, help="rollouts per row")
    parser.add_argument("--output", type=Path, default=ROOT / "results", help="folder of the JSONL files")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    console = Console(width=None if sys.stdout.isatty() else 120)  # a log file has no width of its own

    started = time.monotonic()
    with Gym.from_graph(ROOT / "graphs" / "quickstart.yaml") as gym:
        console.print(f"graph ready after {time.monotonic() - started:.1f} s at {gym.url}")
        aggregators = {
            name: asyncio.run(collect(gym, name, arguments.repeats, arguments.output))
            for name in ENVIRONMENTS
        }

    table = Table("environment", *SUMMARY_COLUMNS[1:])
    for row in summarize(aggregators):
        table.add_row(*row.cells())
    console.print(table)
    console.print(f"rollouts: {arguments.output}/*.jsonl")


if __name__ == "__main__":
    main()

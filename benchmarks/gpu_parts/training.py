"""A real model learns: `examples/train_real.py`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from statistics import median
from typing import Any

import orjson

from benchmarks.harness.work import ROOT


def figures(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rewards of the held-out rows, and where the seconds of a step go."""
    whole = arguments.folder / "training"
    words = [
        sys.executable,
        "examples/train_real.py",
        "--task",
        "numbers",
        "--steps",
        str(arguments.training_steps),
    ]
    subprocess.run([*words, "--output", str(whole)], cwd=ROOT, check=True)
    output = whole / "numbers-0"
    result = orjson.loads((output / "result.json").read_bytes())
    steps = [orjson.loads(line) for line in (output / "metrics.jsonl").read_bytes().splitlines()]
    generating = [step["seconds"] for step in steps if step["seconds"]["weights"] > 0.01][1:]
    yield {
        "held-out reward before": result["before"],
        "held-out reward after": result["after"],
        "share of what was missing": (result["after"] - result["before"]) / (1 - result["before"]),
        "optimizer steps": result["steps"],
        "seconds, both evaluations included": result["seconds"],
        "failed rollouts, share": max(step["failures"] for step in steps),
        **{
            f"{part} of a step that generates, s": median(seconds[part] for seconds in generating)
            for part in ("rollouts", "weights", "training")
            if generating
        },
    }

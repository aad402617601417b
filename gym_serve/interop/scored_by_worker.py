"""`Scorer`: answers are scored by another project's own code, in a process of its own (lm-eval, Inspect)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import PositiveFloat, PositiveInt

from gym_serve.servers import ResourcesServer, Verdict
from gym_serve.types.errors import InvalidRequest
from gym_serve.workers import WorkerPool, WorkFailed

_WORKER_MEMORY = 6 << 30  # address space; these projects bring NumPy, pandas and pyarrow


class ScorerConfig(ResourcesServer.Config):
    """Settings of servers that have a `Scorer`."""

    metric: str | None = None
    """The metric that is the reward; by default the task's first one."""
    cpu_seconds: PositiveFloat = 30.0
    """CPU time that scoring one answer may take; one that takes longer scores 0."""
    num_workers: PositiveInt = 1
    """Processes that score, each using up to one core and 500 MB; read at the start only."""


class Scorer:
    """The workers of a server. Their function answers ``{"metrics": {name: number}, "invalid": None}``, or
    says under ``invalid`` why nothing can be scored."""

    def __init__(self, field: str, worker: Path, config: ScorerConfig) -> None:
        self.pool = WorkerPool(field, worker, config.num_workers, memory_bytes=_WORKER_MEMORY)
        self._field = field
        self._config = config

    async def verdict(self, task: str, work: list[Any]) -> Verdict:
        """The verdict on an answer to a row of a task: the reward, and all metrics as one field. Raises
        InvalidRequest: the task cannot score it, or has no such metric."""
        try:
            scored = await self.pool.run(work, cpu_seconds=self._config.cpu_seconds)
        except WorkFailed as failure:
            return Verdict(reward=0.0, reason=str(failure))
        if scored["invalid"] is not None:
            raise InvalidRequest(scored["invalid"])
        metrics: dict[str, float] = scored["metrics"]
        name = self._config.metric or next(iter(metrics))
        if name not in metrics:
            raise InvalidRequest(f"{task} has no metric {name!r}; it has {', '.join(metrics)}")
        return Verdict.model_validate({"reward": metrics[name], self._field: metrics})

"""`Plan`: what an evaluation is to do, and all that is needed to do it again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from gym_serve.evaluation.benchmark import Benchmark, agent_of, composed
from gym_serve.evaluation.models import Model
from gym_serve.rollouts.rows import LocatedRow
from gym_serve.types.requests import JSON


@dataclass(frozen=True)
class Plan:
    """An evaluation: every benchmark with every model, in one run on one graph.

    Attributes:
        limit: rows of each benchmark at most.
        files: rows of benchmarks in place of their own, by name.
        sample: only the few rows that a benchmark has with it, which need no network.
        params: sampling parameters of all rows, over those of the benchmarks.
        repeats: rollouts of each row; None for those of each benchmark.
        agent: settings of all agents, over those of the benchmarks, e.g. ``max_steps``.
    """

    benchmarks: list[Benchmark]
    models: list[Model]
    judge: Model | None = None
    split: str = "test"
    limit: int | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    sample: bool = False
    params: Mapping[str, Any] = field(default_factory=dict)
    repeats: int | None = None
    seed: int | None = None
    agent: Mapping[str, Any] = field(default_factory=dict)

    def cells(self) -> Iterator[tuple[str, Benchmark, Model]]:
        """Each benchmark with each model, by the name of the agent that plays it."""
        for benchmark in self.benchmarks:
            for model in self.models:
                yield agent_of(benchmark.name, model.server), benchmark, model

    def graph(self) -> JSON:
        """What stands under ``args`` of a graph file. Raises InvalidRequest: a judge is missing."""
        models = {model.server: model.settings for model in self.models}
        graph = composed(self.benchmarks, models, None if self.judge is None else self.judge.settings)
        return {**graph, "agents": {name: {**agent, **self.agent} for name, agent in graph["agents"].items()}}

    def rollouts_per_row(self) -> dict[str, int]:
        """By agent."""
        return {name: self.repeats or benchmark.repeats for name, benchmark, _ in self.cells()}

    def rows(self) -> Iterator[LocatedRow]:
        """The rows of all benchmarks for all models: those of one row stand together, so that models advance
        side by side. Raises GymError: a source cannot be read."""
        for benchmark in self.benchmarks:
            agents = [agent_of(benchmark.name, model.server) for model in self.models]
            for where, row, problem in self._rows_of(benchmark):
                if row is None:
                    yield LocatedRow(where, None, problem)
                    continue
                row["responses_create_params"] |= self.params
                for agent in agents:
                    yield LocatedRow(
                        where, {**row, "agent_ref": {"type": "responses_api_agents", "name": agent}}
                    )

    def _rows_of(self, benchmark: Benchmark) -> Iterator[LocatedRow]:
        if self.sample:
            return benchmark.sample_rows()
        return benchmark.rows(self.split, limit=self.limit, file=self.files.get(benchmark.name))

    def record(self) -> JSON:
        """What decides the scores, without secrets: versions, rows, prompts, models, sampling."""
        return {
            "gym_serve": version("gym-serve"),
            "split": "sample" if self.sample else self.split,
            "limit": self.limit,
            "repeats": self.repeats,
            "seed": self.seed,
            "params": dict(self.params),
            "agent": dict(self.agent),
            "judge": None if self.judge is None else self.judge.label,
            "models": [
                {"label": model.label, "server": model.server, **_shown(model.settings)}
                for model in self.models
            ],
            "benchmarks": [
                {
                    "name": benchmark.name,
                    "version": benchmark.version,
                    "file_digest": benchmark.digest(),
                    "license": benchmark.license,
                    "rows": self.files.get(benchmark.name) or benchmark.rows_from.label,
                    "prompt": benchmark.prompt
                    if isinstance(benchmark.prompt, str | None)
                    else dict(benchmark.prompt),
                    "environment": benchmark.environment,
                    "metric": benchmark.metric,
                    "published": [one.model_dump() for one in benchmark.published],
                }
                for benchmark in self.benchmarks
            ],
        }


def _shown(settings: Mapping[str, Any]) -> JSON:
    return {key: value for key, value in settings.items() if key != "api_key"}

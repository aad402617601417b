"""`Request`: an evaluation in words, as a command line has them; `Plan`: what the words mean.

A `Request` is all that is needed to evaluate again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gym_serve.evaluation.benchmark import Benchmark, agent_of, composed, find_benchmark, name_of
from gym_serve.evaluation.models import Model, read_models
from gym_serve.evaluation.sources import is_file_of_rows
from gym_serve.graph import classes
from gym_serve.graph.loading import load_graph
from gym_serve.graph.spec import nearest
from gym_serve.rollouts.rows import LocatedRow
from gym_serve.types.errors import InvalidRequest, NotFound
from gym_serve.types.requests import JSON

_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Request:
    """What is to be evaluated.

    Attributes:
        benchmarks: names, files of benchmarks, ``CATALOGUE:WHAT``, or files of rows that ``grader`` scores.
        models: see `gym_serve.evaluation.models.FORMS`.
        limit: rows of each benchmark at most.
        files: rows of benchmarks in place of their own, by name.
        sample: only the few rows that a benchmark has with it, which need no network.
        agent: an agent of the graph that comes with each benchmark's environment, in place of the benchmark's
            own: a coding agent as it is, ``oracle`` or ``nop`` of ``workspace``.
        sandbox: provider of the sandboxes of each environment that has some.
        prompt: of files of rows: a template, or a text with ``{field}``.
        map: of files of rows: fields as expressions of columns.
        params: sampling parameters of all rows, over those of the benchmarks.
        repeats: rollouts of each row; None for those of each benchmark.
        prices: of the models' tokens, by label.
        max_turns, sample_tokens, sample_seconds, sample_cost: limits of each rollout, over those of the
            benchmarks; one that ends at a limit is scored as it stands.
    """

    benchmarks: list[str]
    models: list[str]
    judge: str | None = None
    split: str = "test"
    limit: int | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    sample: bool = False
    agent: str | None = None
    sandbox: str | None = None
    prompt: str | None = None
    grader: str | None = None
    map: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    repeats: int | None = None
    seed: int | None = None
    max_turns: int | None = None
    sample_tokens: int | None = None
    sample_seconds: float | None = None
    sample_cost: float | None = None
    prices: Mapping[str, JSON] = field(default_factory=dict)

    def plan(self) -> Plan:
        """The plan. Raises GymError: a name or a file cannot be used."""
        benchmarks = self.find()
        names = [benchmark.name for benchmark in benchmarks]
        if unknown := self.files.keys() - set(names):
            raise InvalidRequest(f"--rows names {', '.join(sorted(unknown))}, which is not evaluated")
        if doubled := {name for name in names if names.count(name) > 1}:
            raise InvalidRequest(
                f"two benchmarks are called {', '.join(sorted(doubled))}: evaluate them one by one"
            )
        models = list(map(self._priced, read_models(self.models)))
        judge = None if self.judge is None else self._priced(read_models([self.judge])[0])
        labels = [model.label for model in (*models, judge) if model is not None]
        if unknown := self.prices.keys() - set(labels):
            raise InvalidRequest(
                f"--price names {', '.join(sorted(unknown))}; models are {', '.join(labels)}"
            )
        unpriced = [model.label for model in models if model.label not in self.prices]
        if self.sample_cost is not None and unpriced:
            raise InvalidRequest(f"--sample-cost needs prices: --price {unpriced[0]}=INPUT/OUTPUT")
        return Plan(self, benchmarks, models, judge)

    def _priced(self, model: Model) -> Model:
        prices = self.prices.get(model.label)
        return model if prices is None else model._replace(settings={**model.settings, "prices": prices})

    def find(self) -> list[Benchmark]:
        """The benchmarks. Raises GymError: one is not there, or its file has problems."""
        benchmarks = [self._with_choices(self._find(name)) for name in self.benchmarks]
        if self.sandbox is not None and not any("sandbox" in each.environment for each in benchmarks):
            raise InvalidRequest("--sandbox: no environment of the benchmarks has sandboxes")
        return benchmarks

    def _with_choices(self, benchmark: Benchmark) -> Benchmark:
        """A benchmark with the agent and the sandbox that were asked for."""
        environment, agent = benchmark.environment, benchmark.agent
        if self.sandbox is not None and "sandbox" in benchmark.server.Config.model_fields:
            environment = {**environment, "sandbox": self.sandbox}
        if self.agent is not None:
            agent = _shipped_agent(environment["type"], self.agent)
        return benchmark.model_copy(update={"environment": environment, "agent": agent})

    def _find(self, name: str) -> Benchmark:
        return self._graded(name) if is_file_of_rows(name) else find_benchmark(name)

    def _graded(self, file: str) -> Benchmark:
        if self.grader is None:
            raise InvalidRequest(
                f"{file} is a file of rows: say how answers are scored (--grader FILE.py:FUNCTION)"
            )
        path, _, function = self.grader.rpartition(":")
        prompt = self.prompt
        if prompt is not None and "{{" not in prompt and "{%" not in prompt:
            prompt = _FIELD.sub(r"{{ \1 }}", prompt)
        name = name_of(Path(file).name.partition(".")[0])
        return Benchmark.model_validate(
            {
                "name": name if name[:1].isalpha() else name_of(f"rows_{name}"),
                "description": f"Rows of {file}, scored by {self.grader}.",
                "license": "that of the file",
                "rows": {"file": file if "://" in file else str(Path(file).resolve())},
                "map": self.map,
                "prompt": prompt,
                "environment": {"type": "graded", "function": f"{Path(path).resolve()}:{function}"},
            }
        )


@dataclass(frozen=True)
class Plan:
    """An evaluation: every benchmark with every model, in one run on one graph."""

    request: Request
    benchmarks: list[Benchmark]
    models: list[Model]
    judge: Model | None = None

    def cells(self) -> Iterator[tuple[str, Benchmark, Model]]:
        """Each benchmark with each model, by the name of the agent that plays it."""
        for benchmark in self.benchmarks:
            for model in self.models:
                yield agent_of(benchmark.name, model.server), benchmark, model

    def graph(self) -> JSON:
        """What stands under ``args`` of a graph file. Raises InvalidRequest: a judge is missing."""
        models = {model.server: model.settings for model in self.models}
        graph = composed(self.benchmarks, models, None if self.judge is None else self.judge.settings)
        costs = {model.server: self._cost_limit(model) for model in self.models}
        return {
            **graph,
            "agents": {
                name: {**agent, **self._limits, **costs[agent["model"]]}
                for name, agent in graph["agents"].items()
            },
        }

    def _cost_limit(self, model: Model) -> JSON:
        """The setting of a model's agents that limits the cost of a rollout."""
        most = self.request.sample_cost
        return {} if most is None else {"max_episode_cost": {"most": most, **model.settings["prices"]}}

    @property
    def _limits(self) -> JSON:
        """Settings of all agents, over those of the benchmarks."""
        request = self.request
        limits = {
            "max_steps": request.max_turns,
            "max_episode_tokens": request.sample_tokens,
            "episode_timeout": request.sample_seconds,
        }
        return {setting: limit for setting, limit in limits.items() if limit is not None}

    def rollouts_per_row(self) -> dict[str, int]:
        """By agent."""
        return {name: self.request.repeats or benchmark.repeats for name, benchmark, _ in self.cells()}

    def rows(self) -> Iterator[LocatedRow]:
        """The rows of all benchmarks for all models: those of one row stand together, so that models advance
        side by side. Raises GymError: a source cannot be read."""
        for benchmark in self.benchmarks:
            agents = [agent_of(benchmark.name, model.server) for model in self.models]
            for where, row, problem in self._rows_of(benchmark):
                if row is None:
                    yield LocatedRow(where, None, problem)
                    continue
                row["responses_create_params"] |= self.request.params
                for agent in agents:
                    yield LocatedRow(
                        where, {**row, "agent_ref": {"type": "responses_api_agents", "name": agent}}
                    )

    def _rows_of(self, benchmark: Benchmark) -> Iterator[LocatedRow]:
        request = self.request
        if request.sample:
            return benchmark.sample_rows()
        return benchmark.rows(request.split, limit=request.limit, file=request.files.get(benchmark.name))

    def record(self) -> JSON:
        """What decides the scores, without secrets: versions, rows, prompts, models, sampling."""
        request = self.request
        return {
            "gym_serve": version("gym-serve"),
            "split": "sample" if request.sample else request.split,
            "limit": request.limit,
            "repeats": request.repeats,
            "seed": request.seed,
            "params": dict(request.params),
            "agent": {**({} if request.agent is None else {"name": request.agent}), **self._limits},
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
                    "rows": request.files.get(benchmark.name) or benchmark.rows_from.label,
                    "environment": benchmark.environment,
                    "metric": benchmark.metric,
                    **benchmark.model_dump(include={"prompt", "published", "contamination"}),
                }
                for benchmark in self.benchmarks
            ],
            "request": asdict(request),
        }


def _shipped_agent(environment: str, name: str) -> JSON:
    """The settings of an agent of the graph that comes with an environment. Raises NotFound."""
    file = classes.graph_file(environment)
    agents: Mapping[str, Any] = load_graph(file).spec.agents if file.is_file() else {}
    if name not in agents:
        raise NotFound(f"--agent: the graph {environment} has no agent {name!r}{nearest(name, agents)}")
    # The address of that graph: in one process, a graph tells its agents its own.
    return {key: value for key, value in agents[name].items() if key != "gateway_url"}


def _shown(settings: Mapping[str, Any]) -> JSON:
    return {key: value for key, value in settings.items() if key != "api_key"}

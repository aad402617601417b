"""`Benchmark`: a file that says what is asked, of which rows, and how answers are scored.

It stands beside its environment (``environments/*/benchmarks/*.yaml``), or anywhere with its path as the
name. Rows of the source become rows of gym_serve: their columns, the mapped fields over them, and the prompt.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.metadata import entry_points
from itertools import islice
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

import gym_serve
from gym_serve.evaluation.sources import Source, file_rows
from gym_serve.evaluation.templates import evaluate, render
from gym_serve.graph.classes import find_class
from gym_serve.graph.loading import read_yaml
from gym_serve.graph.spec import nearest
from gym_serve.rollouts.expansion import params_of
from gym_serve.rollouts.rows import METADATA_KEYS, LocatedRow
from gym_serve.servers.resources import ResourcesServer
from gym_serve.types.errors import GymError, InvalidRequest, NotFound
from gym_serve.types.requests import JSON, problems_of

ROW_ID = "benchmark_row"
"""Field of every row and rollout: ``gsm8k/17``, the benchmark and the place of the row in it, from 0, or what
the source has in this field."""

JUDGE = "judge"
"""Name of the model that the settings of an environment refer to, where it needs one."""

GROUP = "gym_serve.benchmarks"
"""Entry points of other packages: each is a package whose folder has benchmark files."""

CATALOGUES = "gym_serve.benchmark_catalogues"
"""Entry points of functions from the WHAT of ``NAME:WHAT`` to what the file of a benchmark would say; its
``name`` is a text of any form."""

_LONGEST_NAME = 40
_RESERVED = {"response", "reward", "reason", "prompt", "agent_ref", "mask_sample", *METADATA_KEYS}
"""Columns that would be taken for something else in a row; a mapped field may still read them."""


Turns = str | list[list[JSON]]
"""What a model does in an episode: its only text, or the output items of each turn."""


class Prompt(BaseModel):
    """Messages before the model's first turn, as templates."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    user: str
    system: str | None = None

    def messages(self, row: Mapping[str, Any]) -> list[JSON]:
        """The messages for a row."""
        written = [("system", self.system), ("user", self.user)]
        return [{"role": role, "content": render(text, row)} for role, text in written if text is not None]


class Published(BaseModel):
    """A score that somebody has published."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    score: float  # percent
    source: str  # a URL


class Sample(BaseModel):
    """A row of the published schema, made by rule, with an answer that earns the full reward."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    row: dict[str, Any] | int
    """The columns; or the place of a row of the benchmark's source, from 0, where that is on this machine."""
    answer: Turns | None = None
    """The model's text, or its turns; None where the benchmark's own ``answer`` is one."""
    judge: tuple[str, str] | None = None
    """What a judge would say of that answer, and of an empty one, where the environment asks one."""


class Benchmark(BaseModel):
    """A benchmark."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")
    version: int = 1
    """Grows with every change that may change a score."""
    description: str
    license: str
    """Licence of the rows."""
    contamination: str | None = None
    """What is known of rows that models may have been trained on."""
    rows_from: Source = Field(alias="rows")
    environment: dict[str, Any]
    """``type`` and settings of a resources server."""
    agent: dict[str, Any] = {"type": "simple_agent", "max_steps": 1}
    prepare: str | None = None
    """``package.module:function``, row to row, for what expressions cannot do; it is called before
    ``map``."""
    map_: dict[str, str] = Field(default={}, alias="map")
    """Fields of a row as expressions of its columns, and of the mapped fields before them."""
    prompt: str | Prompt | None = None
    """The user message, or messages; None where the rows have their own ``responses_create_params``."""
    tools: str | None = None
    """Functions that the model may call: ``environment`` for the environment's own tools, or an expression
    for those of a row, in the form of the Responses API."""
    params: dict[str, Any] = {}
    """Sampling parameters: keys of ``responses_create_params``."""
    repeats: int = Field(1, ge=1)
    metric: str = "mean reward"
    """What its headline is called in the field; the number is the mean reward over rows, in percent."""
    published: list[Published] = []
    answer: str | None = None
    """Template of an answer that earns the full reward, for rows whose gold is such an answer."""
    sample: list[Sample] = []
    folder: Path = Field(default=Path(), exclude=True)

    @classmethod
    def load(cls, path: Path) -> Benchmark:
        """Read a file. Raises InvalidRequest: all of its problems."""
        content = read_yaml(path)
        if not isinstance(content, Mapping):
            raise InvalidRequest(f"{path}: a benchmark is a mapping")
        try:
            return cls.model_validate({**content, "folder": path.parent})
        except ValidationError as error:
            raise InvalidRequest(
                "\n".join(f"{path}: {problem}" for problem in problems_of(error, "benchmark"))
            ) from None

    @property
    def needs_judge(self) -> bool:
        """Whether its environment asks a judge, which the caller chooses."""
        return JUDGE in self.environment.values()

    def digest(self) -> str:
        """Changes with anything that the file says."""
        content = orjson.dumps(self.model_dump(mode="json"), option=orjson.OPT_SORT_KEYS)
        return hashlib.blake2b(content, digest_size=8).hexdigest()

    def rows(
        self,
        split: str = "test",
        *,
        limit: int | None = None,
        file: str | None = None,
        agent: str | None = None,
    ) -> Iterator[LocatedRow]:
        """The rows of a split, ready for a graph; one that does not fit has a problem.

        Args:
            limit: how many at most.
            file: rows in place of the benchmark's own, of the same columns.
            agent: the agent of the rows.
        """
        source = (
            self.rows_from.rows(split, self.folder, limit) if file is None else islice(file_rows(file), limit)
        )
        return self._made(source, agent)

    def sample_rows(self, agent: str | None = None) -> Iterator[LocatedRow]:
        """The rows of `sample`, which need no network."""
        return self._made(map(self._sampled, range(len(self.sample))), agent)

    def _sampled(self, position: int) -> LocatedRow:
        row = self.sample[position].row
        if isinstance(row, int):
            return next(islice(self.rows_from.rows("test", self.folder, row + 1), row, None))
        return LocatedRow(f"{self.name}.sample:{position + 1}", dict(row))

    def _made(self, source: Iterator[LocatedRow], agent: str | None) -> Iterator[LocatedRow]:
        for number, (where, columns, problem) in enumerate(source):
            if columns is None:
                yield LocatedRow(where, None, problem)
                continue
            try:
                row = self.row(columns)
            except GymError as error:
                yield LocatedRow(where, None, error.message)
                continue
            row[ROW_ID] = f"{self.name}/{columns.get(ROW_ID, number)}"
            if agent is not None:
                row["agent_ref"] = {"type": "responses_api_agents", "name": agent}
            yield LocatedRow(where, row)

    def row(self, columns: JSON) -> JSON:
        """The row of a source's columns. Raises InvalidRequest: they do not fit the benchmark."""
        if self.prepare is not None:
            columns = resolve_name(self.prepare)(columns)
        fields = dict(columns)
        for name, expression in self.map_.items():
            fields[name] = evaluate(expression, fields)
        row = {name: value for name, value in fields.items() if name not in _RESERVED or name in self.map_}
        params: JSON = {**self.params, **params_of(columns)}
        if self.prompt is not None:
            prompt = Prompt(user=self.prompt) if isinstance(self.prompt, str) else self.prompt
            params["input"] = prompt.messages(fields)
        if self.tools is not None:
            params["tools"] = (
                self._own_tools() if self.tools == "environment" else evaluate(self.tools, fields)
            )
        return {**row, "responses_create_params": params}

    def _own_tools(self) -> list[JSON]:
        return [spec.openai() for spec in self.server.tools.values()]

    @cached_property
    def server(self) -> type[ResourcesServer]:
        """The class of its environment. Raises GraphError: it is not there."""
        environment = find_class("resources", self.environment["type"])
        assert issubclass(environment, ResourcesServer)
        return environment

    def graph(self, model: Mapping[str, Any], judge: Mapping[str, Any] | None = None) -> JSON:
        """What stands under ``args`` of a graph file: this benchmark, with one model. Raises InvalidRequest:
        it needs a judge."""
        return composed([self], {"policy": model}, judge)


@dataclass(frozen=True)
class BenchmarkRows:
    """The rows of a split of a benchmark: every iteration draws them from their source anew."""

    benchmark: Benchmark
    split: str

    def __iter__(self) -> Iterator[LocatedRow]:
        return self.benchmark.rows(self.split)


def composed(
    benchmarks: list[Benchmark], models: Mapping[str, Mapping[str, Any]], judge: Mapping[str, Any] | None
) -> JSON:
    """A graph with an agent for each benchmark and model: `agent_of` has its name. Raises InvalidRequest: a
    benchmark needs a judge, and there is none."""
    if judge is None and (judged := [one.name for one in benchmarks if one.needs_judge]):
        raise InvalidRequest(
            f"{', '.join(judged)}: answers are scored by a judge; choose its model (--judge)"
        )
    servers = {name: dict(model) for name, model in models.items()}
    if judge is not None and any(one.needs_judge for one in benchmarks):
        servers[JUDGE] = dict(judge)
    agents = {
        agent_of(benchmark.name, model): {**benchmark.agent, "model": model, "resources": benchmark.name}
        for benchmark in benchmarks
        for model in models
    }
    return {
        "models": servers,
        "resources": {benchmark.name: dict(benchmark.environment) for benchmark in benchmarks},
        "agents": agents,
    }


def agent_of(benchmark: str, model: str) -> str:
    """Name of the agent that plays a benchmark with a model."""
    return f"{benchmark}--{model}"


@lru_cache
def _files() -> dict[str, Path]:
    folders = sorted((Path(gym_serve.__file__).parent / "environments").glob("*/benchmarks"))
    for point in entry_points(group=GROUP):
        folders += map(Path, importlib.import_module(point.value).__path__)
    return {file.stem: file for folder in folders for file in sorted(folder.glob("*.yaml"))}


def benchmark_names() -> list[str]:
    """The names of all benchmarks of installed packages."""
    return sorted(_files())


def find_benchmark(name: str) -> Benchmark:
    """A benchmark by its name, by the path of its file, or ``CATALOGUE:WHAT``. Raises NotFound: there is
    none; InvalidRequest: its file has problems."""
    catalogue, colon, what = name.partition(":")
    if colon:
        known = {point.name: point for point in entry_points(group=CATALOGUES)}
        if catalogue not in known:
            raise NotFound(f"no catalogue of benchmarks {catalogue!r}{nearest(catalogue, known)}")
        adapter: Callable[[str], JSON] = known[catalogue].load()
        content = adapter(what)
        return Benchmark.model_validate({**content, "name": name_of(f"{catalogue}_{content['name']}")})
    path = Path(name) if name.endswith((".yaml", ".yml")) else _files().get(name)
    if path is None:
        raise NotFound(f"no benchmark {name!r}{nearest(name, benchmark_names())}")
    return Benchmark.load(path)


def name_of(text: str) -> str:
    """A text in the form of a benchmark's name."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")[:_LONGEST_NAME]

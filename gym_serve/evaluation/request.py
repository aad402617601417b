"""`Request`: an evaluation in words, as a command line has them, and the `Plan` that they mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from gym_serve.evaluation.benchmark import Benchmark, find_benchmark
from gym_serve.evaluation.models import read_models
from gym_serve.evaluation.plan import Plan
from gym_serve.graph.spec import nearest
from gym_serve.types.errors import InvalidRequest, NotFound
from gym_serve.types.requests import JSON

CATALOGUES = "gym_serve.benchmark_catalogues"
"""Entry points of functions from the WHAT of ``NAME:WHAT`` to what the file of a benchmark would say."""

_DATA = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".csv", ".tsv", ".arrow", ".json")
_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Request:
    """What is to be evaluated.

    Attributes:
        benchmarks: names, files of benchmarks, ``CATALOGUE:WHAT``, or files of rows that ``grader`` scores.
        models: see `gym_serve.evaluation.models.FORMS`.
        prompt: of files of rows: a template, or a text with ``{field}``.
        map: of files of rows: fields as expressions of columns.
    """

    benchmarks: list[str]
    models: list[str]
    judge: str | None = None
    split: str = "test"
    limit: int | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    sample: bool = False
    prompt: str | None = None
    grader: str | None = None
    map: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    repeats: int | None = None
    seed: int | None = None
    max_turns: int | None = None

    def plan(self) -> Plan:
        """The plan. Raises GymError: a name or a file cannot be used."""
        found = self.find()
        names = [benchmark.name for benchmark in found]
        if unknown := self.files.keys() - set(names):
            raise InvalidRequest(f"--rows names {', '.join(sorted(unknown))}, which is not evaluated")
        if doubled := {name for name in names if names.count(name) > 1}:
            raise InvalidRequest(
                f"two benchmarks are called {', '.join(sorted(doubled))}: evaluate them one by one"
            )
        return Plan(
            benchmarks=found,
            models=read_models(self.models),
            judge=None if self.judge is None else read_models([self.judge])[0],
            split=self.split,
            limit=self.limit,
            files=self.files,
            sample=self.sample,
            params=self.params,
            repeats=self.repeats,
            seed=self.seed,
            agent={} if self.max_turns is None else {"max_steps": self.max_turns},
        )

    def find(self) -> list[Benchmark]:
        """The benchmarks. Raises GymError: one is not there, or its file has problems."""
        return [self._find(name) for name in self.benchmarks]

    def to_json(self) -> JSON:
        return asdict(self)

    def _find(self, name: str) -> Benchmark:
        if name.lower().endswith(_DATA):
            return self._graded(name)
        catalogue, colon, what = name.partition(":")
        if not colon:
            return find_benchmark(name)
        known = {point.name: point for point in entry_points(group=CATALOGUES)}
        if catalogue not in known:
            raise NotFound(f"no catalogue of benchmarks {catalogue!r}{nearest(catalogue, known)}")
        adapter: Callable[[str], JSON] = known[catalogue].load()
        return Benchmark.model_validate(adapter(what))

    def _graded(self, file: str) -> Benchmark:
        if self.grader is None:
            raise InvalidRequest(
                f"{file} is a file of rows: say how answers are scored (--grader FILE.py:FUNCTION)"
            )
        path, _, function = self.grader.rpartition(":")
        prompt = self.prompt
        if prompt is not None and "{{" not in prompt and "{%" not in prompt:
            prompt = _FIELD.sub(r"{{ \1 }}", prompt)
        name = re.sub(r"\W+", "_", Path(file).name.partition(".")[0].lower()).strip("_")[:40]
        return Benchmark.model_validate(
            {
                "name": name if name[:1].isalpha() else f"rows_{name}"[:40],
                "description": f"Rows of {file}, scored by {self.grader}.",
                "license": "that of the file",
                "rows": {"file": file if "://" in file else str(Path(file).resolve())},
                "map": self.map,
                "prompt": prompt,
                "environment": {"type": "graded", "function": f"{Path(path).resolve()}:{function}"},
            }
        )

"""Rollouts in the formats of trainers and tools: `export` streams, `FORMATS` lists them.

report = export(rollouts, "verl", "train.parquet")
report.read, report.exported, report.dropped     # each dropped rollout has a reason
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from gym_serve.graph.spec import nearest
from gym_serve.interop.export.chat_messages import (
    openrlhf_rollout,
    openrlhf_schema,
    sft_record,
    trl_records,
    trl_schema,
)
from gym_serve.interop.export.files import (
    Dropped,
    ExportReport,
    Records,
    Sink,
    each,
    json_files,
    json_lines,
    parquet,
    whole,
)
from gym_serve.interop.export.token_data import nemo_rl_record, verl_records, verl_schema
from gym_serve.interop.export.traces import atif_trajectory, verifiers_episode
from gym_serve.training.rollout import NotExportable, Rollout
from gym_serve.types.errors import BadRequest, Conflict, InvalidRequest
from gym_serve.types.requests import JSON, in_our_words

__all__ = ["FORMATS", "Dropped", "ExportReport", "Exporter", "NotExportable", "Rollout", "export"]


@dataclass(frozen=True)
class Exporter:
    """A format that rollouts can be written in."""

    name: str
    summary: str
    records: Records
    sink: Sink

    @property
    def suffix(self) -> str:
        """Of the output's name; empty for a folder."""
        return self.sink.suffix

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        """The keyword options of this format, by name, with their annotations and defaults."""
        parameters = inspect.signature(self.records).parameters
        return {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}

    def check(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Options of this format, converted to their types. Raises InvalidRequest: there is no such option,
        or its value has another type.
        """
        types, checked = get_type_hints(self.records), {}
        for name, value in options.items():
            if name not in self.options:
                hint = nearest(name, self.options)
                raise InvalidRequest(f"the {self.name} format has no option {name!r}{hint}")
            try:
                checked[name] = TypeAdapter(types[name]).validate_python(value)
            except ValidationError as error:
                problem = in_our_words(error.errors()[0]["msg"])
                raise InvalidRequest(f"option {name} {problem}, got {value!r}") from None
        return checked


_ALL = (
    ("verl", "verl: RLHFDataset and MultiTurnSFTDataset", verl_records, parquet(verl_schema)),
    ("nemo_rl", "NeMo RL: message logs with training tokens", each(nemo_rl_record), json_lines),
    ("openrlhf", "OpenRLHF: RL prompts or SFT", each(openrlhf_rollout), parquet(openrlhf_schema)),
    ("trl", "TRL (datasets): SFT or tokens", trl_records, parquet(trl_schema)),
    ("sft", "SFT conversations in OpenAI's format", each(sft_record), json_lines),
    ("atif", "ATIF trajectories of Harbor", whole(atif_trajectory), json_files("trajectory_id")),
    ("verifiers", "verifiers 0.4: traces.jsonl", whole(verifiers_episode, has_mask=True), json_lines),
)

FORMATS: dict[str, Exporter] = {entry[0]: Exporter(*entry) for entry in _ALL}  # every format, by name


def export(
    rollouts: Iterable[JSON],
    format: str,
    path: str | Path,
    *,
    min_reward: float | None = None,
    overwrite: bool = False,
    **options: Any,
) -> ExportReport:
    """Write rollouts (lines of a rollout file) in a format of a trainer or a tool; see `Exporter.options`.

    They are read once and in order, and memory does not grow with their number. The output appears when it is
    complete. Rollouts below ``min_reward`` are left out; ``overwrite`` replaces a file, never a folder with
    something in it. Returns the account. Raises InvalidRequest: no such format or option, or a package is
    missing; Conflict: there is something at ``path``; BadRequest: ``path`` cannot be written.
    """
    exporter = FORMATS.get(format)
    if exporter is None:
        raise InvalidRequest(f"there is no format {format!r}{nearest(format, FORMATS)}")
    checked = exporter.check(options)
    path = Path(path)
    _check_place(path, overwrite)
    report = ExportReport(format, str(path))
    chosen = report.reading(rollouts, min_reward)
    try:
        with exporter.sink.open(path, report) as write:
            for record in exporter.records(chosen, report, **checked):
                write(record)
    except OSError as error:
        raise BadRequest(f"the export to {path} failed: {error.strerror or error}") from error
    return report


def _check_place(path: Path, overwrite: bool) -> None:
    """Refuse to replace what was not meant: a file without consent, a full folder, or a device."""
    if path.is_dir():
        if any(path.iterdir()):
            raise Conflict(f"the folder {path} is not empty; choose another path, or remove it")
    elif path.exists() and not (overwrite and path.is_file()):
        advice = "or overwrite it" if path.is_file() else "it is not a regular file"
        raise Conflict(f"{path} exists; choose another path, {advice}")

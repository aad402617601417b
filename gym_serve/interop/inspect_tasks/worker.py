"""A worker process of `InspectTasks`: scores an answer by the solver and the scorer of a task of Inspect.

It has no network and needs no data set: whatever a task loads is the sample that is scored.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypedDict

import inspect_ai.dataset
from inspect_ai.dataset import MemoryDataset, Sample

from gym_serve.interop.inspect_tasks.tasks import load, scores
from gym_serve.types.errors import GymError


class Scored(TypedDict):
    """The result."""

    metrics: dict[str, float]  # by scorer, the task's first one first
    invalid: str | None  # why nothing can be scored


_LOADERS = ("csv_dataset", "example_dataset", "file_dataset", "hf_dataset", "json_dataset")
_held: list[Sample] = []


def warm_up() -> None:
    """Let every task, when it is imported, find loaders that give the sample."""
    for loader in _LOADERS:
        setattr(inspect_ai.dataset, loader, lambda *arguments, **options: MemoryDataset(list(_held)))


def work(request: tuple[str, dict[str, Any], str]) -> Scored:
    """Score an answer to a sample of a task."""
    name, content, text = request
    sample = Sample.model_validate(content)
    _held[:] = [sample]
    try:
        return {"metrics": asyncio.run(scores(load(name), sample, text)), "invalid": None}
    except GymError as error:
        return {"metrics": {}, "invalid": f"inspect:{name}: {error.message}"}

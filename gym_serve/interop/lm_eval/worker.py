"""A worker process of `LmEval`: scores an answer by the filters and the metrics of a task of lm-eval.

It has no network and needs no data set: a task is built over the document that is scored, which its
`process_docs` has seen already.
"""

from __future__ import annotations

from typing import Any, TypedDict

import datasets
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

from gym_serve.interop.lm_eval.tasks import manager_of, stops_of, task_files


class Scored(TypedDict):
    """The result."""

    metrics: dict[str, float]  # by name and filter, ``exact_match,strict-match``; the task's first one first
    invalid: str | None  # why the task scores no answer


def warm_up() -> None:
    """Find the files of lm-eval's tasks; importing it has taken longer."""
    task_files()


def work(request: tuple[str, str | None, dict[str, Any], str]) -> Scored:
    """Score an answer to a document of a task."""
    name, include_path, doc, text = request
    task = _task(name, include_path, doc)
    metrics: dict[str, float] = {}
    instance = Instance(
        request_type="generate_until", doc=doc, arguments=("", {}), idx=0, metadata=(name, 0, 1)
    )
    # As lm-eval's engines do: not every endpoint ends an answer where the task says so.
    for stop in stops_of(task):
        text = text.partition(stop)[0]
    instance.resps = [text]
    for ensemble in task._filters:
        ensemble.apply([instance])
        for metric, value in task.process_results(doc, [instance.filtered_resps[ensemble.name]]).items():
            if isinstance(value, bool | int | float):
                metrics[f"{metric},{ensemble.name}"] = float(value)
    invalid = None if metrics else f"{name} has no metric of one answer: its metrics are of a whole run"
    return {"metrics": metrics, "invalid": invalid}


_tasks: dict[str, Any] = {}


def _task(name: str, include_path: str | None, doc: dict[str, Any]) -> Any:
    if name not in _tasks:
        download = ConfigurableTask.download
        ConfigurableTask.download = lambda task, *arguments, **options: _hold(task, doc)
        try:
            _tasks[name] = manager_of(name, include_path).load(name)["tasks"][name]
        finally:
            ConfigurableTask.download = download
    return _tasks[name]


def _hold(task: Any, doc: dict[str, Any]) -> None:
    """Give a task a data set of one document."""
    splits = {getattr(task.config, f"{kind}_split") for kind in ("training", "validation", "test", "fewshot")}
    one = datasets.Dataset.from_list([doc])
    task.dataset = datasets.DatasetDict({split: one for split in splits if split})
    task.config.process_docs = task.fewshot_cfg.process_docs = None

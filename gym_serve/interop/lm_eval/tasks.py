"""Rows of lm-eval's tasks, by its own code: documents, few-shot examples and chat turns."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from lm_eval import tasks as shipped
from lm_eval.tasks import TaskManager

from gym_serve.types.errors import InvalidRequest, Unavailable
from gym_serve.types.requests import JSON

_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "max_gen_toks": "max_output_tokens"}
_MAX_TOKENS = (
    1280  # of an answer, where the task says nothing; lm-eval's API models have 256, which cuts reasoning
)


_TASK = re.compile(r"""^["']?task["']?:[ \t]*(["']?)([^"'\s#\[{]+)\1[ \t]*(?:#.*)?$""", re.MULTILINE)


def manager_of(name: str, include_path: str | None) -> TaskManager:
    """A manager that knows a task, and those in its folder; of a group, a tag or no task, one that knows all.

    lm-eval parses its 14,000 files for one that knows all, which takes several seconds.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    file = (task_files(include_path) if include_path else task_files()).get(name)
    if file and name in (manager := _manager(str(file.parent), include_defaults=False)).all_tasks:
        return manager
    return _manager(include_path)


@lru_cache
def _manager(include_path: str | None, *, include_defaults: bool = True) -> TaskManager:
    return TaskManager(include_path=include_path, include_defaults=include_defaults)


@lru_cache
def task_files(folder: str = str(Path(shipped.__file__).parent)) -> dict[str, Path]:
    """The files that tasks are in, by name; of two with the same name lm-eval takes the first."""
    files: dict[str, Path] = {}
    for path in sorted(Path(folder).glob("**/*.yaml"), key=Path.as_posix):
        if task := _TASK.search(path.read_text("utf-8", "replace")):
            files.setdefault(task[2], path)
    return files


def rows_of(name: str, include_path: str | None = None) -> Iterator[JSON]:
    """The rows of a task, a group or a tag. Raises InvalidRequest: there is none, or one is not generative;
    Unavailable: its data set cannot be loaded."""
    manager = manager_of(name, include_path)
    if name not in manager.all_tasks:
        raise InvalidRequest(f"lm-eval has no task {name!r}")
    try:
        tasks = manager.load(name)["tasks"]
    # A data set that cannot be loaded raises one of many classes, of several packages.
    except Exception as error:
        raise Unavailable(f"lm_eval:{name} cannot be loaded: {' '.join(str(error).split())[:300]}") from None
    likelihood = [one for one, task in tasks.items() if task.OUTPUT_TYPE != "generate_until"]
    if likelihood:
        raise InvalidRequest(
            f"lm_eval:{name} compares likelihoods of given answers ({', '.join(likelihood[:3])}): "
            "choose a task whose answers are written"
        )
    for task_name, task in tasks.items():
        for doc in task.eval_docs:
            yield _row(task_name, task, doc)


def stops_of(task: Any) -> list[str]:
    """The texts before which an answer of a task ends."""
    until = (task.config.generation_kwargs or {}).get("until") or []
    return [stop for stop in ([until] if isinstance(until, str) else until) if stop]


def _row(name: str, task: Any, doc: JSON) -> JSON:
    messages = task.fewshot_context(
        doc,
        num_fewshot=task.config.num_fewshot or 0,
        apply_chat_template=True,
        chat_template=lambda messages, add_generation_prompt: json.dumps(messages),
        gen_prefix=task.doc_to_prefix(doc),
    )
    options = task.config.generation_kwargs or {}
    params = {ours: options[theirs] for theirs, ours in _SAMPLING.items() if theirs in options}
    stops = stops_of(task)
    return {
        "responses_create_params": {
            "max_output_tokens": _MAX_TOKENS,
            **params,
            "input": json.loads(messages),
        },
        # `stop` is no parameter of the Responses API; endpoints of Chat Completions take it.
        **({"extra_body": {"stop": stops}} if stops else {}),
        "lm_eval_task": name,
        "doc": json.loads(json.dumps(doc, default=str)),
    }

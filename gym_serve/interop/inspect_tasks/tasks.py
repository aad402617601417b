"""A task of Inspect without its model: its solver runs up to the model's answer, and with it to a score."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

from inspect_ai import Task
from inspect_ai._eval.loader import load_tasks
from inspect_ai._eval.task.util import sample_messages
from inspect_ai._util.registry import is_registry_object, registry_params, registry_unqualified_name
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessage, ChatMessageSystem, ModelName, ModelOutput
from inspect_ai.scorer import Target, value_to_float
from inspect_ai.solver import TaskState, chain

from gym_serve.types.errors import InvalidRequest, Unavailable
from gym_serve.types.requests import JSON

_MODEL = "gym_serve/policy"
_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "max_tokens": "max_output_tokens"}
_FURTHER = {"stop_seqs": "stop", "seed": "seed", "top_k": "top_k"}  # of endpoints of Chat Completions
_OF_THE_CALL = {
    "max_retries",
    "timeout",
    "attempt_timeout",
    "max_connections",
    "adaptive_connections",
    "cache",
}


@lru_cache(maxsize=8)
def load(name: str) -> Task:
    """A task by ``FILE.py@NAME`` or ``PACKAGE/NAME``. Raises InvalidRequest: there is none; Unavailable: it
    or its data set cannot be loaded."""
    try:
        tasks = load_tasks([name])
    # A task is any code, and a data set that cannot be loaded raises one of many classes.
    except Exception as error:
        raise Unavailable(f"inspect:{name} cannot be loaded: {_short(error)}") from error
    if len(tasks) != 1:
        raise InvalidRequest(
            f"inspect:{name} must be one task, FILE.py@NAME or PACKAGE/NAME, got {len(tasks)}"
        )
    return tasks[0]


def refused(task: Task) -> str | None:
    """Why a task cannot be run without Inspect's model loop; None if nothing but its solver may say so."""
    if not task.scorer:
        return "has no scorer"
    judges = [name for name in map(_name, task.scorer) if name.startswith("model_graded")]
    if judges:
        return f"is scored by a model ({', '.join(judges)})"
    if task.sandbox or any(sample.sandbox or sample.files or sample.setup for sample in task.dataset):
        return "needs a sandbox"
    parts = task.solver if isinstance(task.solver, Sequence) else [task.solver]
    if any(is_registry_object(part) and registry_params(part).get("shuffle") for part in parts):
        return "shuffles the choices at random; shuffle them in its data set, with a seed"
    return None


def rows_of(name: str) -> Iterator[JSON]:
    """The rows of a task. Raises InvalidRequest: it cannot be run without Inspect's model loop."""
    task = load(name)
    if problem := refused(task):
        raise InvalidRequest(f"inspect:{name} {problem}")
    with ThreadPoolExecutor(1) as thread:  # with an event loop of its own, whatever runs in the caller's
        for sample in task.dataset:
            stand_in = Asked("")
            try:
                thread.submit(asyncio.run, solved(task, sample, stand_in)).result()
            except Exception as error:  # the task's own code
                problem = f"its solver does not run by itself: {_short(error)}"
                raise InvalidRequest(f"inspect:{name}: {problem}") from error
            if stand_in.problem:
                raise InvalidRequest(f"inspect:{name}: its solver {stand_in.problem}")
            params, further = _sampling(
                name, {**task.config.model_dump(exclude_none=True), **stand_in.options}
            )
            yield {
                "responses_create_params": {**params, "input": list(map(_item, stand_in.messages))},
                **({"extra_body": further} if further else {}),
                "inspect_task": name,
                "sample": sample.model_dump(mode="json", exclude_none=True),
            }


class Asked:
    """In place of the model: remembers what it was asked, and gives a completion."""

    def __init__(self, completion: str) -> None:
        self.messages: list[ChatMessage] = []
        self.options: JSON = {}
        self.problem: str | None = "asks no model"
        self._completion = completion
        self._times = 0

    async def __call__(
        self, state: TaskState, tool_calls: str = "loop", cache: Any = None, **options: Any
    ) -> TaskState:
        self._times += 1
        self.problem = "asks the model more than once" if self._times > 1 else None
        if state.tools:
            self.problem = "has tools"
        self.messages, self.options = (
            list(state.messages),
            {k: v for k, v in options.items() if v is not None},
        )
        state.output = ModelOutput.from_content(_MODEL, self._completion)
        state.messages.append(state.output.message)
        return state


async def solved(task: Task, sample: Sample, stand_in: Asked) -> TaskState:
    """The state in which a task's solver leaves a sample."""
    messages = sample_messages(sample)
    if task.config.system_message:
        messages.insert(0, ChatMessageSystem(content=task.config.system_message))
    state = TaskState(
        model=ModelName(_MODEL),
        sample_id=sample.id or 0,
        epoch=1,
        input=sample.input,
        messages=messages,
        target=Target(sample.target),
        choices=sample.choices,
        metadata=dict(sample.metadata or {}),
    )
    setup = [] if task.setup is None else task.setup if isinstance(task.setup, list) else [task.setup]
    return await chain(*setup, task.solver)(state, stand_in)


async def scores(task: Task, sample: Sample, completion: str) -> dict[str, float]:
    """The scores of a completion, by scorer, and by key where one gives several. Raises InvalidRequest: the
    solver asks for more, or a score is no number."""
    stand_in = Asked(completion)
    state = await solved(task, sample, stand_in)
    if stand_in.problem:
        raise InvalidRequest(f"its solver {stand_in.problem}")
    metrics: dict[str, float] = {}
    for scorer in task.scorer or []:
        name, score = _name(scorer), await scorer(state, Target(sample.target))
        if score is None or isinstance(score.value, list):
            raise InvalidRequest(f"its scorer {name} gives no number, but {score}")
        values = score.value if isinstance(score.value, dict) else {"": score.value}
        for key, value in values.items():
            metrics[f"{name}/{key}" if key else name] = value_to_float()(value if value is not None else 0)
    return metrics


def _short(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _name(part: Any) -> str:
    return registry_unqualified_name(part) if is_registry_object(part) else type(part).__name__


def _sampling(name: str, options: JSON) -> tuple[JSON, JSON]:
    params = {ours: options[theirs] for theirs, ours in _SAMPLING.items() if theirs in options}
    further = {ours: options[theirs] for theirs, ours in _FURTHER.items() if theirs in options}
    if unknown := options.keys() - _SAMPLING.keys() - _FURTHER.keys() - _OF_THE_CALL - {"system_message"}:
        raise InvalidRequest(f"inspect:{name}: sets {', '.join(sorted(unknown))} of generate: not supported")
    return params, further


def _item(message: ChatMessage) -> JSON:
    if isinstance(message.content, str) or message.role != "user":
        return {"role": message.role, "content": message.text}
    return {"role": "user", "content": [_part(part) for part in message.content]}


def _part(part: Any) -> JSON:
    if part.type == "text":
        return {"type": "input_text", "text": part.text}
    if part.type == "image" and part.image.startswith(("data:", "http")):
        return {"type": "input_image", "image_url": part.image, "detail": part.detail}
    raise InvalidRequest(f"a message has a part of type {part.type!r}; texts and images by URL can be asked")

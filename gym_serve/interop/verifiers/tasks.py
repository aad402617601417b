"""`Tasks`: a taskset, its tasks as rows, and rollouts scored by them. All that imports `verifiers` is here.

A row holds its task's data (``verifier_metadata.task``), so that any replica can make the task again and
score a rollout, also one that was stored. The trace that rewards look at is the one that
`gym_serve.interop.export` writes for verifiers. Rewards are computed without a runtime, as verifiers' own
replay does; a task whose rewards need one would be scored without them, and is refused instead. So is one
without rewards: an `Env` with agents of its own gives them (a game, several agents), and is not run here.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any

from gym_serve.interop.export.rollout import Rollout
from gym_serve.interop.export.verifiers import verifiers_episode
from gym_serve.types.errors import GraphError, InvalidRequest
from gym_serve.types.protocols import chat_to_params
from gym_serve.types.requests import JSON

__all__ = ["Tasks"]

_NONE = "which verifiers has and gym_serve has not"


class Tasks:
    """A taskset.

    Args:
        taskset: import path of its class, ``package.module:Class``, or the id of an installed taskset.
        settings: fields of its config.

    Raises:
        GraphError: verifiers is not installed, there is no such taskset, its settings do not fit, or its
            tasks need a runtime, or have no rewards.
    """

    def __init__(self, taskset: str, settings: Mapping[str, Any]) -> None:
        try:
            self._vf = importlib.import_module("verifiers.v1")
            self._loaders = importlib.import_module("verifiers.v1.utils.loaders")
            self._generic = importlib.import_module("verifiers.v1.utils.generic")
            self._state = importlib.import_module("verifiers.v1.state")
        except ImportError as error:
            raise GraphError(
                f"a taskset of verifiers needs verifiers 0.4, on Python 3.11 or later ({error}); "
                "pip install verifiers==0.4.0 in an environment of its own (docs/foreign-environments.md)"
            ) from None
        try:
            cls = self._class(taskset)
            config = self._generic.concrete_type(cls, self._vf.TasksetConfig) or self._vf.TasksetConfig
            self.taskset: Any = cls(config.model_validate(dict(settings)))
        except Exception as error:
            raise GraphError(f"taskset: {taskset}: {type(error).__name__}: {error}") from error
        self.task_class: Any = cls.task_type()
        self._data_class: Any = self.task_class.data_type()
        self._trace_class: Any = self._vf.Trace[
            self._data_class, self._state.state_cls(self.task_class), self._vf.AgentConfig
        ]
        if problems := list(self._problems()):
            raise GraphError(problems, source=taskset)

    def rows(self) -> Iterator[JSON]:
        """The tasks as rows, in their order; without end where the taskset has none."""
        for task in self.taskset:
            data = task.data.model_dump(mode="json", exclude_defaults=True)
            yield {
                "responses_create_params": {"input": _prompt(data)},
                "verifier_metadata": {"task": data},
            }

    def task(self, row: Mapping[str, Any]) -> Any:
        """The task of a row.

        Raises:
            InvalidRequest: the row holds none.
        """
        metadata = row.get("verifier_metadata")
        data = metadata.get("task") if isinstance(metadata, Mapping) else None
        try:
            return self.task_class(self._data_class.model_validate(data), self.taskset.config.task)
        except ValueError as error:
            raise InvalidRequest(f"verifier_metadata.task: {error}") from None

    async def score(self, row: JSON, response: JSON, state: Any = None) -> JSON:
        """Score a rollout.

        Args:
            row: the row.
            response: what the agent did.
            state: the state that the tools left; None for a fresh one.

        Returns:
            ``reward``, ``reward_components`` and the metrics by name.

        Raises:
            InvalidRequest: the row holds no task, or verifiers has no form for the rollout.
            Exception: whatever a reward raises.
        """
        task = self.task(row)
        episode = verifiers_episode(Rollout.read({**row, "response": response, "reward": 0.0}))
        recorded = {**episode["traces"][0], "rewards": {}, "metrics": {}}
        recorded["task"] = {"type": type(task).__name__, "data": task.data.model_dump(), "key": task.key}
        recorded["agent"] = {**recorded["agent"], "config": {}}
        trace = self._trace_class.model_validate(recorded)
        if state is not None:
            trace.state = state
        await task.score(trace, None)
        rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return {**metrics, "reward": trace.reward, "reward_components": rewards}

    def toolsets(self) -> list[Any]:
        """The toolsets of one rollout, constructed."""
        shared = type(self.taskset).toolsets(self.taskset.config)
        return [*shared, *self.task_class.toolsets(self.taskset.config.task)]

    def _class(self, taskset: str) -> Any:
        if ":" not in taskset:
            return self._loaders.taskset_class(taskset)
        module, _, attributes = taskset.partition(":")
        return reduce(getattr, attributes.split("."), importlib.import_module(module))

    def _problems(self) -> Iterator[str]:
        cls, base = self.task_class, self._vf.Task
        if cls.NEEDS_CONTAINER:
            yield f"{cls.__name__} needs a container, {_NONE}"
        for hook in ("setup", "finalize"):
            if getattr(cls, hook) is not getattr(base, hook):
                yield f"{cls.__name__}.{hook} needs a runtime, {_NONE}"
        # Hooks are found on an instance, and need no data.
        task = cls.__new__(cls)
        task.config = self.taskset.config.task
        if not task.hooks("reward") and not task.config.judges:
            yield f"{cls.__name__} has no rewards: an Env of verifiers gives them, {_NONE}"
        for kind in ("metric", "reward"):
            for function in task.hooks(kind):
                name, parameter = function.__name__, inspect.signature(function).parameters.get("runtime")
                if parameter is not None and parameter.default is inspect.Parameter.empty:
                    yield f"the {kind} {name} needs a runtime, {_NONE}"


def _prompt(data: JSON) -> list[JSON]:
    """A task's prompt as input items."""
    prompt = data.get("prompt") or []
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system := data.get("system_prompt"):
        messages = [{"role": "system", "content": system}, *messages]
    items: list[JSON] = chat_to_params({"messages": messages})["input"]
    return items

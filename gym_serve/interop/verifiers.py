"""Tasksets of verifiers 0.4 as environments: tasks as rows, rewards as the verifier, toolsets as tools.

    resources:
      quiz: {type: verifiers, taskset: "my_package.quiz:QuizTaskset", config: {split: train}}

    python -m gym_serve.interop.verifiers my_package.quiz:QuizTaskset '{"split": "train"}' > rows.jsonl

A row holds its task's data (``verifier_metadata.task``), so any replica can score a rollout, also a stored
one. Rewards get the trace that `gym_serve.interop.export` writes, and no runtime: a task whose rewards need
one is refused, and so is a task without rewards, whose `Env` scores its own agents.

A session is one rollout's toolsets, in this process; rewards get a toolset's state as the trace's. Several
toolsets with a state are refused: verifiers shares it between processes. A failing tool is a tool output for
the model; a failing reward is a failure of the verifier, never a reward of 0.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import Any, ClassVar, Literal

from pydantic import Field

from gym_serve.interop.export.traces import verifiers_episode
from gym_serve.servers import Operation, Reply, ResourcesServer, VerifyRequest
from gym_serve.servers.tools import ToolDescription, is_tool_name
from gym_serve.servers.transport import encode, text_as_json
from gym_serve.training.rollout import Rollout
from gym_serve.types.errors import GraphError, InvalidRequest, NotFound, SessionNotFound, ToolFailed
from gym_serve.types.protocols import chat_to_params
from gym_serve.types.requests import JSON

_NONE = "which gym_serve does not provide"


class Tasks:
    """A taskset, by the import path of its class or the id of an installed one. Raises GraphError: verifiers
    is not installed, there is no such taskset, its settings do not fit, or its tasks need a runtime, or have
    no rewards.
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
            cls = resolve_name(taskset) if ":" in taskset else self._loaders.taskset_class(taskset)
            config = self._generic.concrete_type(cls, self._vf.TasksetConfig) or self._vf.TasksetConfig
            self.taskset: Any = cls(config.model_validate(dict(settings)))
        except Exception as error:
            raise GraphError(f"taskset: {taskset}: {type(error).__name__}: {error}") from error
        self.task_class: Any = cls.task_type()
        self._data_class: Any = self.task_class.data_type()
        state = self._state.state_cls(self.task_class)
        self._trace_class: Any = self._vf.Trace[self._data_class, state, self._vf.AgentConfig]
        if problems := list(self._problems()):
            raise GraphError(problems, source=taskset)

    def rows(self) -> Iterator[JSON]:
        for task in self.taskset:
            data = task.data.model_dump(mode="json", exclude_defaults=True)
            yield {"responses_create_params": {"input": _prompt(data)}, "verifier_metadata": {"task": data}}

    def task(self, row: Mapping[str, Any]) -> Any:
        metadata = row.get("verifier_metadata")
        data = metadata.get("task") if isinstance(metadata, Mapping) else None
        try:
            return self.task_class(self._data_class.model_validate(data), self.taskset.config.task)
        except ValueError as error:
            raise InvalidRequest(f"verifier_metadata.task: {error}") from None

    async def score(self, row: JSON, response: JSON, state: Any = None) -> JSON:
        """Score a rollout: ``reward``, ``reward_components`` and the metrics by name. Raises InvalidRequest:
        the row holds no task, or verifiers has no form for the rollout; Exception: whatever a reward raises.
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


class SessionTools:
    """The tools of one rollout. Raises GraphError: two of them have a state."""

    def __init__(self, toolsets: Sequence[Any]) -> None:
        self._toolsets = toolsets
        self._server = importlib.import_module("mcp.server.mcpserver").MCPServer("tools")
        find = importlib.import_module("verifiers.v1.utils.decorators").discover_decorated
        for toolset in toolsets:
            prefix = f"{toolset.server_name}_" if toolset.server_name else ""
            for function in find(toolset, "tool"):
                # Not `Toolset.register`: that fetches the state anew for every call, from another process.
                name = f"{prefix}{getattr(function, 'tool_name', None) or function.__name__}"
                description = (function.__doc__ or "").strip() or None
                self._server.add_tool(function, name=name, description=description)
        plain = importlib.import_module("verifiers.v1.state").State
        states = [toolset.state for toolset in toolsets if type(toolset.state) is not plain]
        if len(states) > 1:
            raise GraphError("two toolsets have a state, which they cannot share here")
        self.state: Any = states[0] if states else None

    async def start(self, data: Any) -> None:
        for toolset in self._toolsets:
            await toolset.setup()
            await toolset.setup_task(data)

    async def described(self) -> list[ToolDescription]:
        return [
            ToolDescription(tool.name, tool.description or "", tool.input_schema)
            for tool in await self._server.list_tools()
            if is_tool_name(tool.name)
        ]

    async def call(self, name: str, arguments: JSON) -> str:
        """The text that a tool answers. Raises NotFound: there is no such tool; ToolFailed: the tool refuses
        its arguments, or failed.
        """
        if all(tool.name != name for tool in await self._server.list_tools()):
            raise NotFound(f"there is no tool {name[:100]!r}")
        try:
            result = await self._server.call_tool(name, arguments)
        except Exception as error:
            raise ToolFailed(f"{name}: {error}") from error
        text = "\n".join(getattr(block, "text", f"[{block.type}]") for block in result.content)
        if result.is_error:
            raise ToolFailed(text)
        return text


class _Rollout:
    def __init__(self) -> None:
        self.tools: SessionTools | None = None


class Verifiers(ResourcesServer):
    """A taskset of verifiers: the reward is the sum of its tasks' weighted rewards."""

    reverify_mode: ClassVar[Literal["stateless", "unsupported", "unknown"]] = "unknown"
    requires: ClassVar[Mapping[str, str]] = {"verifiers": "verifiers==0.4.0"}

    class Config(ResourcesServer.Config):
        """Settings of the environment; all are read at the start only."""

        taskset: str = Field(pattern=r"^[A-Za-z_][\w./-]*(:[A-Za-z_][\w.]*)?$")
        """Import path of the taskset's class, ``package.module:Class``, or the id of an installed taskset."""
        config: dict[str, Any] = Field(default_factory=dict)
        """The taskset's settings."""

    config: Config

    Session = _Rollout

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._tasks: Tasks | None = None
        self._tools: list[ToolDescription] = []

    async def start(self) -> None:
        self._tasks = await asyncio.to_thread(Tasks, self.config.taskset, self.config.config)
        self._tools = await SessionTools(self._tasks.toolsets()).described()
        await super().start()

    async def seed(self, row: JSON, session: _Rollout) -> JSON:
        """Set up the rollout's toolsets. Returns ``tools``, for agents whose row brings none. Raises
        InvalidRequest: the row holds no task of the taskset.
        """
        assert self._tasks is not None  # started
        data = self._tasks.task(row).data
        if not self._tools:
            return {}
        session.tools = SessionTools(self._tasks.toolsets())
        await session.tools.start(data)
        return {"tools": [tool.openai() for tool in self._tools]}

    async def verify(self, request: VerifyRequest, session: _Rollout) -> Mapping[str, Any]:
        assert self._tasks is not None  # started
        row = request.model_dump(mode="json", exclude_unset=True)
        state = session.tools.state if session.tools else None
        return await self._tasks.score(row, row.pop("response"), state)

    def operations(self) -> dict[str, Operation]:
        operations = super().operations()
        for tool in self._tools:
            call = partial(self._call, tool.name)
            operations[f"tools/{tool.name}"] = self.described_tool(tool, call, opens=False)
        return operations

    async def _call(self, name: str, session: _Rollout, arguments: JSON) -> Reply:
        if session.tools is None:
            raise SessionNotFound("this session has no row: call /seed_session with one")
        return Reply(200, text_as_json(await session.tools.call(name, arguments)))


def main(taskset: str, settings: str = "{}") -> None:
    """Write the rows of a taskset."""
    for row in Tasks(taskset, json.loads(settings)).rows():
        sys.stdout.buffer.write(encode(row) + b"\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

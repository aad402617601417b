"""OpenEnv's environments, by URL or in process, stepped or called by tools.

    resources:
      chess: {type: openenv, url: "https://openenv-chess-env.hf.space"}
      echo:  {type: openenv, env: "echo_env.server.echo_environment:EchoEnvironment", interface: tools}

By URL nothing has to be installed; in process, it needs ``pip install 'gym-serve[openenv]'``. A session is
one instance, and the reward is the sum of the steps' rewards, also if the steps are tool calls. An invalid
action costs a turn, not the episode; too many of them in a row end it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

import aiohttp
import orjson
from pydantic import BaseModel, Field, PositiveFloat, PositiveInt, SecretStr, TypeAdapter, model_validator
from typing_extensions import Self

from gym_serve.environments.gymnasium import EpisodeState, GymnasiumServer, Step
from gym_serve.grading import code_blocks
from gym_serve.interop.openenv.instances import (
    Instance,
    LocalClasses,
    LocalInstance,
    Outcome,
    RemoteInstance,
    action_schema,
)
from gym_serve.servers import Operation, Reply, VerifyRequest
from gym_serve.servers.base import missing_package
from gym_serve.servers.tools import ToolDescription, is_tool_name
from gym_serve.servers.transport import encode
from gym_serve.types.errors import InvalidRequest, Overloaded, ToolFailed, Unavailable
from gym_serve.types.requests import JSON, parse

_PATH = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"


class _Start(BaseModel):
    seed: int | None = Field(default=None, ge=0)
    options: JSON = Field(default_factory=dict)


class _Row(BaseModel):
    verifier_metadata: _Start | None = None


_ROW: TypeAdapter[_Row] = TypeAdapter(_Row)


class _Episode(EpisodeState):
    """An episode: its instance, and the invalid actions in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.instance: Instance | None = None
        self.invalid = 0


class OpenEnv(GymnasiumServer):
    """An environment of OpenEnv: the reward is the sum of the steps' rewards."""

    class Config(GymnasiumServer.Config):
        """Settings of the environment; all are read at the start only."""

        url: str | None = Field(None, pattern=r"^https?://")
        """Address of a running environment."""
        headers: dict[str, SecretStr] = Field(default_factory=dict)
        """Headers of every connection to it, e.g. ``authorization``."""
        env: str | None = Field(None, pattern=_PATH)
        """Import path of an environment's class, ``package.module:Class``, to run it in the replica."""
        env_kwargs: dict[str, Any] = Field(default_factory=dict)
        """Arguments of that class."""
        action: str | None = Field(None, pattern=_PATH)
        """Import path of the class of its actions; not needed where these are tool calls."""
        interface: Literal["step", "tools"] = "step"
        """Whether the model's text is the action (an environment for `gymnasium_agent`), or the environment
        has tools (an MCP environment; for `simple_agent`)."""
        action_field: str | None = None
        """Field of the action that the model's text is. Without it: the only field that an action needs, if
        that is a text; else the model writes the action as a JSON object."""
        observation_field: str | None = None
        """Field of an observation that the model is shown; all of it by default."""
        max_invalid_actions: PositiveInt = 3
        """Invalid actions in a row that cut an episode short."""
        start_timeout: PositiveFloat = 30.0
        """Maximum number of seconds until the environment has listed its actions or tools."""

        @model_validator(mode="after")
        def _one_environment(self) -> Self:
            if (self.url is None) == (self.env is None):
                raise ValueError("set either `url` or `env`, not both or neither")
            if self.env is not None and self.action is None and self.interface == "step":
                raise ValueError("`action` is missing: the class of the environment's actions")
            return self

    config: Config

    @classmethod
    def preflight(cls, config: Config) -> Iterable[str]:
        yield from super().preflight(config)
        if config.env is not None:
            yield from missing_package("openenv", "gym-serve[openenv]")

    Session = _Episode

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._http: aiohttp.ClientSession | None = None
        self._classes: LocalClasses | None = None
        self._schema: JSON = {}
        self._tools: dict[str, ToolDescription] = {}
        self._open = 0

    async def start(self) -> None:
        config = self.config
        if config.env is not None:
            self._classes = await asyncio.to_thread(LocalClasses, config.env, config.action)
        else:
            self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, connect=30))
        try:
            await asyncio.wait_for(self._discover(), config.start_timeout)
        except BaseException as error:
            await self._end()
            if isinstance(error, asyncio.TimeoutError):
                limit = f"{config.start_timeout:.3g} s"
                raise Unavailable(f"{self.name} did not tell its {config.interface} within {limit}") from None
            raise
        await super().start()

    async def stop(self) -> None:
        await super().stop()
        await self._end()

    async def seed(self, row: JSON, session: Any) -> JSON:
        """Begin an episode. Returns observation and info as `reset` has them, and the ``tools`` for agents
        whose row brings none.
        """
        fields = await super().seed(row, session)
        tools = [tool.openai() for tool in self._tools.values()]
        return {**fields, "tools": tools} if tools else fields

    async def reset(self, row: JSON, session: _Episode) -> tuple[str | None, JSON]:
        """Make an instance, and begin."""
        start = parse(_ROW, row, "row").verifier_metadata or _Start()
        options = start.options if start.seed is None else {**start.options, "seed": start.seed}
        session.instance = self._instance()
        outcome = await session.instance.reset(options)
        text = observation_text(outcome.observation, self.config.observation_field)
        if self._tools:
            return text, {}
        return f"{text}\n\n{how_to_act(self._schema, self._field)}", {}

    async def step(self, request: VerifyRequest, session: _Episode) -> Step:
        assert session.instance is not None  # made by `reset`, which opened the session
        try:
            outcome = await session.instance.step(action_in(request.response.output_text, self._field))
        except InvalidRequest as error:
            session.invalid += 1
            return Step(
                observation=f"That was no action: {error.message}\n\n{how_to_act(self._schema, self._field)}",
                truncated=session.invalid >= self.config.max_invalid_actions,
                info={"invalid_action": True},
            )
        session.invalid = 0
        text = observation_text(outcome.observation, self.config.observation_field)
        return Step(observation=text, reward=outcome.reward, terminated=outcome.done)

    async def close(self, session: _Episode) -> None:
        if session.instance is not None:
            self._open -= 1
            await session.instance.close()

    def operations(self) -> dict[str, Operation]:
        operations = super().operations()
        for name, tool in self._tools.items():
            operations[f"tools/{name}"] = self.described_tool(tool, partial(self._used, name), opens=False)
        return operations

    @property
    def _field(self) -> str | None:
        return self.config.action_field or text_field(self._schema)

    async def _used(self, name: str, session: _Episode, arguments: JSON) -> Reply:
        assert session.instance is not None  # made by `reset`, which opened the session
        outcome = await session.instance.step(
            {"type": "call_tool", "tool_name": name, "arguments": arguments}
        )
        session.total += outcome.reward
        session.last = Step(reward=outcome.reward, terminated=outcome.done)
        result, error = tool_result(outcome.observation)
        if error is not None:
            raise ToolFailed(error)
        return Reply.of(result)

    async def _discover(self) -> None:
        if self.config.interface == "tools":
            instance = self._instance()
            try:
                await instance.reset({})
                self._tools = _tools_of(await instance.step({"type": "list_tools"}), self.name)
            finally:
                self._open -= 1
                await instance.close()
        elif self._classes is not None:
            self._schema = self._classes.action.model_json_schema()
        else:
            self._schema = await action_schema(*self._address())

    def _instance(self) -> Instance:
        if self._classes is not None and self._open and not self._classes.is_concurrent:
            raise Overloaded(f"{self.config.env} runs one episode at a time in a replica")
        self._open += 1
        if self._classes is not None:
            return LocalInstance(self._classes, self.config.env_kwargs)
        return RemoteInstance(*self._address())

    def _address(self) -> tuple[aiohttp.ClientSession, str, dict[str, str]]:
        assert self._http is not None  # started
        assert self.config.url is not None  # checked with the config
        headers = {name: value.get_secret_value() for name, value in self.config.headers.items()}
        return self._http, self.config.url, headers

    async def _end(self) -> None:
        if self._http is not None:
            await self._http.close()


def _tools_of(outcome: Outcome, name: str) -> dict[str, ToolDescription]:
    offered = outcome.observation.get("tools")
    if not isinstance(offered, list) or not offered:
        raise Unavailable(f"the environment of {name} lists no tools: {str(outcome.observation)[:500]}")
    tools = [tool for tool in offered if isinstance(tool, dict) and is_tool_name(str(tool.get("name")))]
    described = (
        ToolDescription(t["name"], t.get("description") or "", t.get("input_schema") or {"type": "object"})
        for t in tools
    )
    return {tool.name: tool for tool in described}


_MAX_ACTION = 1 << 20


def text_field(schema: JSON) -> str | None:
    """The field that a model's text is, if an action needs that one text and nothing else."""
    required = schema.get("required")
    if not isinstance(required, list) or len(required) != 1:
        return None
    field = (schema.get("properties") or {}).get(required[0])
    return required[0] if isinstance(field, dict) and field.get("type") == "string" else None


def action_in(text: str, field: str | None) -> JSON:
    """The action in a model's text: all of it as ``field``, else a JSON object that it is or ends with.
    Raises InvalidRequest: there is none.
    """
    if len(text) > _MAX_ACTION:
        raise InvalidRequest(f"longer than {_MAX_ACTION} characters")
    if field is not None:
        return {field: text}
    blocks = code_blocks(text)
    inner = blocks[-1].content if blocks else text
    try:
        action = orjson.loads(inner.strip())
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"not valid JSON: {error}") from None
    if not isinstance(action, dict):
        raise InvalidRequest("the action must be a JSON object")
    return action


def how_to_act(schema: JSON, field: str | None) -> str:
    """The description of the actions for the model."""
    if field is not None:
        return "Answer with the action alone."
    fields = {name: value for name, value in (schema.get("properties") or {}).items() if name != "metadata"}
    shown = encode({"properties": fields, "required": schema.get("required", [])}).decode()
    return f"Answer with your action, a JSON object of this schema: {shown}"


def observation_text(observation: JSON, field: str | None) -> str:
    """An observation for the model: a field of it, or its only text, or all that is in it as JSON."""
    if field is not None:
        value = observation.get(field, "")
        return value if isinstance(value, str) else encode(value).decode()
    fields = {name: value for name, value in observation.items() if value not in (None, {}, [])}
    rest = {name: value for name, value in fields.items() if name != "metadata"} or fields
    values = list(rest.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else encode(rest).decode()


def tool_result(observation: JSON) -> tuple[Any, str | None]:
    """The result of a tool, and the error if it failed."""
    error, result = observation.get("error"), observation.get("result")
    if isinstance(error, dict):
        return None, str(error.get("message") or error)
    if not isinstance(result, dict) or "content" not in result:
        return result, None
    content = result["content"] if isinstance(result["content"], list) else []
    text = "\n".join(str(block.get("text", "")) for block in content if isinstance(block, dict))
    if result.get("is_error"):
        return None, text
    return text if result.get("data") is None else result["data"], None

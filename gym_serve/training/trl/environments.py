"""`environment_factory`: any environment of a graph for the tool loop of TRL itself.

TRL generates, parses calls and runs tools; the environment keeps sessions and scores. Each tool becomes a
method with annotations and a docstring, as TRL knows tools. `environment_reward` sees the whole completion:
many verifiers score the last answer, which an environment of TRL's own (``get_reward``) does not get to see.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from gym_serve.client import Gym, loop
from gym_serve.servers.clients import EnvironmentClient
from gym_serve.servers.runner import DESCRIBE
from gym_serve.servers.tools import UNAVAILABLE
from gym_serve.training.samples import media_in
from gym_serve.training.trl.rollouts import row_of
from gym_serve.types.endings import is_withheld
from gym_serve.types.errors import GymError, InvalidRequest, NotFound
from gym_serve.types.media import opened, shown_parts
from gym_serve.types.protocols import messages_to_items, new_id
from gym_serve.types.requests import JSON

logger = logging.getLogger("gym_serve")

_TOOLS = "tools/"


def environment_factory(gym: Gym, environment: str) -> Callable[[], Any]:
    """The ``environment_factory`` of a `GRPOTrainer` whose tools are those of an environment of a graph.

    Give the trainer `environment_reward` as its ``reward_funcs``, and `dataset` as its data. The graph needs
    neither model nor agent. Raises `NotFound` if the graph has no such environment, and InvalidRequest: it
    rewards groups of rollouts, which `rollout_func` asks for.
    """
    environments = gym.graph.get("resources") or {}
    if environment not in environments:
        raise NotFound(
            f"no environment {environment!r} in {gym.name}; it has {', '.join(environments) or 'none'}"
        )
    operations: JSON = gym.call(environment, DESCRIBE)
    if "compare" in operations:
        raise InvalidRequest(f"{environment} rewards groups of rollouts: train with rollout_func")
    tools = {op.removeprefix(_TOOLS): each for op, each in operations.items() if op.startswith(_TOOLS)}
    methods = {name: _method(name, each["summary"], each["request"] or {}) for name, each in tools.items()}
    client = EnvironmentClient(gym._core.transport(environment))
    fields = {**methods, "_client": client, "__doc__": f"{environment}."}
    return type(environment, (SessionEnvironment,), fields)


async def environment_reward(
    prompts: Sequence[Any], completions: Sequence[Any], *, environments: Sequence[Any], **columns: Any
) -> list[float | None]:
    """The reward function of a `GRPOTrainer` with `environment_factory`: the environment's verdict; None
    where it failed or masks the sample, which TRL then leaves out."""

    async def verified(environment: SessionEnvironment, completion: Any) -> float | None:
        return await loop.run(environment._verify(completion))

    return await asyncio.gather(*map(verified, environments, completions))


class SessionEnvironment:
    """What `environment_factory` makes: a session at a time, its tools as methods."""

    _client: EnvironmentClient

    def __init__(self) -> None:
        self._row: JSON = {}
        self._session: str | None = None
        self._failure: GymError | None = None

    def reset(self, **example: Any) -> None:
        """Open a session for the row of an example. A failure is no exception, which would end the training,
        but leaves the rollout without a reward. Raises InvalidRequest: the prompt has pictures or sound,
        which `dataset` gives TRL as text."""
        self._row = row_of(example)
        items = self._row["responses_create_params"].get("input")
        for part in media_in(items if isinstance(items, list) else []):
            raise InvalidRequest(f"prompts for TRL must be text, got {part['type']}")
        loop.wait(self._reset())

    async def _reset(self) -> None:
        self._failure = None
        try:
            await self._close()
            self._session, _ = await self._client.seed_session(self._row)
        except GymError as error:
            self._fail(error)

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> str | list[JSON]:
        if self._failure is not None:
            raise self._failure
        try:
            reply = await self._client.call_tool(name, dict(arguments), self._session)
            if reply.status in UNAVAILABLE:
                self._client.decode(reply)
        except GymError as error:
            self._fail(error)
            raise
        self._session = reply.session or self._session
        parts = shown_parts(reply.body)
        return reply.body.decode() if parts is None else list(map(_as_trl_has_it, parts))

    async def _verify(self, completion: Any) -> float | None:
        if self._failure is not None:
            return None
        try:
            verdict = await self._client.verify(self._row, _response(completion), self._session)
        except GymError as error:
            self._fail(error)
            return None
        with suppress(GymError):  # the verdict stands
            await self._close()
        return None if is_withheld(verdict) else float(verdict["reward"])

    async def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await self._client.close_session(session)

    def _fail(self, error: GymError) -> None:
        self._failure = error
        logger.warning("a rollout of %s has no reward: %s", self._client.transport.server, error.message)


def _as_trl_has_it(part: JSON) -> JSON:
    if part["type"] == "input_image":
        return {"type": "image", "image": opened(part["image_url"])}
    return {"type": "text", "text": part["text"]}


def _method(name: str, description: str, schema: JSON) -> Callable[..., Awaitable[str | list[JSON]]]:
    """A tool as a method that TRL can read: annotated, with a docstring in Google's style."""

    async def method(self: SessionEnvironment, **arguments: Any) -> str | list[JSON]:
        return await loop.run(self._call(name, arguments))

    properties: JSON = schema.get("properties") or {}
    required = schema.get("required") or ()
    lines = [f"    {argument}: {_line(schema_of)}" for argument, schema_of in properties.items()]
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
    for argument, schema_of in properties.items():
        default = inspect.Parameter.empty if argument in required else schema_of.get("default")
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(argument, kind, default=default, annotation=_type(schema_of)))
    method.__name__ = method.__qualname__ = name
    method.__doc__ = "\n".join([description, "", *(["Args:", *lines] if lines else [])])
    method.__annotations__ = {p.name: p.annotation for p in parameters[1:]} | {"return": str}
    method.__signature__ = inspect.Signature(parameters, return_annotation=str)  # type: ignore[attr-defined]
    return method


_TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "object": dict,
    "null": type(None),
}


def _type(schema: JSON) -> Any:
    """The annotation of a JSON schema; of what an annotation cannot say, the JSON type is left."""
    if values := schema.get("enum"):
        return Literal[tuple(values)]
    if options := schema.get("anyOf"):
        union = _type(options[0])
        for option in options[1:]:
            union = union | _type(option)
        return union
    if schema.get("type") == "array":
        return list[_type(schema.get("items") or {})]  # type: ignore[misc]
    return _TYPES.get(str(schema.get("type")), Any)


def _line(schema: JSON) -> str:
    return " ".join(str(schema.get("description") or "no description").split())


def _response(completion: Any) -> JSON:
    """What verifiers read, for the messages of a completion."""
    messages: list[JSON] = []
    open_calls: list[str] = []
    for part in completion:
        message = dict(part)
        if message.get("role") == "assistant":
            calls = [{**call, "id": new_id("call")} for call in message.get("tool_calls") or []]
            open_calls = [call["id"] for call in calls]
            message["tool_calls"] = calls
        elif message.get("role") == "tool" and open_calls:
            message["tool_call_id"] = open_calls.pop(0)
        messages.append(message)
    return {"id": new_id("resp"), "object": "response", "output": messages_to_items(messages)}

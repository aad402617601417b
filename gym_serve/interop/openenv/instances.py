"""`Instance`: one environment of OpenEnv, in this process (`LocalInstance`) or by URL (`RemoteInstance`).

Both use OpenEnv's wire format. In process, plain methods run in a thread of the instance's own, always the
same one: some environments (browsers, OpenGL) have to stay in it. By URL, one connection to ``{url}/ws``
serves one episode. Answers have no numbers: a cancelled call would leave its answer to the next one, so its
connection is not used again.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pkgutil import resolve_name
from typing import Any, NamedTuple, Protocol

import aiohttp
import orjson
from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from gym_serve.servers.transport import encode
from gym_serve.types.errors import (
    GraphError,
    GymError,
    InvalidRequest,
    Overloaded,
    SessionLost,
    ToolFailed,
    Unavailable,
)
from gym_serve.types.requests import JSON, problems_of


class Outcome(NamedTuple):
    """The result of a reset or a step."""

    observation: JSON
    reward: float
    done: bool


class Instance(Protocol):
    """An environment with one episode at a time."""

    async def reset(self, options: JSON) -> Outcome:
        """Begin an episode. Raises InvalidRequest, Overloaded, Unavailable."""
        ...

    async def step(self, action: JSON) -> Outcome:
        """Take a step. Raises InvalidRequest: it is no action; ToolFailed: it failed; SessionLost."""
        ...

    async def close(self) -> None: ...


def outcome_of(payload: Any) -> Outcome:
    """A payload of OpenEnv's wire format. Raises Unavailable: it is not such a payload."""
    fields = payload if isinstance(payload, dict) else {}
    observation, reward = fields.get("observation"), fields.get("reward")
    if not isinstance(observation, dict) or not isinstance(reward, int | float | None):
        raise Unavailable(f"the environment returned no observation: {str(payload)[:200]}")
    return Outcome(observation, float(reward or 0.0), bool(fields.get("done")))


class LocalClasses:
    """An environment's classes, imported; without an action class OpenEnv's own, for tools. Raises
    GraphError: OpenEnv is not installed, or a class cannot be imported.
    """

    def __init__(self, env: str, action: str | None) -> None:
        try:
            self.interfaces = importlib.import_module("openenv.core.env_server.interfaces")
            self.serialization = importlib.import_module("openenv.core.env_server.serialization")
            types = importlib.import_module("openenv.core.env_server.types")
        except ImportError as error:
            raise GraphError(
                f"an environment in process needs openenv ({error}); pip install 'gym-serve[openenv]'"
            ) from None
        self.env: Callable[..., Any] = _loaded(env, "env")
        self.action: Any = types.Action if action is None else _loaded(action, "action")

    @property
    def is_concurrent(self) -> bool:
        return bool(getattr(self.env, "SUPPORTS_CONCURRENT_SESSIONS", False))


class LocalInstance(Instance):
    """An environment in this process; it is constructed, with ``settings`` as arguments, when it is reset."""

    def __init__(self, classes: LocalClasses, settings: Mapping[str, Any]) -> None:
        self._classes = classes
        self._settings = settings
        self._env: Any = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="openenv")

    async def reset(self, options: JSON) -> Outcome:
        if self._env is None:
            self._env = await self._in_thread(self._classes.env, **self._settings)
        parameters = inspect.signature(self._env.reset).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            options = {name: value for name, value in options.items() if name in parameters}
        try:
            return self._outcome(await self._run("reset", **options))
        except (TypeError, ValueError) as error:
            what = f"{type(error).__name__}: {error}"
            raise InvalidRequest(f"reset refuses {sorted(options)}: {what}") from error

    async def step(self, action: JSON) -> Outcome:
        try:
            typed = self._classes.serialization.deserialize_action(action, self._classes.action)
        except ValidationError as error:
            raise InvalidRequest("; ".join(problems_of(error, "action"))) from None
        try:
            observation = await self._run("step", typed)
        except Exception as error:
            raise ToolFailed(f"the step failed: {type(error).__name__}: {error}") from error
        return self._outcome(observation)

    async def close(self) -> None:
        try:
            if self._env is not None:
                await self._in_thread(self._env.close)
        finally:
            self._thread.shutdown(wait=False)

    async def _run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The environment's own coroutine function if it has one, else its plain method in its thread."""
        coroutine = getattr(self._env, f"{name}_async")
        base = getattr(self._classes.interfaces.Environment, f"{name}_async")
        if getattr(coroutine, "__func__", None) is not base:
            return await coroutine(*args, **kwargs)
        return await self._in_thread(getattr(self._env, name), *args, **kwargs)

    async def _in_thread(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        work = partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _outcome(self, observation: Any) -> Outcome:
        payload = self._classes.serialization.serialize_observation(observation)
        return outcome_of(to_jsonable_python(payload, fallback=str))


def _loaded(path: str, setting: str) -> Any:
    try:
        return resolve_name(path)
    except Exception as error:
        raise GraphError(f"{setting}: cannot import {path}: {type(error).__name__}: {error}") from error


_MAX_MESSAGE = 100 << 20
_ERRORS: dict[str, type[GymError]] = {
    "INVALID_JSON": InvalidRequest,
    "VALIDATION_ERROR": InvalidRequest,
    "EXECUTION_ERROR": ToolFailed,
    "CAPACITY_REACHED": Overloaded,
}
_DATA = (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY)


class RemoteInstance(Instance):
    """An environment by its URL; it connects when it is reset, and ends with the connection."""

    def __init__(self, http: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> None:
        self._http = http
        self._url = url
        self._headers = headers
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._turn = asyncio.Lock()
        self._lost = False

    async def reset(self, options: JSON) -> Outcome:
        if self._socket is None:
            self._socket = await self._connected()
        return outcome_of(await self._ask("reset", options))

    async def step(self, action: JSON) -> Outcome:
        return outcome_of(await self._ask("step", action))

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.close()

    async def _connected(self) -> aiohttp.ClientWebSocketResponse:
        url = f"{self._url.rstrip('/')}/ws"
        try:
            return await self._http.ws_connect(url, headers=self._headers, max_msg_size=_MAX_MESSAGE)
        except aiohttp.WSServerHandshakeError as error:
            if error.status == 429:
                raise Overloaded(f"{self._url} accepts no further connection") from None
            raise Unavailable(f"{self._url} answered {error.status} to a WebSocket") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"cannot connect to {self._url}: {error}") from None

    async def _ask(self, kind: str, data: JSON) -> Any:
        async with self._turn:
            socket = self._socket
            if socket is None or socket.closed or self._lost:
                raise SessionLost(f"the connection to {self._url} is gone, and the episode with it")
            try:
                await socket.send_str(encode({"type": kind, "data": data}).decode())
                message = await socket.receive()
            except (aiohttp.ClientError, OSError) as error:
                raise SessionLost(f"the connection to {self._url} was lost: {error}") from None
            except asyncio.CancelledError:
                self._lost = True
                raise
        if message.type not in _DATA:
            raise SessionLost(f"{self._url} ended the connection, and the episode with it")
        return self._answer(message.data)

    def _answer(self, text: Any) -> Any:
        try:
            answer = orjson.loads(text)
            kind, data = answer["type"], answer.get("data")
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            raise Unavailable(f"{self._url} does not speak OpenEnv's protocol: {str(text)[:200]!r}") from None
        if kind != "error":
            return data
        data = data if isinstance(data, dict) else {}
        error = _ERRORS.get(str(data.get("code")), Unavailable)
        raise error(f"{self._url}: {str(data.get('message'))[:2000]}")


async def action_schema(http: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> JSON:
    """JSON schema of an environment's actions, from its ``/schema``. Raises Unavailable: it does not."""
    try:
        async with http.get(f"{url.rstrip('/')}/schema", headers=headers) as response:
            body = orjson.loads(await response.read())
            schema = body.get("action") if response.status == 200 and isinstance(body, dict) else None
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError, orjson.JSONDecodeError) as error:
        raise Unavailable(f"{url} gave no schema of its actions: {type(error).__name__}: {error}") from None
    if not isinstance(schema, dict):
        raise Unavailable(f"{url} gave no schema of its actions: HTTP {response.status}")
    return schema

"""`Verifiers`: a taskset of verifiers as an environment; the agent and its loop are gym_serve's.

A session is one rollout's toolsets, if the taskset has any. A tool's failure is told to the model; one of a
reward is a failure of the verifier, never a reward of 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar, Literal

import orjson
from pydantic import Field

from gym_serve.interop.verifiers.tasks import Tasks
from gym_serve.interop.verifiers.tools import SessionTools
from gym_serve.servers import Operation, Reply, ResourcesServer, VerifyRequest
from gym_serve.servers.context import current
from gym_serve.servers.sessions import SessionCall
from gym_serve.servers.transport import encode
from gym_serve.types.errors import InvalidRequest, SessionNotFound
from gym_serve.types.requests import JSON

__all__ = ["Verifiers"]


class _Rollout:
    """The session of a rollout."""

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
        self._tools: list[JSON] = []

    async def start(self) -> None:
        """Load the taskset, and find its tools.

        Raises:
            GraphError: see `Tasks`.
        """
        self._tasks = await asyncio.to_thread(Tasks, self.config.taskset, self.config.config)
        self._tools = await SessionTools(self._tasks.toolsets()).described()
        await super().start()

    async def seed(self, row: JSON, session: _Rollout) -> JSON:
        """Set up the rollout's toolsets.

        Returns:
            ``tools``, for agents whose row brings none.

        Raises:
            InvalidRequest: the row holds no task of the taskset.
        """
        tasks = self._loaded()
        data = tasks.task(row).data
        if not self._tools:
            return {}
        session.tools = SessionTools(tasks.toolsets())
        await session.tools.start(data)
        return {"tools": self._tools}

    async def verify(self, request: VerifyRequest, session: _Rollout) -> Mapping[str, Any]:
        """Score by the task's rewards and metrics."""
        row = request.model_dump(mode="json", exclude_unset=True)
        response = row.pop("response")
        return await self._loaded().score(row, response, session.tools.state if session.tools else None)

    def operations(self) -> dict[str, Operation]:
        operations = super().operations()
        for tool in self._tools:
            handler = self._handler(tool["name"])
            operations[f"tools/{tool['name']}"] = Operation(handler, tool["description"], tool["parameters"])
        return operations

    def _loaded(self) -> Tasks:
        assert self._tasks is not None  # started
        return self._tasks

    def _handler(self, name: str) -> Callable[[Any], Awaitable[Reply]]:
        async def handler(body: Any) -> Reply:
            if not isinstance(body, dict):
                raise InvalidRequest("invalid arguments: a JSON object is meant")
            session_id = current().session
            if session_id is None:
                raise SessionNotFound("no session: seed one, and send the session that it answers")

            async def use(call: SessionCall[_Rollout]) -> Reply:
                tools = call.session.state.tools
                if tools is None:
                    raise SessionNotFound("this session was not seeded with a row")
                return Reply(200, _as_json(await tools.call(name, body)))

            return await self.in_session(session_id, use)

        return handler


def _as_json(text: str) -> bytes:
    """A tool's text as JSON: as it is, if it is JSON already, else as a string."""
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return encode(text)
    return text.encode()

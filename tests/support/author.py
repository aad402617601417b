"""An environment and an agent whose authors made mistakes; the row's `mistake` says which."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from gym_serve import AgentServer, EnvironmentClient, Episode, ModelServer, ResourcesServer, Unavailable
from gym_serve.servers import ModelClient, ServerRunner
from gym_serve.transports import InlineTransport


class Careless(ResourcesServer):
    """Makes the mistake that the row asks for."""

    async def seed(self, row: Any, session: Any) -> None:
        if row["mistake" if "mistake" in row else "prompt"] == "seed":
            session.balance = row["opening"]

    def verify(self, request: Any) -> Any:
        mistake = request.mistake
        if mistake == "busy":
            raise Unavailable("the judge is down")
        if mistake == "exits":
            sys.exit(3)
        if mistake == "stops":
            raise StopIteration
        if mistake == "unspeakable":
            raise _Unspeakable
        if mistake == "helper":
            return _score(request)
        if mistake == "library":
            return json.loads("{")
        return {"nan": float("nan")}.get(mistake)


class _Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError


class Exiting(ResourcesServer):
    """Ends more than its call, in the way that the row asks for."""

    async def seed(self, row: Any, session: Any) -> Any:
        return 5 if row.get("mistake") == "number" else None

    async def verify(self, request: Any) -> Any:
        if request.mistake == "exits":
            sys.exit(3)
        raise asyncio.CancelledError


def _score(request: Any) -> float:
    return 1 / (len(request.response.output) - 1)


class CarelessModel(ModelServer):
    """Makes a mistake, or meets what a service does."""

    class Config(ModelServer.Config):
        lost: bool = False

    config: Config

    async def chat_completions(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.config.lost:
            raise ConnectionResetError("by peer")
        return {"id": 1 + body["messages"][0]["content"]}


class CarelessAgent(AgentServer):
    """Expects something of the model that it does not do."""

    @classmethod
    def over(cls, environment: ResourcesServer) -> CarelessAgent:
        """An agent of an environment; its model is never called."""
        host = ServerRunner(environment)
        return cls(
            model=ModelClient(InlineTransport(host)), resources=EnvironmentClient(InlineTransport(host))
        )

    async def act(self, episode: Episode) -> None:
        episode.items[0]["name"]

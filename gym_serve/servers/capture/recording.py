"""`Recording`: one capture, as the agent sees it that lets a harness work."""

from __future__ import annotations

from typing import Any

from gym_serve.servers.clients import ModelClient
from gym_serve.types.errors import GymError, Unavailable, error_from_body
from gym_serve.types.requests import JSON

__all__ = ["CLOSE", "OPEN", "RECORDED", "TRAJECTORIES", "Recording"]

OPEN = "rollouts"
TRAJECTORIES = "rollouts/trajectories"
CLOSE = "rollouts/close"
RECORDED: JSON = {
    "type": "object",
    "required": ["id", "calls", "unfinished", "trajectories"],
    "properties": {
        "id": {"type": "string"},
        "calls": {"type": "integer", "minimum": 0},
        "unfinished": {"type": "integer", "minimum": 0},
        "trajectories": {"type": "array", "items": {"type": "object"}},
    },
}
"""JSON schema of what was recorded."""


class Recording:
    """A capture at a model server.

    Args:
        model: the server.
        id: the capture.
    """

    def __init__(self, model: ModelClient, id: str) -> None:
        self.id = id
        self.failure: GymError | None = None
        """What the last model call failed with, if it did and the request was not at fault; known once
        `trajectories` were asked for."""
        self._model = model

    @classmethod
    async def open(cls, model: ModelClient) -> Recording:
        """Open one; the model calls in it have the affinity of the current context.

        Raises:
            Unavailable: the server opens none.
            GymError: it could not be reached.
        """
        reply = await model.call(OPEN, {})
        model.decode(reply)
        if reply.session is None:
            raise Unavailable("the model server opened no capture", server=model.transport.server)
        return cls(model, reply.session)

    @property
    def path(self) -> str:
        """Where the harness finds the model, below the graph's address: the protocols' ``/v1``."""
        return f"/{self._model.transport.server}/rollouts/{self.id}/v1"

    async def trajectories(self) -> list[JSON]:
        """What was captured; see `trajectories_of`.

        Raises:
            SessionLost: the replica that held it died.
        """
        answer: Any = await self._model.fetch(TRAJECTORIES, {}, session=self.id)
        if failure := answer.get("failure"):
            self.failure = error_from_body(503, {"error": failure}, server=self._model.transport.server)
            self.failure.stage = "model"
        found: list[JSON] = answer["trajectories"]
        return found

    async def close(self) -> None:
        """Drop it; safe to call twice."""
        await self._model.fetch(CLOSE, {}, session=self.id)

"""`Task`: what a harness is told of its rollout, and `Harness`, a way to start one."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from pydantic import SecretStr

from gym_serve.types.requests import JSON

__all__ = ["Harness", "Task", "masked"]

_SHORTEST_SECRET = 7  # characters; ``none``, for one, is a word like others


class Task(NamedTuple):
    """One rollout, as its harness sees it.

    Attributes:
        row: the row.
        base_url: where the model answers; all calls below it belong to this rollout. Ends with ``/v1``.
        api_key: what the harness authenticates with.
        resources_url: the environment: its tools are ``POST {resources_url}/{tool}``.
        session: id of the session there, sent as ``X-Session-Id``; None for an environment without one.
    """

    row: JSON
    base_url: str
    api_key: SecretStr
    resources_url: str
    session: str | None


class Harness(Protocol):
    """Starts harnesses."""

    async def start(self) -> None:
        """Acquire what is needed; called once, before any task."""
        ...

    async def run(self, task: Task) -> JSON:
        """Let a harness work until it is done; cancelling it ends the harness.

        Returns:
            what it said, for the rollout's field ``harness``.

        Raises:
            GymError: it could not be started, or failed.
        """
        ...

    async def stop(self) -> None:
        """Release it."""
        ...


def masked(text: str, secret: SecretStr) -> str:
    """What a harness said, without a secret."""
    value = secret.get_secret_value()
    return text.replace(value, "***") if len(value) >= _SHORTEST_SECRET else text

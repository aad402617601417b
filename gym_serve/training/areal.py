"""AReaL (1.0): an agent that runs an episode of a graph at the endpoint that AReaL gives it.

    trainer.train(
        workflow="gym_serve.training.areal.GymAgent", workflow_kwargs={"graph": "graphs/weather.yaml"}
    )

The agent returns the reward. A rollout that failed raises `RolloutFailed`, and AReaL rejects the trajectory.
It is not tried again, as the session would hold both attempts.

AReaL's engines are given pictures, but what it trains on has none (``to_tensor_dict`` of
``experimental/openai/types.py``), so rows and rollouts with pictures or sound are refused.

Source: AReaL 1.0, ``api/workflow_api.py`` and ``experimental/openai/proxy/workflow.py``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from gym_serve.client.gym import AsyncGym, Gym
from gym_serve.training.episodes import endpoints_of, refuse_unseen, row_of
from gym_serve.types.errors import InvalidRequest

__all__ = ["GymAgent", "RolloutFailed"]


class RolloutFailed(RuntimeError):
    """A rollout has no reward; says why."""


class GymAgent:
    """Runs an episode for every call, by ``agent`` or the row's, within ``timeout`` seconds."""

    def __init__(
        self,
        graph: Any,
        *,
        model: str = "default",
        agent: str | None = None,
        overrides: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> None:
        self._graph = graph
        self._model = model
        self._overrides = dict(overrides or {})
        self._options: dict[str, Any] = {"agent": agent, "timeout": timeout}
        self._gym: Gym | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the graph: AReaL's processes each run their own."""
        return {**self.__dict__, "_gym": None}

    async def run(self, data: Mapping[str, Any], **extra_kwargs: Any) -> float:
        """The reward of an episode.

        ``data`` is a row of the data set: its column ``row`` as JSON, or one made of ``messages`` or
        ``prompt``; AReaL's ``base_url`` and ``api_key`` are in ``extra_kwargs`` or, in its processes,
        environment variables. Raises `RolloutFailed` for a rollout that must not be trained on.
        """
        if self._gym is None:
            overrides = endpoints_of(self._graph, self._overrides)
            self._gym = Gym.from_graph(self._graph, overrides=overrides, ray=False)
        url = extra_kwargs.get("base_url") or os.environ.get("OPENAI_BASE_URL")
        key = extra_kwargs.get("api_key") or os.environ.get("OPENAI_API_KEY")
        if not url:
            raise InvalidRequest("AReaL gave no `base_url`, and OPENAI_BASE_URL is not set")
        endpoint = {
            "base_url": str(url).rstrip("/"),
            "model": self._model,
            **({"api_key": key} if key else {}),
        }
        row = row_of(data, data.get("messages") or data.get("prompt"))
        refuse_unseen(row, sees=False)
        options = {**self._options, "endpoint": endpoint}
        gym = AsyncGym.of(self._gym)
        (rollout,) = await gym.run([row], attempts=1, max_failures=1, **options)
        if rollout.failure is not None:
            raise RolloutFailed(f"{rollout.failure['kind']}: {rollout.failure['detail']}")
        refuse_unseen(rollout, sees=False)
        if rollout.masked:
            raise RolloutFailed("the environment masked the rollout")
        if await gym.compares(rollout):
            raise RolloutFailed("the environment rewards groups of rollouts, and AReaL asks for single ones")
        return rollout.reward

    def close(self) -> None:
        """Stop the graph; the next call starts it again."""
        if self._gym is not None:
            self._gym.shutdown()
            self._gym = None

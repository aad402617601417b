"""`oracle` and `nop`: agents without a model, which test a benchmark: a solution scores 1, nothing 0."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gym_serve.servers import AgentServer, Episode
from gym_serve.types.requests import JSON


class NopAgent(AgentServer):
    """Does nothing: what the task is worth as it is."""

    async def act(self, episode: Episode) -> None:
        while await episode.next_step():
            pass
        episode.stop("nop")


class OracleAgent(AgentServer):
    """Runs the task's own solution in the task's box (see `gym_serve.environments.workspace`)."""

    stages = (*AgentServer.stages, "solve")

    class Config(AgentServer.Config):
        solve_timeout: float = Field(600.0, gt=0)
        """Deadline of the solution."""

    config: Config

    async def act(self, episode: Episode) -> None:
        solve: Any = self.config.resources.fetch
        going_on = True
        while going_on:
            episode.fields["solution"] = await episode.stage(
                "solve", lambda: solve("solve", {}, session=episode.session)
            )
            going_on = await episode.next_step()
        episode.stop("oracle")

    def _episode(self, row: JSON) -> Episode:
        return super()._episode({**row, "oracle": True})

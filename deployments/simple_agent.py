"""`simple_agent`: call the model, run its tools, until it answers (docs/formats.md, Agents)."""

from __future__ import annotations

from itertools import count
from typing import Any

from pydantic import Field

from gym_serve.metrics import aggregate_metrics
from gym_serve.servers import AgentServer, Episode
from gym_serve.types.requests import JSON


class SimpleAgent(AgentServer):
    """The tool-calling loop."""

    class Config(AgentServer.Config):
        max_steps: int | None = Field(32, ge=0)
        """Model calls per episode at most; 0 and null set no limit, and then ``episode_timeout`` ends what a
        model does not end."""
        max_empty_turns: int = Field(2, ge=0)
        """How often a turn with neither a message nor a call is asked again."""
        parallel_tools: bool = False
        """Run the calls of one turn at the same time; off, because tools may share state."""
        skip_verification: bool = False
        """Do not ask the verifier: each rollout gets ``skip_verification_reward`` and
        ``verification_skipped: true``, and there are no metrics. For rollouts that are scored later."""
        skip_verification_reward: float = Field(0.0, allow_inf_nan=False)
        """The reward of rollouts whose verification is skipped."""

    config: Config

    async def act(self, episode: Episode) -> None:
        empty_turns = 0
        for _ in range(self.config.max_steps) if self.config.max_steps else count():
            turn = await episode.generate()
            if episode.incomplete:
                return
            calls = self.pending(turn)
            if calls:
                await episode.run_tools(calls, parallel=self.config.parallel_tools)
            elif any(item.get("type", "message") == "message" for item in turn):
                if not await episode.next_step():
                    return
            else:
                empty_turns += 1
                if empty_turns > self.config.max_empty_turns:
                    return
        episode.stop("max_steps")

    def _episode(self, row: JSON) -> Episode:
        episode = super()._episode(row)
        episode.verified = not self.config.skip_verification
        return episode

    async def verdict(self, episode: Episode) -> JSON:
        if not self.config.skip_verification:
            return await super().verdict(episode)
        return {"reward": self.config.skip_verification_reward, "verification_skipped": True}

    async def aggregate(self, body: Any) -> Any:
        return aggregate_metrics([]) if self.config.skip_verification else await super().aggregate(body)

    def pending(self, turn: list[JSON]) -> list[JSON]:
        """The calls of a turn that are to be run: all of them, whatever else the policy wrote."""
        return [item for item in turn if item.get("type") == "function_call"]

"""`single_turn_agent`: one model call, and its output is the whole answer.

Tool calls are not run: they are what the verifier scores (as in NeMo Gym's ``non_executing_simple_agent``).
"""

from __future__ import annotations

from gym_serve.servers import AgentServer, Episode


class SingleTurnAgent(AgentServer):
    """One model call; the calls in it are part of the answer and are not run."""

    async def act(self, episode: Episode) -> None:
        await episode.generate()

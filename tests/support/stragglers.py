"""A model and an environment where some rollouts of a group hang, and which notice when they are cancelled.

Which rollout it is, they read from the episode's affinity key, ``"{task}-{rollout}"``: rollout 2 hangs in its
tool, rollout 3 in its model call, and the others answer after two seconds: by then those two hang.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from pydantic import BaseModel

from gym_serve import (
    CompareRequest,
    Comparison,
    ModelServer,
    ResourcesServer,
    Unavailable,
    Verdict,
    VerifyRequest,
    tool,
)
from gym_serve.servers.context import current
from support.scenarios import call, say

Item = dict[str, Any]


def rollout() -> int:
    """Index of the rollout that the current call belongs to."""
    return int((current().affinity or "0-0").split("-")[1])


class StragglingModel(ModelServer):
    """Counts in ``cancelled`` the calls that were cancelled; asked ``"how many"``, it says."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.cancelled = 0

    async def responses(self, body: Item) -> Item:
        if body["input"] == "how many":
            return self._response([say(str(self.cancelled))])
        if body.get("user") == "slow":
            await asyncio.sleep(0.3)
            return self._response([say("done")])
        try:
            if rollout() == 2 and len(body["input"]) == 1:
                return self._response([call("hang", "{}")])
            await asyncio.sleep(600 if rollout() == 3 else 2)
            return self._response([say(f"answer {rollout()}")])
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def _response(self, output: list[Item]) -> Item:
        return {"id": "r", "object": "response", "output": output, "usage": None}


class StragglingEnvironment(ResourcesServer):
    class Session(BaseModel):
        seeded: bool = False

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.cancelled = 0
        self.live = 0

    async def seed(self, row: Item, session: Session) -> None:
        session.seeded = True
        self.live += 1

    async def close(self, session: Session) -> None:
        self.live -= session.seeded

    @tool
    async def hang(self) -> None:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    @tool
    def state(self) -> dict[str, int]:
        """Cancelled tool calls, and the sessions of episodes that are open."""
        return {"cancelled": self.cancelled, "live": self.live}

    async def verify(self, request: VerifyRequest) -> Verdict:
        return Verdict(reward=0.5, pid=os.getpid())

    async def compare(self, request: CompareRequest) -> Comparison:
        if request.principle == "none":
            raise Unavailable("the judge is away")
        answers = [response.last_text for response in request.response_objs]
        return Comparison(rewards=[float(len(answers)), *[0.0] * (len(answers) - 1)], answers=answers)

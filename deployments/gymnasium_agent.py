"""`gymnasium_agent`: reset, then model call and step in turns, until the episode is over.

It drives every server with the routes ``/reset``, ``/step`` and ``/close`` (docs/formats.md, Environments),
also one without ``/verify``: the reward is the sum of the steps' rewards. Observations are user messages
between the model's items in the response's ``output``, as in NeMo Gym.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field, TypeAdapter

from gym_serve.servers import AgentServer, Episode, Reply
from gym_serve.types.errors import NotFound, SessionNotFound, Unavailable
from gym_serve.types.requests import JSON, input_items, parse


class _Reset(BaseModel):
    observation: str | None = None
    info: JSON = Field(default_factory=dict)


class _ToolOutput(BaseModel):
    call_id: str
    output: str


class _Info(BaseModel, extra="allow"):
    tool_outputs: list[_ToolOutput] = Field(default_factory=list)


class _Step(BaseModel):
    observation: str | None = None
    reward: float = Field(0.0, allow_inf_nan=False)
    terminated: bool = False
    truncated: bool = False
    info: _Info = Field(default_factory=_Info)


_RESET: TypeAdapter[_Reset] = TypeAdapter(_Reset)
_STEP: TypeAdapter[_Step] = TypeAdapter(_Step)


class _SteppedEpisode(Episode):
    """An episode with a server that is stepped."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._first: list[JSON] = []
        self._steps: list[_Step] = []

    @property
    def over(self) -> bool:
        return bool(self._steps) and (self._steps[-1].terminated or self._steps[-1].truncated)

    async def seed(self) -> None:
        reply = await self.stage("seed", lambda: self._called("reset", self.row))
        reset = parse(_RESET, self._resources.decode(reply), "answer of /reset")
        self._first = _messages(reset.observation)
        self.append_prompt(self._first)

    async def step(self) -> None:
        """``/step`` with the model's last response; what comes of it is shown to the model."""
        body = {**self.row, "response": self._last}
        reply = await self.stage("tool", lambda: self._called("step", body))
        step = parse(_STEP, self._resources.decode(reply), "answer of /step")
        self._steps.append(step)
        if not self.over:
            outputs = [
                {"type": "function_call_output", "call_id": tool.call_id, "output": tool.output}
                for tool in step.info.tool_outputs
            ]
            self.append_items([*outputs, *_messages(step.observation)])

    async def _called(self, op: str, body: JSON) -> Reply:
        reply = await self._resources.call(op, body, session=self.session)
        if reply.session is not None:
            self.enter(reply.session)
        return reply

    async def verify(self) -> JSON:
        """The sum of the rewards, how the episode ended, and the prompt that the model saw."""
        if not self._steps and "stopped_by" in self.fields:
            return {"reward": 0.0, "reason": "the episode ended before its first step"}
        if not self._steps:
            raise Unavailable("the agent made no step, so there is no reward", stage="verify")
        last = self._steps[-1]
        params: JSON = self.row["responses_create_params"]
        return {
            "responses_create_params": {**params, "input": input_items(params["input"]) + self._first},
            "reward": sum(step.reward for step in self._steps),
            "terminated": last.terminated,
            "truncated": last.truncated or not last.terminated,
            "info": last.info.model_dump(exclude_unset=True),
            "num_steps": len(self._steps),
        }

    async def close(self) -> None:
        session, self.session = self.session, None
        if session is None:
            return
        reply = await self.stage("close", lambda: self._resources.call("close", {}, session=session))
        try:
            self._resources.decode(reply)
        except (NotFound, SessionNotFound):
            return


class GymnasiumAgent(AgentServer):
    """Steps through an episode with the model's responses."""

    class Config(AgentServer.Config):
        """Settings of the loop. A step has the deadline of a tool call, ``tool_timeout``."""

        max_steps: int = Field(10, ge=1)
        """Model calls, and steps, per episode at most."""

    config: Config

    async def act(self, episode: Episode) -> None:
        assert isinstance(episode, _SteppedEpisode)  # `_episode` makes no other
        if episode.session is None:
            await episode.seed()
        for _ in range(self.config.max_steps):
            await episode.generate()
            await episode.step()
            if episode.over:
                return

    def _episode(self, row: JSON) -> Episode:
        return _SteppedEpisode(row, self.policy, self.config.resources, self._timeouts, self._limits)


def _messages(observation: str | None) -> list[JSON]:
    return [{"type": "message", "role": "user", "content": observation}] if observation else []

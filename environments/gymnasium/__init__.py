"""`GymnasiumServer`: environments that are stepped with the model's responses, not called by tools.

`Gymnasium` plays any environment of that library, which is imported when it is first used. Routes are
``/reset``, ``/step`` and ``/close`` (docs/formats.md, Environments); ``/seed_session``, ``/close_session``
and ``/verify`` are there too, so that any agent can finish such an episode.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from gym_serve.servers import Operation, Reply, ResourcesServer, Verdict, VerifyRequest
from gym_serve.servers.context import current
from gym_serve.servers.sessions import SessionCall
from gym_serve.types.errors import Conflict, GymError, SessionNotFound, ToolFailed
from gym_serve.types.requests import JSON, json_of, parse

if TYPE_CHECKING:
    from gym_serve.environments.gymnasium.games import Gymnasium

__all__ = ["EpisodeState", "Gymnasium", "GymnasiumServer", "Step", "StepsVerdict"]


def __getattr__(name: str) -> Any:
    if name != "Gymnasium":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gym_serve.environments.gymnasium.games import Gymnasium

    return Gymnasium


class Step(BaseModel):
    """The result of a step: the five values of Gymnasium's ``step``."""

    observation: str | None = None  # the next message to the model; None for none
    reward: float = 0.0  # reward of this step; the episode's is the sum
    terminated: bool = False  # the episode is over: solved, lost, won
    truncated: bool = False  # the episode was cut short
    info: JSON = Field(default_factory=dict)
    """Anything else; ``tool_outputs: [{call_id, output}]`` become outputs of the model's calls."""


class EpisodeState:
    """The state of an episode; an environment adds its own in a subclass, as its ``Session``."""

    def __init__(self) -> None:
        self.total = 0.0
        self.last: Step | None = None


class StepsVerdict(Verdict):
    """The sum of an episode's rewards, and how it ended."""

    terminated: bool
    truncated: bool  # whether it was cut short, or is not over yet
    info: JSON


class GymnasiumServer(ResourcesServer):
    """Base class of environments that are stepped: write `reset` and `step`; functions run in a thread."""

    reverify_mode: ClassVar[Literal["unsupported"]] = "unsupported"

    Session = EpisodeState

    def reset(self, row: JSON, session: Any) -> Any:
        """Begin an episode. Returns the first observation, or None if the row's prompt has it already; and an
        info.
        """
        return None, {}

    def step(self, request: VerifyRequest, session: Any) -> Any:
        """Take a step: a `Step` for the row and the response of the model's turn. Raises GymError: the step
        failed. A model's mistake is not a failure, but an observation.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step")

    async def seed(self, row: JSON, session: Any) -> JSON:
        observation, info = await _run(self.reset, row, session)
        return {"observation": observation, "info": {**info, "supports_explicit_close": True}}

    async def verify(self, request: VerifyRequest, session: Any) -> StepsVerdict:
        """The sum of the rewards so far."""
        last = session.last or Step()
        return StepsVerdict(
            reward=session.total,
            reason=None if session.total >= 1 else f"the rewards of all steps add up to {session.total:g}",
            terminated=last.terminated,
            truncated=last.truncated or not last.terminated,
            info=last.info,
        )

    def operations(self) -> dict[str, Operation]:
        operations = super().operations()
        seed, verify, close = (operations[name] for name in ("seed_session", "verify", "close_session"))
        answer = {"type": "object", "properties": {"observation": {}, "info": {"type": "object"}}}
        operations["reset"] = Operation(seed.handler, "Begin an episode", seed.request, answer)
        operations["step"] = Operation(
            self._op_step, "Take a step", verify.request, Step.model_json_schema(mode="serialization")
        )
        operations["close"] = Operation(close.handler, "End an episode", None, {"type": "object"})
        return operations

    async def _op_step(self, body: Any) -> Reply:
        request = parse(self._verify_request, body, "request")
        session_id = current().session
        if session_id is None:
            raise SessionNotFound("no session: call /reset first, and send its session id")

        async def take(call: SessionCall[EpisodeState]) -> Reply:
            state = call.session.state
            if state.last is not None and (state.last.terminated or state.last.truncated):
                raise Conflict("the episode is over: call /reset for another one")
            try:
                step = Step.model_validate(await call.run(self.step, request, state))
            except (GymError, asyncio.CancelledError, asyncio.TimeoutError):
                raise
            except Exception as error:
                raise ToolFailed(f"the step failed: {type(error).__name__}: {error}") from error
            state.total += step.reward
            state.last = step
            return Reply.of(json_of(step))

        return await self.in_session(session_id, take)


async def _run(method: Callable[..., Any], *args: Any) -> Any:
    if inspect.iscoroutinefunction(method):
        return await method(*args)
    return await asyncio.to_thread(method, *args)


_TRAIN = 1_000_000  # the first seed of rows to train on: no test has that many


def benchmark_rows(split: str, *, size: int) -> Iterator[dict[str, Any]]:
    """Rows of a benchmark: games by their seed."""
    first = _TRAIN if split == "train" else 0
    for seed in range(first, first + size):
        yield {
            "responses_create_params": {
                "input": [{"role": "user", "content": "Play one game. Think before each move."}]
            },
            "verifier_metadata": {"seed": seed},
        }

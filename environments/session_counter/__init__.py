"""`SessionCounter`: a counter per episode, and two tools; the verifier checks the session alone."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, TypeAdapter

from gym_serve.servers import ResourcesServer, Verdict, VerifyRequest, tool
from gym_serve.types.errors import ToolFailed
from gym_serve.types.requests import JSON, parse

_LIMIT = 2**63  # without one, a number could grow that no JSON parser takes


class _Start(BaseModel):
    initial_count: int


_START: TypeAdapter[_Start] = TypeAdapter(_Start)


class Incremented(BaseModel):
    """What `SessionCounter.increment_counter` answers."""

    success: bool


class CounterValue(BaseModel):
    """What `SessionCounter.get_counter_value` answers."""

    count: int


class CounterRequest(VerifyRequest):
    """A counter row with the response to it."""

    expected_count: int  # value of the counter at the end of a right episode


class CounterVerdict(Verdict):
    """The reward and what it was given for."""

    final_count: int | None  # value of the counter at the end; None if the session never had one


class SessionCounter(ResourcesServer):
    """A counter: reward 1.0 if it ends at the row's ``expected_count``, else 0.0."""

    reverify_mode: ClassVar[Literal["unsupported"]] = "unsupported"
    restorable: ClassVar[bool] = True

    class Session(BaseModel):
        count: int | None = None  # the counter; a tool that is called without a seeded session starts it at 0

    async def seed(self, row: JSON, session: Any) -> None:
        """Set the counter to the row's ``initial_count``, unless a tool has started it."""
        start = parse(_START, row, "row").initial_count
        session.count = start if session.count is None else session.count

    @tool
    async def increment_counter(self, count: int, session: Session) -> Incremented:
        """Add a number to the counter.

        Args:
            count: What to add; may be negative.
        """
        total = (session.count or 0) + count
        if not -_LIMIT <= total < _LIMIT:
            raise ToolFailed("the counter would exceed 64 bits")
        session.count = total
        return Incremented(success=True)

    @tool
    async def get_counter_value(self, session: Session) -> CounterValue:
        """Get the value of the counter."""
        session.count = session.count or 0
        return CounterValue(count=session.count)

    async def verify(self, request: CounterRequest, session: Session) -> CounterVerdict:
        right = session.count == request.expected_count
        reason = None if right else f"the counter should be {request.expected_count}, and is {session.count}"
        return CounterVerdict(reward=float(right), reason=reason, final_count=session.count)

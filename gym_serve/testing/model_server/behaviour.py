"""`Behaviour`: what the model server says, how long it takes, and how it fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from gym_serve.types.errors import InvalidRequest

__all__ = ["FAULTS", "Behaviour", "Fault"]

Fault = Literal["overloaded", "error", "garbage", "hang", "drop"]
"""A failure: a 429 with ``Retry-After``, a 500, a 200 that is no JSON, no answer at all, or a connection
that is closed instead of an answer."""

FAULTS: tuple[Fault, ...] = get_args(Fault)


@dataclass(frozen=True)
class Behaviour:
    """What the model does in every episode.

    Attributes:
        turns: how many turns call tools, before the one that answers.
        calls_per_turn: tool calls in each of them.
        tool: name of the tool.
        arguments: of every call, a JSON object as text.
        answer: text of the final message.
        tokens: tokens that each turn generates; as many stand in the next prompt for what the tools said.
            0 sends no token ids.
        latency_ms: milliseconds between a request and its answer.
        token_latency_ms: milliseconds between two tokens of a stream; a token is a word of ``answer``.
        faults: every how many requests a fault stands in the place of the answer, by its kind; where
            several fall on one request, the first one counts.
    """

    turns: int = 1
    calls_per_turn: int = 1
    tool: str = "get_weather"
    arguments: str = '{"city":"Paris"}'
    answer: str = "That is all."
    tokens: int = 0
    latency_ms: float = 0.0
    token_latency_ms: float = 0.0
    faults: Mapping[Fault, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fine = all(0 <= ms < 1e9 for ms in (self.latency_ms, self.token_latency_ms))
        if self.turns < 0 or self.calls_per_turn < 1 or self.tokens < 0 or not fine:
            raise InvalidRequest("turns, tokens and latencies must be at least 0, calls_per_turn at least 1")
        for kind, every in self.faults.items():
            if kind not in FAULTS or every < 1:
                raise InvalidRequest(f"faults: {kind}={every} is none; meant is {'|'.join(FAULTS)}=N, N >= 1")

    def fault(self, number: int) -> Fault | None:
        """The fault of a request, by its number, counted from 1."""
        for kind, every in self.faults.items():
            if number % every == 0:
                return kind
        return None

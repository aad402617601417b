"""Usage of model calls: tokens by stage of the episode and by model server.

A `UsageMeter` counts the model calls that are made under it (`metering`), wherever in the code: `ModelClient`
records every answer. An agent meters its episode. An environment meters each session and sends the counts to
the agent with the verdict or, without a verdict, when the session is closed, because a judge's tokens belong
to the episode too. A failed call reports no usage and is not counted. A call whose backend reports no usage
is counted as ``unreported``, not as zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeFloat

from gym_serve.types.requests import JSON

__all__ = ["COUNTS", "USAGE_FIELD", "Prices", "UsageMeter", "merge_usage", "metering", "record_usage"]

USAGE_FIELD = "model_usage"
"""Field of a rollout, of a verdict on its way to it, and of a group's comparison: ``{stage: {server: {count:
int}}}``. The stages are those of an episode, and ``compare``."""

COUNTS = ("calls", "unreported", "input_tokens", "cached_tokens", "output_tokens")
"""The counts. ``cached_tokens`` are those of ``input_tokens`` that a cache answered."""

_MILLION = 1_000_000


class Prices(BaseModel):
    """Prices of a model's tokens per million, in any currency."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    input: NonNegativeFloat
    """Price of prompt tokens."""
    cached_input: NonNegativeFloat | None = None
    """Price of prompt tokens that a cache answered; by default that of other prompt tokens."""
    output: NonNegativeFloat
    """Price of generated tokens, reasoning included."""

    def cost(self, counts: Mapping[str, int]) -> float:
        """The cost of some calls, given their `COUNTS`."""
        cached = min(counts["cached_tokens"], counts["input_tokens"])
        cached_input = self.input if self.cached_input is None else self.cached_input
        fresh = counts["input_tokens"] - cached
        return (fresh * self.input + cached * cached_input + counts["output_tokens"] * self.output) / _MILLION


class UsageMeter:
    """Counts of model calls."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], dict[str, int]] = {}

    def __bool__(self) -> bool:
        """Whether anything was counted."""
        return bool(self._counts)

    def record(self, stage: str, server: str, usage: Any, calls: int = 1) -> None:
        """Count calls.

        Args:
            stage: stage of the episode.
            server: name of the model server.
            usage: of all calls together, in the form of Responses or Chat Completions; None if unknown.
            calls: how many.
        """
        told = usage if isinstance(usage, dict) else {}
        given = _count(told, "input_tokens", "prompt_tokens")
        details = told.get("input_tokens_details") or told.get("prompt_tokens_details")
        cached = _count(details if isinstance(details, dict) else {}, "cached_tokens")
        output = _count(told, "output_tokens", "completion_tokens")
        self._add(
            stage,
            server,
            dict(zip(COUNTS, (calls, 0 if told else calls, given, cached, output), strict=True)),
        )

    def merge(self, usage: Any) -> None:
        """Add the counts of another meter, from `to_json`; malformed parts are ignored."""
        for stage, servers in usage.items() if isinstance(usage, dict) else ():
            for server, counts in servers.items() if isinstance(servers, dict) else ():
                if isinstance(counts, dict):
                    self._add(str(stage), str(server), {name: _count(counts, name) for name in COUNTS})

    def to_json(self) -> JSON:
        """The counts by stage and server."""
        found: dict[str, dict[str, dict[str, int]]] = {}
        for (stage, server), counts in self._counts.items():
            found.setdefault(stage, {})[server] = dict(counts)
        return found

    def take(self) -> JSON:
        """Return `to_json` and reset the meter: the counts are added elsewhere."""
        taken = self.to_json()
        self._counts = {}
        return taken

    def __iter__(self) -> Iterator[tuple[str, str, Mapping[str, int]]]:
        """Stage, server and counts, in the order of the first call."""
        for (stage, server), counts in self._counts.items():
            yield stage, server, counts

    def _add(self, stage: str, server: str, counts: Mapping[str, int]) -> None:
        total = self._counts.setdefault((stage, server), dict.fromkeys(COUNTS, 0))
        for name, count in counts.items():
            total[name] += count


_METER: ContextVar[tuple[UsageMeter, str] | None] = ContextVar("gym_serve_meter", default=None)


class metering:
    """Counts the model calls of a ``with`` block under a stage.

    A class, as a generator's context manager costs four times as much, and there are several per rollout.
    """

    __slots__ = ("_current", "_token")

    def __init__(self, meter: UsageMeter, stage: str) -> None:
        self._current = (meter, stage)

    def __enter__(self) -> None:
        self._token = _METER.set(self._current)

    def __exit__(self, *exc_info: object) -> None:
        _METER.reset(self._token)


def record_usage(server: str, usage: Any, calls: int = 1) -> None:
    """Count model calls in the current meter, if there is one."""
    if (current := _METER.get()) is not None:
        meter, stage = current
        meter.record(stage, server, usage, calls)


def merge_usage(usage: Any) -> None:
    """Add the counts of another meter to the current one; see `UsageMeter.merge`."""
    if (current := _METER.get()) is not None:
        current[0].merge(usage)


def _count(counts: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = counts.get(name)
        if type(value) is int and value >= 0:
            return value
    return 0

"""Usage of model calls: tokens by stage of the episode and by model server.

A `UsageMeter` counts the model calls that are made under it (`metering`), wherever in the code. An agent
meters its episode. An environment meters each session and sends the counts to the agent with the verdict or
when the session is closed. A failed call is not counted; one without usage is ``unreported``, not zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat

from gym_serve.observe.timeline import Recorder
from gym_serve.types.errors import InvalidRequest
from gym_serve.types.protocols import Tokens, tokens_of
from gym_serve.types.requests import JSON

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


def read_prices(texts: Iterable[str]) -> dict[str, Prices]:
    """Prices by model, of texts ``MODEL=INPUT/OUTPUT[/CACHED]``, per million tokens. Raises InvalidRequest: a
    text is something else."""
    return dict(map(_read_price, texts))


def _read_price(text: str) -> tuple[str, Prices]:
    name, _, price = text.rpartition("=")
    try:
        numbers = [float(part) for part in price.split("/")]
        output, *cached = numbers[1:]
        if not name or len(cached) > 1:
            raise ValueError
        prices = Prices(input=numbers[0], output=output, cached_input=cached[0] if cached else None)
    except ValueError:  # pydantic's, too
        raise InvalidRequest(
            f"a price must be MODEL=INPUT/OUTPUT or MODEL=INPUT/OUTPUT/CACHED, per million tokens,"
            f" got {text!r}"
        ) from None
    return name, prices


class CostLimit(Prices):
    """A limit of cost, with the prices that it is counted by."""

    most: PositiveFloat
    """The limit, in the currency of the prices."""


class UsageMeter:
    """Counts of model calls; a recorder, if there is one, records each call as well."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.recorder = recorder
        self._counts: dict[tuple[str, str], dict[str, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._counts)

    def record(self, stage: str, server: str, usage: Any, calls: int = 1) -> Tokens | None:
        """Count calls, and return their tokens, if they are known.

        ``usage`` is that of all calls together, as of Responses or Chat Completions; None if unknown.
        """
        tokens = tokens_of(usage)
        total = self._counts.get((stage, server))
        if total is None:
            total = self._counts[stage, server] = dict.fromkeys(COUNTS, 0)
        total["calls"] += calls
        if tokens is None:
            total["unreported"] += calls
            return None
        prompt, cached, output = tokens
        total["input_tokens"] += prompt
        total["cached_tokens"] += cached
        total["output_tokens"] += output
        return tokens

    def merge(self, usage: Any) -> None:
        """Add the counts of another meter, from `to_json`; malformed parts are ignored."""
        for stage, servers in usage.items() if isinstance(usage, dict) else ():
            for server, counts in servers.items() if isinstance(servers, dict) else ():
                if isinstance(counts, dict):
                    self._add(str(stage), str(server), {name: _count(counts, name) for name in COUNTS})

    def to_json(self) -> JSON:
        usage: dict[str, dict[str, dict[str, int]]] = {}
        for (stage, server), counts in self._counts.items():
            usage.setdefault(stage, {})[server] = dict(counts)
        return usage

    def take(self) -> JSON:
        """Return `to_json` and reset the meter: the counts are added elsewhere."""
        taken = self.to_json()
        self._counts = {}
        return taken

    def calls(self, stage: str) -> int:
        return sum(counts["calls"] for (at, _), counts in self._counts.items() if at == stage)

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
    """Counts the model calls of a ``with`` block under a stage. (A generator would cost four times as
    much.)"""

    __slots__ = ("_current", "_token")

    def __init__(self, meter: UsageMeter, stage: str) -> None:
        self._current = (meter, stage)

    def __enter__(self) -> None:
        self._token = _METER.set(self._current)

    def __exit__(self, *exc_info: object) -> None:
        _METER.reset(self._token)


def record_answer(
    server: str, request: Any, answer: Any, begun: float, notes: Mapping[str, Any] | None
) -> None:
    """Count a model call in the current meter, if there is one."""
    if (current := _METER.get()) is not None:
        meter, stage = current
        tokens = meter.record(stage, server, answer.get("usage") if isinstance(answer, dict) else None)
        if (recorder := meter.recorder) is not None:
            recorder.add_model_call(stage, begun, server, answer, request=request, tokens=tokens, notes=notes)


def record_failure(
    server: str, request: Any, status: int, begun: float, notes: Mapping[str, Any] | None
) -> None:
    """Record a model call that failed with ``status``; it is not counted, as nobody knows its usage."""
    if (current := _METER.get()) is not None and (recorder := current[0].recorder) is not None:
        recorder.add_model_call(current[1], begun, server, None, request=request, status=status, notes=notes)


def merge_usage(usage: Any) -> None:
    """Add the counts of another meter to the current one; see `UsageMeter.merge`."""
    if (current := _METER.get()) is not None:
        current[0].merge(usage)


def record_notes(notes: Mapping[str, Any]) -> None:
    """Record what an environment tells with a reply, if the current meter has a recorder."""
    if (current := _METER.get()) is not None and (recorder := current[0].recorder) is not None:
        recorder.take_notes(notes)


def _count(counts: Mapping[str, Any], name: str) -> int:
    value = counts.get(name)
    return value if type(value) is int and value >= 0 else 0

"""The timeline of a rollout: when its model calls, tool calls and stages ran, and where (docs/formats.md).

In a rollout it is small, as every process that a rollout passes reads or writes it: a step is an array.
`Timeline` reads that: names in place of positions and indices, seconds in place of microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

TIMELINE_FIELD = "_ng_timeline"  # field of a rollout

StepKind = Literal["seed", "model", "tool", "verify"]

_MICROSECONDS = 1e6


@dataclass(frozen=True)
class Step:
    """One call of an episode; times are in seconds."""

    kind: StepKind
    """What was called for. A judge is a ``model`` too; see `stage`."""
    start: float  # since the beginning of the episode
    duration: float
    server: str  # the server of the graph that answered
    replica: str | None = None  # its replica; None without Ray, and for a server behind a URL
    status: int = 200  # HTTP status of the answer
    queued: float = 0.0  # how much of `duration` it waited for its turn at the replica
    stage: str | None = None
    """Stage of the episode in which the environment called a model: ``verify`` for a judge. None for the
    agent's own calls."""
    name: str | None = None  # name of the tool
    argument_bytes: int | None = None  # size of the tool's arguments, as the model wrote them
    result_bytes: int | None = None  # size of what the tool answered
    input_tokens: int | None = None
    """Tokens of a model call's prompt; None if the model does not say, as for the next two."""
    cached_tokens: int | None = None  # how many of them were in the model's cache
    output_tokens: int | None = None
    finish_reason: str | None = None
    """Why the model stopped: ``stop``, ``tool_calls``, ``length`` or ``content_filter``."""
    endpoint: str | None = None  # URL that the model server called; None for an engine in the graph
    version: str | None = None  # version of the policy's weights, if the model says it
    time_to_first_token: float | None = None  # of engines in the graph, and of streams; None if unknown
    retries: int = 0  # requests to endpoints that failed before the one that was answered
    prompt: str | None = None
    """What an environment asked its model, such as a judge; of the policy's calls, the response has it."""
    answer: str | None = None  # what that model answered; None if the call failed

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True)
class Timeline:
    """The timeline of one attempt; times are in seconds."""

    began: float  # unix time of the beginning, by the clock of the agent's machine
    duration: float  # of the episode in its agent
    agent: str  # the agent's name
    replica: str | None  # the agent's replica; None without Ray
    queued: float  # how long the rollout waited at that replica before it began
    steps: list[Step]  # in the order in which they ended

    @classmethod
    def of(cls, rollout: Mapping[str, Any]) -> Timeline | None:
        """The timeline of a rollout; None if it has none that can be read."""
        try:
            raw = msgspec.convert(rollout.get(TIMELINE_FIELD), _RawTimeline)
            agent, replica = _place(raw.agent)
            return cls(
                raw.began,
                raw.dur / _MICROSECONDS,
                agent,
                replica,
                raw.queued / _MICROSECONDS,
                [_step(step, raw.servers, raw.endpoints) for step in raw.steps],
            )
        except (msgspec.ValidationError, IndexError):
            return None  # a file of another program


_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
_Microseconds = Annotated[float, msgspec.Meta(ge=-1e13, le=1e13)]  # up to four months
_Index = Annotated[int, msgspec.Meta(ge=0)]


class _More(msgspec.Struct, frozen=True, omit_defaults=True):
    """What few steps have."""

    status: int = 200
    stage: str | None = None
    endpoint: _Index | None = None
    version: str | None = None
    ttft: _Microseconds | None = None
    retries: int = 0
    prompt: str | None = None
    answer: str | None = None


class _RawStep(msgspec.Struct, array_like=True):
    ts: _Microseconds
    dur: _Microseconds
    queued: _Microseconds
    server: _Index


class _Seed(_RawStep, tag="seed"):
    more: _More = _More()


class _Verify(_RawStep, tag="verify"):
    more: _More = _More()


class _Tool(_RawStep, tag="tool"):
    name: str | None
    args: int | None
    result: int | None
    more: _More = _More()


class ModelStep(_RawStep, tag="model"):
    """A model call as a rollout has it."""

    given: int | None
    cached: int | None
    out: int | None
    finish: str | None
    more: _More = _More()


class _RawTimeline(msgspec.Struct):
    """A timeline as a rollout has it."""

    began: _Seconds
    dur: _Microseconds
    agent: str
    servers: list[str]
    steps: list[_Seed | ModelStep | _Tool | _Verify]
    queued: _Microseconds = 0
    endpoints: list[str] = []


def _step(record: _Seed | ModelStep | _Tool | _Verify, servers: list[str], endpoints: list[str]) -> Step:
    server, replica = _place(servers[record.server])
    more = record.more
    tool = record if isinstance(record, _Tool) else _NO_TOOL
    model = record if isinstance(record, ModelStep) else _NO_MODEL
    return Step(
        kind=record.__struct_config__.tag,  # type: ignore[arg-type]  # one of StepKind
        start=record.ts / _MICROSECONDS,
        duration=record.dur / _MICROSECONDS,
        server=server,
        replica=replica,
        status=more.status,
        queued=record.queued / _MICROSECONDS,
        stage=more.stage,
        name=tool.name,
        argument_bytes=tool.args,
        result_bytes=tool.result,
        input_tokens=model.given,
        cached_tokens=model.cached,
        output_tokens=model.out,
        finish_reason=model.finish,
        endpoint=None if more.endpoint is None else endpoints[more.endpoint],
        version=more.version,
        time_to_first_token=None if more.ttft is None else more.ttft / _MICROSECONDS,
        retries=more.retries,
        prompt=more.prompt,
        answer=more.answer,
    )


_NO_TOOL = _Tool(0, 0, 0, 0, None, None, None)
_NO_MODEL = ModelStep(0, 0, 0, 0, None, None, None, None)


def _place(name: str) -> tuple[str, str | None]:
    server, _, replica = name.partition("/")
    return server, replica or None

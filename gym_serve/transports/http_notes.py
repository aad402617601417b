"""Notes of a reply (`gym_serve.observe.timeline`) over HTTP, between two graphs of gym_serve.

Who wants them sends the header `HEADER`; anybody else gets the answer that the formats define. The notes
follow the body, as JSON, and the answer's `HEADER` is their length in bytes: a header would be too short for
the prompts of judges, and a key in the body would change what a model reads of a tool.

The server at a URL may be anybody's. So whoever reads notes believes a server what it tells of its own call,
within limits, and nothing else: no step outside of the call, and none that only an agent makes.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from gym_serve.observe.timeline import MODEL_CALLS, QUEUED, TTFT, microseconds
from gym_serve.servers.transport import Reply, encode
from gym_serve.types.timeline import ModelStep

HEADER = "x-gym-notes"
ASKED = "1"
"""The value of `HEADER` in a request."""

_LARGEST = 4 * 2**20  # bytes
_TEXTS = ("prompt", "answer")

_Name = Annotated[str, msgspec.Meta(max_length=256)]
_Url = Annotated[str, msgspec.Meta(max_length=2048)]
_Microseconds = Annotated[int, msgspec.Meta(ge=0, le=10**13)]


class _Calls(msgspec.Struct):
    """Model calls that a server made; see `Recorder.take`."""

    age: _Microseconds
    servers: list[_Name]
    endpoints: list[_Url]
    steps: list[ModelStep]


class _Notes(msgspec.Struct, omit_defaults=True):
    replica: _Name | None = None
    queued: _Microseconds | None = None
    endpoint: _Url | None = None
    retries: _Microseconds | None = None
    ttft: _Microseconds | None = None
    model_calls: _Calls | None = None


def with_notes(reply: Reply) -> tuple[bytes, dict[str, str]]:
    """The content of an answer, with the notes of the reply behind it, and the header that says so.

    The texts of judges are left out where there are too many of them.
    """
    notes = {key: value for key, value in (reply.notes or {}).items() if key in _Notes.__struct_fields__}
    header = encode(notes)
    if len(header) > _LARGEST and MODEL_CALLS in notes:
        calls = notes[MODEL_CALLS]
        steps = [_without_texts(step) for step in calls["steps"]]
        header = encode({**notes, MODEL_CALLS: {**calls, "steps": steps}})
    if not notes or len(header) > _LARGEST:
        return reply.content, {}
    return reply.content + header, {HEADER: str(len(header))}


def split_notes(content: bytes, length: str | None, seconds: float) -> tuple[bytes, dict[str, Any] | None]:
    """Body and notes of an answer to somebody who asked for them.

    Args:
        length: the answer's `HEADER`.

    Returns:
        the body, and what is believed of the notes, None for nothing. Of an answer without notes, or with
        something else in their place, all is body.
    """
    try:
        size = int(length or "0")
        if not 0 < size <= min(len(content), _LARGEST):
            return content, None
        notes = msgspec.json.decode(content[-size:], type=_Notes)
    except (ValueError, msgspec.DecodeError):
        return content, None
    took = microseconds(seconds)
    believed: dict[str, Any] = msgspec.to_builtins(notes)
    for key in (QUEUED, TTFT):
        if key in believed:
            believed[key] = min(believed[key], took)
    if (calls := notes.model_calls) is not None:
        steps = [_as_recorded(step) for step in calls.steps if _is_of_the_call(step, calls, took)]
        believed[MODEL_CALLS]["steps"] = steps
    return content[:-size], believed


def _is_of_the_call(step: ModelStep, calls: _Calls, took: int) -> bool:
    """Whether a server can have made a step in a call that took so many microseconds."""
    return (
        calls.age - took <= step.ts <= step.ts + step.dur <= calls.age
        and step.server < len(calls.servers)
        and (step.more.endpoint is None or step.more.endpoint < len(calls.endpoints))
        and step.more.stage is not None  # without one, it is the agent's own
    )


def _as_recorded(step: ModelStep) -> list[Any]:
    kind, ts, dur, queued, *others, more = msgspec.to_builtins(step)
    return [kind, int(ts), int(dur), int(queued), *others, more]


def _without_texts(step: list[Any]) -> list[Any]:
    if type(step[-1]) is not dict:
        return step
    return [*step[:-1], {key: value for key, value in step[-1].items() if key not in _TEXTS}]

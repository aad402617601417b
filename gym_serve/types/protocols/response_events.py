"""A finished Response as the events of a Responses stream, where a backend does not stream by itself.

The events keep OpenAI's order (created, in_progress, every item from
added to done, then completed, incomplete or failed), each part in one delta, numbered from 0. An
item of another kind than reasoning, message and function_call (a tool's output in an episode) is
added and done whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gym_serve.types.errors import Unavailable
from gym_serve.types.protocols.fields import shown
from gym_serve.types.requests import JSON

__all__ = ["FINAL_EVENTS", "event_object", "final_event", "item_events", "response_events"]

FINAL_EVENTS = frozenset({"response.completed", "response.incomplete", "response.failed"})
"""The events that end a stream; each has the whole Response."""

_FINAL = {"incomplete": "response.incomplete", "failed": "response.failed"}


def response_events(response: Mapping[str, Any]) -> Iterator[JSON]:
    """The events of the stream, in order.

    Items without an id (OpenAI lets inputs leave it out) get one, because events name their item.
    """
    for number, event in enumerate(_events(response)):
        yield {**event, "sequence_number": number}


def _events(response: Mapping[str, Any]) -> Iterator[JSON]:
    output = [
        item if item.get("id") else {**item, "id": f"item_{i}"}
        for i, item in enumerate(response.get("output") or ())
    ]
    begun = {
        **response,
        "status": "in_progress",
        "output": [],
        "usage": None,
        "incomplete_details": None,
        "error": None,
    }
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(output):
        yield from item_events(item, index)
    yield final_event({**response, "output": output})


def event_object(event: Mapping[str, Any], key: str) -> JSON:
    """What an event has to have: its item, or the response.

    Raises:
        Unavailable: it has none (the events of an API come as they are).
    """
    value = event.get(key)
    if not isinstance(value, dict):
        raise Unavailable(f"the backend's stream has a malformed {shown(event.get('type'))}")
    return value


def final_event(response: Mapping[str, Any]) -> JSON:
    """The event that ends the stream of a response."""
    return {"type": _FINAL.get(str(response.get("status")), "response.completed"), "response": response}


def item_events(item: JSON, index: int) -> Iterator[JSON]:
    """The events of one item, each of its parts in one delta."""
    place = {"item_id": item["id"], "output_index": index}
    kind = item.get("type")
    begun = item
    inner: Iterator[JSON] = iter(())
    if kind == "message":
        begun = {**item, "status": "in_progress", "content": []}
        inner = _message_events(item, place)
    elif kind == "reasoning":
        begun = {**item, "summary": [], **({"content": []} if item.get("content") else {})}
        inner = _reasoning_events(item, place)
    elif kind == "function_call":
        begun = {**item, "status": "in_progress", "arguments": ""}
        inner = _call_events(item, place)
    yield {"type": "response.output_item.added", "output_index": index, "item": begun}
    yield from inner
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _message_events(item: JSON, place: JSON) -> Iterator[JSON]:
    for i, part in enumerate(_parts(item, "content")):
        at = {**place, "content_index": i}
        if part.get("type") == "refusal":
            text = str(part.get("refusal") or "")
            yield {"type": "response.content_part.added", **at, "part": {**part, "refusal": ""}}
            yield {"type": "response.refusal.delta", **at, "delta": text}
            yield {"type": "response.refusal.done", **at, "refusal": text}
        else:
            text = str(part.get("text") or "")
            logprobs = part.get("logprobs") or []
            yield {"type": "response.content_part.added", **at, "part": {**part, "text": "", "logprobs": []}}
            yield {"type": "response.output_text.delta", **at, "delta": text, "logprobs": logprobs}
            yield {"type": "response.output_text.done", **at, "text": text, "logprobs": logprobs}
        yield {"type": "response.content_part.done", **at, "part": part}


def _reasoning_events(item: JSON, place: JSON) -> Iterator[JSON]:
    for i, part in enumerate(_parts(item, "summary")):
        at = {**place, "summary_index": i}
        text = str(part.get("text") or "")
        yield {"type": "response.reasoning_summary_part.added", **at, "part": {**part, "text": ""}}
        yield {"type": "response.reasoning_summary_text.delta", **at, "delta": text}
        yield {"type": "response.reasoning_summary_text.done", **at, "text": text}
        yield {"type": "response.reasoning_summary_part.done", **at, "part": part}
    for i, part in enumerate(_parts(item, "content")):
        at = {**place, "content_index": i}
        text = str(part.get("text") or "")
        yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
        yield {"type": "response.reasoning_text.delta", **at, "delta": text}
        yield {"type": "response.reasoning_text.done", **at, "text": text}
        yield {"type": "response.content_part.done", **at, "part": part}


def _call_events(item: JSON, place: JSON) -> Iterator[JSON]:
    arguments = str(item.get("arguments") or "")
    yield {"type": "response.function_call_arguments.delta", **place, "delta": arguments}
    yield {
        "type": "response.function_call_arguments.done",
        **place,
        "name": item.get("name"),
        "arguments": arguments,
    }


def _parts(item: JSON, key: str) -> list[JSON]:
    parts = item.get(key)
    if isinstance(parts, str):
        return [{"type": "output_text", "text": parts, "annotations": []}]
    return [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []

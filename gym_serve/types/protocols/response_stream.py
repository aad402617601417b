"""Responses streams: the events of a finished Response, and of a chat stream while its chunks arrive.

The order is OpenAI's: created, in_progress, each item from added to done, then completed, incomplete or
failed. Events are numbered from 0. The last event repeats exactly the items that were streamed, so joining
the events and reading the last one give the same answer. An item other than reasoning, message and
function_call (such as a tool's output in an episode) is added and done whole.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any

from gym_serve.types.errors import Unavailable
from gym_serve.types.exact import exact_bytes, lenient_json
from gym_serve.types.protocols.content import ThinkSplitter, seconds, shown
from gym_serve.types.protocols.items import message_item, new_id
from gym_serve.types.protocols.tokens import (
    TOKEN_KEYS,
    VERSIONS_KEY,
    add_logprobs,
    asks_for_logprobs,
    choice_logprobs,
)
from gym_serve.types.requests import JSON

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


_KNOWN_AT_END = (*TOKEN_KEYS, "routed_experts", "weight_version", VERSIONS_KEY)


class ResponseStream:
    """One stream; its events are numbered from 0."""

    def __init__(self, params: Mapping[str, Any], *, parse_think: bool, think_is_open: bool = False) -> None:
        self._begun = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": 0.0,
            "model": str(params.get("model") or ""),
            "status": "in_progress",
            "output": [],
            "usage": None,
            "error": None,
            "incomplete_details": None,
            "tools": params.get("tools") or [],
            "tool_choice": params.get("tool_choice") or "auto",
            "parallel_tool_calls": params.get("parallel_tool_calls", True),
        }
        self._splitter = ThinkSplitter(is_open=think_is_open) if parse_think else None
        self._logprobs: list[JSON] | None = [] if asks_for_logprobs(params) else None
        self._number = 0
        self._started = False
        self._output: list[JSON] = []
        self._open: JSON | None = None
        self._calls: dict[int, tuple[JSON, int]] = {}

    def chunk(self, chunk: Mapping[str, Any]) -> list[JSON]:
        """The events that a chunk leads to; of its choices, the first one counts."""
        return self._numbered(self._chunk(chunk))

    def finish(self, response: Mapping[str, Any]) -> tuple[list[JSON], JSON]:
        """The last events, and the response as it was streamed."""
        if not self._started:  # the backend did not stream after all
            return list(response_events(response)), dict(response)
        events = self._numbered(self._finish())
        output = response.get("output") or []
        last = output[-1] if output else {}
        # Token bundles and versions of weights stand on the last item, and are known at the end only.
        further = {key: value for key, value in last.items() if key in _KNOWN_AT_END}
        if self._output:
            self._output[-1].update(further)
        if self._logprobs:  # of what came after the last text
            add_logprobs(self._output, {"content": self._logprobs})
        whole = {**response, "id": self._begun["id"], "output": self._output or list(output)}
        return events + self._numbered(iter([final_event(whole)])), whole

    def _numbered(self, events: Iterator[JSON]) -> list[JSON]:
        numbered = []
        for event in events:
            numbered.append({**event, "sequence_number": self._number})
            self._number += 1
        return numbered

    def _chunk(self, chunk: Mapping[str, Any]) -> Iterator[JSON]:
        if not self._started:
            self._started = True
            self._begun["created_at"] = seconds(chunk.get("created")) or 0.0
            yield {"type": "response.created", "response": self._begun}
            yield {"type": "response.in_progress", "response": self._begun}
        choice: JSON = next((c for c in chunk.get("choices") or () if (c.get("index") or 0) == 0), {})
        delta = choice.get("delta")
        delta = delta if isinstance(delta, dict) else {}
        if self._logprobs is not None:
            self._logprobs += choice_logprobs(choice.get("logprobs"))
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        if isinstance(reasoning, str):
            yield from self._text("reasoning", reasoning)
        text = delta.get("content")
        if isinstance(text, str) and text:
            pieces = [(False, text)] if self._splitter is None else self._splitter.add(text)
            if self._splitter is not None and self._splitter.retracts:
                self._retract()
            for is_reasoning, piece in pieces:
                yield from self._text("reasoning" if is_reasoning else "message", piece)
        if isinstance(delta.get("refusal"), str):
            yield from self._text("refusal", delta["refusal"])
        calls = delta.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, dict):
                yield from self._call(call)

    def _retract(self) -> None:
        """What was told as text was reasoning, whose end has come: the finished items say so."""
        if self._open is not None and _kind_of(self._open) == "message":
            text = self._open["content"][0]["text"]
            self._open = {**_reasoning(), "id": self._open["id"]}
            self._open["summary"][0]["text"] = text
            self._output[-1] = self._open

    def _text(self, kind: str, text: str) -> Iterator[JSON]:
        if not text:
            return
        if self._open is None or _kind_of(self._open) != kind:
            yield from self._close()
            yield from self._start(_EMPTY[kind]())
        item = self._open
        assert item is not None
        part = item["summary" if kind == "reasoning" else "content"][0]
        field, event, index = _TEXT_EVENTS[kind]
        part[field] += text
        extra: JSON = {"logprobs": self._new_logprobs(part)} if kind == "message" else {}
        place = {"item_id": item["id"], "output_index": len(self._output) - 1}
        yield {"type": event, **place, index: 0, "delta": text, **extra}

    def _new_logprobs(self, part: JSON) -> list[JSON]:
        """Those that came since the last text, which is the first that they can stand on."""
        if not self._logprobs:
            return []
        new, self._logprobs = self._logprobs, []
        part["logprobs"] = [*part.get("logprobs", ()), *new]
        return new

    def _call(self, part: Mapping[str, Any]) -> Iterator[JSON]:
        index = part.get("index")
        index = index if isinstance(index, int) else len(self._calls)
        function = part.get("function")
        function = function if isinstance(function, dict) else {}
        if index not in self._calls:
            yield from self._flush()
            yield from self._close()
            call_id = str(part.get("id") or new_id("call"))
            item = {"type": "function_call", "id": call_id, "call_id": call_id, "status": "completed"}
            item |= {"name": str(function.get("name") or ""), "arguments": ""}
            self._calls[index] = item, len(self._output)
            yield from self._start(item)
        more = function.get("arguments")
        if isinstance(more, str) and more:
            item, at = self._calls[index]
            item["arguments"] += more
            place = {"item_id": item["id"], "output_index": at}
            yield {"type": "response.function_call_arguments.delta", **place, "delta": more}

    def _start(self, item: JSON) -> Iterator[JSON]:
        self._open = item
        self._output.append(item)
        for event in item_events(item, len(self._output) - 1):
            if event["type"].endswith(".delta"):
                return  # the deltas come as the backend sends them
            yield event

    def _flush(self) -> Iterator[JSON]:
        if self._splitter is not None:
            is_reasoning, text = self._splitter.end()
            yield from self._text("reasoning" if is_reasoning else "message", text)

    def _close(self) -> Iterator[JSON]:
        if self._open is not None:
            item, self._open = self._open, None
            events = iter(item_events(item, len(self._output) - 1))
            while not next(events)["type"].endswith(".delta"):
                pass  # of every item here, `_start` has told what comes before its one delta
            yield from events

    def _finish(self) -> Iterator[JSON]:
        yield from self._flush()
        if not self._output:
            yield from self._start(message_item(""))
        yield from self._close()


_TEXT_EVENTS = {
    "message": ("text", "response.output_text.delta", "content_index"),
    "refusal": ("refusal", "response.refusal.delta", "content_index"),
    "reasoning": ("text", "response.reasoning_summary_text.delta", "summary_index"),
}


def _reasoning() -> JSON:
    return {"id": new_id("rs"), "type": "reasoning", "summary": [{"type": "summary_text", "text": ""}]}


_EMPTY: dict[str, Callable[[], JSON]] = {
    "message": lambda: message_item(""),
    "refusal": lambda: {**message_item(""), "content": [{"type": "refusal", "refusal": ""}]},
    "reasoning": _reasoning,
}


def _kind_of(item: JSON) -> str:
    content = item.get("content")
    return "refusal" if content and content[0]["type"] == "refusal" else str(item["type"])


def responses_sse(events: Iterable[Mapping[str, Any]]) -> Iterator[bytes]:
    """A Responses stream: an ``event:`` line with the type and a ``data:`` line for each event."""
    for event in events:
        yield b"event: " + str(event["type"]).encode() + b"\ndata: " + exact_bytes(event) + b"\n\n"


async def read_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[JSON]:
    """The events of `responses_sse`, which may be cut anywhere into chunks."""
    left = b""
    async for chunk in chunks:
        *whole, left = (left + chunk).split(b"\n\n")
        for event in whole:
            yield lenient_json(event.partition(b"\ndata: ")[2])


def chat_sse(chunks: Iterable[Mapping[str, Any]]) -> Iterator[bytes]:
    """A chat stream: a ``data:`` line for each chunk, and ``data: [DONE]`` at the end."""
    for chunk in chunks:
        yield b"data: " + exact_bytes(chunk) + b"\n\n"
    yield b"data: [DONE]\n\n"

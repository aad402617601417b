"""`MessageStream`: the events of a Responses stream as those of an Anthropic Messages stream.

The order is Anthropic's: message_start, then of each block its start, deltas and stop, then message_delta
with the reason and the usage, then message_stop. (https://docs.anthropic.com/en/docs/build-with-claude/streaming.)
The input of a tool is held back until it is whole, as Anthropic does, because clients fail on one that turns
out to be no JSON; that of a tool with ``eager_input_streaming`` goes out as it comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gym_serve.types.protocols.fields import json_text
from gym_serve.types.protocols.items import new_id
from gym_serve.types.protocols.response_events import FINAL_EVENTS, event_object
from gym_serve.types.protocols.to_message import INVALID_JSON, blocks_of, message_usage, stop_of, tool_input
from gym_serve.types.requests import JSON

__all__ = ["MessageStream", "message_events"]

_DELTAS = {
    "response.output_text.delta": ("text", "text_delta", "text"),
    "response.refusal.delta": ("text", "text_delta", "text"),
    "response.reasoning_summary_text.delta": ("thinking", "thinking_delta", "thinking"),
    "response.reasoning_text.delta": ("thinking", "thinking_delta", "thinking"),
    "response.function_call_arguments.delta": ("tool_use", "input_json_delta", "partial_json"),
}
_BLOCKS: dict[str, JSON] = {
    "text": {"type": "text", "text": "", "citations": None},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


class MessageStream:
    """One stream.

    Args:
        body: the Messages body that it answers.
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._model = str(body.get("model") or "")
        self._eager = _eager_tools(body.get("tools"))
        self._index = -1
        self._open: tuple[str, Any] | None = None
        self._started = False
        self._content: list[JSON] = []

    def event(self, event: Mapping[str, Any]) -> Iterator[JSON]:
        """The events that an event of a Responses stream leads to, in order.

        Raises:
            Unavailable: it is malformed (an API's own events come as they are).
        """
        if not self._started:
            self._started = True
            yield self._start(event)
        kind = str(event.get("type"))
        if kind in _DELTAS:
            yield from self._delta(event, *_DELTAS[kind])
        elif kind == "response.output_item.added":
            yield from self._added(event_object(event, "item"), event.get("output_index"))
        elif kind == "response.output_item.done":
            yield from self._done(event_object(event, "item"))
        elif kind in FINAL_EVENTS:
            yield from self._stop()
            response = event_object(event, "response")
            delta = stop_of(response, self._content)
            yield {"type": "message_delta", "delta": delta, "usage": message_usage(response.get("usage"))}
            yield {"type": "message_stop"}

    def _start(self, event: Mapping[str, Any]) -> JSON:
        response = event.get("response")
        model = response.get("model") if isinstance(response, dict) else None
        message: JSON = {
            "id": new_id("msg"),
            "type": "message",
            "role": "assistant",
            "model": model or self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": message_usage(None),
        }
        return {"type": "message_start", "message": message}

    def _added(self, item: JSON, index: Any) -> Iterator[JSON]:
        if item.get("type") == "function_call":
            yield from self._stop()
            block = {**blocks_of(item)[0], "input": {}}
            kind = "eager_input" if block["name"] in self._eager else "input"
            yield from self._begin((kind, index), block)

    def _delta(self, event: Mapping[str, Any], kind: str, delta: str, field: str) -> Iterator[JSON]:
        text = event.get("delta")
        if not isinstance(text, str) or not text:
            return
        part = (event.get("output_index"), event.get("summary_index", event.get("content_index")))
        if kind == "tool_use":
            if self._open != ("eager_input", event.get("output_index")):
                return
        elif self._open != (kind, part):
            yield from self._stop()
            yield from self._begin((kind, part), dict(_BLOCKS[kind]))
        made = {"type": delta, field: text}
        yield {"type": "content_block_delta", "index": self._index, "delta": made}

    def _done(self, item: JSON) -> Iterator[JSON]:
        arguments = item.get("arguments")
        if self._open is not None and self._open[0] == "input" and isinstance(arguments, str) and arguments:
            given = tool_input(arguments)
            text = json_text(given, "input") if INVALID_JSON in given else arguments
            delta = {"type": "input_json_delta", "partial_json": text}
            yield {"type": "content_block_delta", "index": self._index, "delta": delta}
        signature = item.get("encrypted_content") if item.get("type") == "reasoning" else None
        if isinstance(signature, str) and signature:
            if self._open is not None and self._open[0] == "thinking":
                delta = {"type": "signature_delta", "signature": signature}
                yield {"type": "content_block_delta", "index": self._index, "delta": delta}
            elif not item.get("summary") and not item.get("content"):
                yield from self._begin(("redacted", None), {"type": "redacted_thinking", "data": signature})
        yield from self._stop()

    def _begin(self, key: tuple[str, Any], block: JSON) -> Iterator[JSON]:
        self._index += 1
        self._open = key
        self._content.append(block)
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _stop(self) -> Iterator[JSON]:
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": self._index}


def _eager_tools(tools: Any) -> frozenset[str]:
    """Names of the tools whose input goes out as it comes."""
    listed = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    return frozenset(str(tool.get("name")) for tool in listed if tool.get("eager_input_streaming") is True)


def message_events(message: Mapping[str, Any]) -> Iterator[JSON]:
    """The events of a finished Message, each block's content in one delta."""
    yield {"type": "message_start", "message": {**message, "content": [], "stop_reason": None}}
    for index, block in enumerate(message.get("content") or ()):
        begun, deltas = _taken_apart(block)
        yield {"type": "content_block_start", "index": index, "content_block": begun}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    delta = {"stop_reason": message.get("stop_reason"), "stop_sequence": message.get("stop_sequence")}
    yield {"type": "message_delta", "delta": delta, "usage": message.get("usage")}
    yield {"type": "message_stop"}


def _taken_apart(block: JSON) -> tuple[JSON, list[JSON]]:
    kind = block.get("type")
    if kind == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block.get("text") or ""}]
    if kind == "thinking":
        begun = {**block, "thinking": "", "signature": ""}
        signature = {"type": "signature_delta", "signature": block.get("signature") or ""}
        return begun, [{"type": "thinking_delta", "thinking": block.get("thinking") or ""}, signature]
    if kind == "tool_use":
        arguments = json_text(block.get("input") or {}, "input")
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]
    return block, []

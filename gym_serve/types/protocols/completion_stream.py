"""`CompletionStream`: the events of a Responses stream as the chunks of a chat stream.

What the chunks add up to is the completion that `response_to_chat` makes of the finished Response.
(https://platform.openai.com/docs/api-reference/chat-streaming.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gym_serve.types.protocols.fields import seconds
from gym_serve.types.protocols.items import new_id
from gym_serve.types.protocols.logprobs import choice_logprobs
from gym_serve.types.protocols.response_events import FINAL_EVENTS, event_object
from gym_serve.types.protocols.to_completion import response_to_chat
from gym_serve.types.requests import JSON

__all__ = ["CompletionStream"]

_TEXTS = {"response.output_text.delta": "content", "response.refusal.delta": "refusal"}
_REASONING = ("response.reasoning_summary_text.delta", "response.reasoning_text.delta")


class CompletionStream:
    """One stream.

    Args:
        chat: the Chat Completions body that it answers.
    """

    def __init__(self, chat: Mapping[str, Any]) -> None:
        self._chat = chat
        self._head: JSON = {}
        self._calls: dict[str, int] = {}
        self._reasoning: tuple[Any, ...] | None = None

    def event(self, event: Mapping[str, Any]) -> Iterator[JSON]:
        """The chunks that an event of a Responses stream leads to, in order.

        Raises:
            Unavailable: the stream ends in a failure, or the event is malformed.
        """
        if not self._head:
            self._head = self._begun(event.get("response"))
            yield self._chunk({"role": "assistant", "content": ""})
        kind = str(event.get("type"))
        delta = event.get("delta")
        if kind in FINAL_EVENTS:
            (choice,) = response_to_chat(event_object(event, "response"), self._chat)["choices"]
            yield self._chunk({}, choice["finish_reason"])
        elif kind == "response.output_item.added":
            item = event_object(event, "item")
            if item.get("type") == "function_call":
                yield self._chunk({"tool_calls": [self._call(item, str(event.get("output_index")))]})
        elif not isinstance(delta, str) or not delta:
            return
        elif kind in _TEXTS:
            chunk = self._chunk({_TEXTS[kind]: delta})
            if entries := choice_logprobs({"content": event.get("logprobs")}):
                chunk["choices"][0]["logprobs"] = {"content": entries, "refusal": None}
            yield chunk
        elif kind in _REASONING:
            yield self._chunk({"reasoning_content": self._separated(event, delta)})
        elif kind == "response.function_call_arguments.delta":
            index = self._calls.get(str(event.get("output_index")), 0)
            yield self._chunk({"tool_calls": [{"index": index, "function": {"arguments": delta}}]})

    def _begun(self, response: Any) -> JSON:
        begun = response if isinstance(response, dict) else {}
        return {
            "id": new_id("chatcmpl"),
            "object": "chat.completion.chunk",
            "created": int(seconds(begun.get("created_at")) or 0),
            "model": begun.get("model") or str(self._chat.get("model") or ""),
        }

    def _chunk(self, delta: JSON, finish_reason: str | None = None) -> JSON:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return {**self._head, "choices": [choice]}

    def _call(self, item: JSON, at: str) -> JSON:
        index = self._calls.setdefault(at, len(self._calls))
        function = {"name": item.get("name") or "", "arguments": ""}
        return {"index": index, "id": item.get("call_id"), "type": "function", "function": function}

    def _separated(self, event: Mapping[str, Any], delta: str) -> str:
        """A piece of reasoning; those of different blocks are paragraphs of their own."""
        block = (event.get("output_index"), event.get("summary_index"), event.get("content_index"))
        before, self._reasoning = self._reasoning, block
        return delta if before in (None, block) else f"\n\n{delta}"

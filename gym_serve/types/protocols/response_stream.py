"""`ResponseStream`: the chunks of a chat stream as the events of a Responses stream, while they come.

The order is OpenAI's: created, in_progress, then each item from added to done, one at a time, then completed,
incomplete or failed. The items of the last event are those that were streamed, so that whoever joins the
events has the same answer as whoever takes the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gym_serve.types.protocols.fields import seconds
from gym_serve.types.protocols.items import message_item, new_id
from gym_serve.types.protocols.logprobs import add_logprobs, asks_for_logprobs, choice_logprobs
from gym_serve.types.protocols.response_events import final_event, item_events, response_events
from gym_serve.types.protocols.think import ThinkSplitter
from gym_serve.types.protocols.tokens import TOKEN_KEYS
from gym_serve.types.requests import JSON

__all__ = ["ResponseStream"]

_KNOWN_AT_END = (*TOKEN_KEYS, "routed_experts", "weight_version")


class ResponseStream:
    """One stream; its events are numbered from 0.

    Args:
        params: the Responses body that it answers.
        parse_think: take ``<think>`` tags in the text as reasoning.
    """

    def __init__(self, params: Mapping[str, Any], *, parse_think: bool) -> None:
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
        self._splitter = ThinkSplitter() if parse_think else None
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
        """The last events, and the response as it was streamed.

        Args:
            response: the finished one, for all but its output.
        """
        if not self._started:  # the backend did not stream after all
            return list(response_events(response)), dict(response)
        events = self._numbered(self._finish())
        said = response.get("output") or []
        last = said[-1] if said else {}
        # Token bundles and versions of weights stand on the last item, and are known at the end only.
        further = {key: value for key, value in last.items() if key in _KNOWN_AT_END}
        if self._output:
            self._output[-1].update(further)
        if self._logprobs:  # of what came after the last text
            add_logprobs(self._output, {"content": self._logprobs})
        whole = {**response, "id": self._begun["id"], "output": self._output or list(said)}
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
            for is_reasoning, piece in (
                [(False, text)] if self._splitter is None else self._splitter.add(text)
            ):
                yield from self._text("reasoning" if is_reasoning else "message", piece)
        if isinstance(delta.get("refusal"), str):
            yield from self._text("refusal", delta["refusal"])
        calls = delta.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, dict):
                yield from self._call(call)

    def _text(self, kind: str, text: str) -> Iterator[JSON]:
        if not text:
            return
        if self._open is None or _kind_of(self._open) != kind:
            yield from self._close()
            yield from self._start(_EMPTY[kind]())
        item = self._open
        assert item is not None
        part = item["summary" if kind == "reasoning" else "content"][0]
        field, event, index = _TEXTS[kind]
        part[field] += text
        extra: JSON = {"logprobs": self._new_logprobs(part)} if kind == "message" else {}
        yield {"type": event, **self._place(), index: 0, "delta": text, **extra}

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
            yield from self._text("message", self._splitter.end())

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

    def _place(self) -> JSON:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}


_TEXTS = {
    "message": ("text", "response.output_text.delta", "content_index"),
    "refusal": ("refusal", "response.refusal.delta", "content_index"),
    "reasoning": ("text", "response.reasoning_summary_text.delta", "summary_index"),
}


def _reasoning() -> JSON:
    return {"id": new_id("rs"), "type": "reasoning", "summary": [{"type": "summary_text", "text": ""}]}


def _refusal() -> JSON:
    return {**message_item(""), "content": [{"type": "refusal", "refusal": ""}]}


_EMPTY: dict[str, Callable[[], JSON]] = {
    "message": lambda: message_item(""),
    "refusal": _refusal,
    "reasoning": _reasoning,
}


def _kind_of(item: JSON) -> str:
    content = item.get("content")
    return "refusal" if content and content[0]["type"] == "refusal" else str(item["type"])

"""Chat streams: a completion or a Responses stream as chunks, and chunks joined to a completion.
(https://platform.openai.com/docs/api-reference/chat-streaming)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gym_serve.types.errors import Unavailable
from gym_serve.types.exact import Pieces, mended
from gym_serve.types.protocols.answers import check_delta, response_to_chat
from gym_serve.types.protocols.content import seconds, shown
from gym_serve.types.protocols.items import new_id
from gym_serve.types.protocols.response_stream import FINAL_EVENTS, event_object
from gym_serve.types.protocols.tokens import choice_logprobs
from gym_serve.types.requests import JSON

_TEXT_FIELDS = ("reasoning_content", "reasoning", "content", "refusal")


def chat_chunks(completion: Mapping[str, Any], include_usage: bool) -> Iterator[JSON]:
    """The ``chat.completion.chunk`` objects of a completion, in order.

    Of each choice: its role, then the texts that it has, then each call, then the finish reason.
    """
    head = {"id": completion.get("id"), "object": "chat.completion.chunk"}
    head |= {"created": completion.get("created"), "model": completion.get("model")}
    if completion.get("system_fingerprint"):
        head["system_fingerprint"] = completion["system_fingerprint"]
    if include_usage:
        head["usage"] = None
    for choice in completion.get("choices") or ():
        index = choice.get("index") or 0
        logprobs = choice.get("logprobs")
        for delta in _deltas(choice.get("message") or {}):
            yield {**head, "choices": [_choice(index, delta, None)]}
        last = {**_choice(index, {}, choice.get("finish_reason")), "logprobs": logprobs}
        yield {**head, "choices": [last]}
    if include_usage:
        yield {**head, "choices": [], "usage": completion.get("usage")}


def _choice(index: int, delta: JSON, finish_reason: Any = None) -> JSON:
    return {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": None}


def _deltas(message: Mapping[str, Any]) -> Iterator[JSON]:
    yield {"role": message.get("role") or "assistant", "content": ""}
    for field in _TEXT_FIELDS:
        if message.get(field):
            yield {field: message[field]}
    for i, call in enumerate(message.get("tool_calls") or ()):
        yield {"tool_calls": [{**call, "index": i}]}


_TEXTS = {"response.output_text.delta": "content", "response.refusal.delta": "refusal"}
_REASONING = ("response.reasoning_summary_text.delta", "response.reasoning_text.delta")


class CompletionStream:
    """One stream."""

    def __init__(self, chat: Mapping[str, Any]) -> None:
        self._chat = chat
        self._head: JSON = {}
        self._calls: dict[str, int] = {}
        self._reasoning: tuple[Any, ...] | None = None

    def event(self, event: Mapping[str, Any]) -> Iterator[JSON]:
        if not self._head:
            self._head = self._begun(event.get("response"))
            yield self._chunk({"role": "assistant", "content": ""})
        kind = str(event.get("type"))
        delta = event.get("delta")
        if kind in FINAL_EVENTS:
            completion = response_to_chat(event_object(event, "response"), self._chat)
            yield self._chunk({}, completion["choices"][0]["finish_reason"])
            yield {**self._head, "choices": [], "usage": completion.get("usage")}
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
        return {**self._head, "choices": [_choice(0, delta, finish_reason)]}

    def _call(self, item: JSON, at: str) -> JSON:
        index = self._calls.setdefault(at, len(self._calls))
        function = {"name": item.get("name") or "", "arguments": ""}
        return {"index": index, "id": item.get("call_id"), "type": "function", "function": function}

    def _separated(self, event: Mapping[str, Any], delta: str) -> str:
        """A piece of reasoning; those of different blocks are paragraphs of their own."""
        block = (event.get("output_index"), event.get("summary_index"), event.get("content_index"))
        before, self._reasoning = self._reasoning, block
        return delta if before in (None, block) else f"\n\n{delta}"


_LOGPROB_LISTS = ("content", "refusal")  # of logprobs


class ChunkJoiner:
    """Takes the chunks in their order; `completion` is what they add up to.

    Texts are joined, calls by their index, log probabilities and token ids are appended; of any other field
    the last value counts, so that what a backend adds of its own is kept.
    """

    def __init__(self) -> None:
        self.begun = False  # whether a chunk came
        self._head: JSON = {}
        self._choices: dict[int, JSON] = {}

    def add(self, chunk: Any) -> JSON:
        """Take a chunk, and return it in OpenAI's form: a ``delta`` where some backends have a ``message``,
        and each call with an index of its own where they have none, or the same for all. Its texts are
        `Pieces`. Raises `Unavailable` if it tells of a failure."""
        if not isinstance(chunk, dict) or not isinstance(chunk.get("choices"), list):
            error = chunk.get("error") if isinstance(chunk, dict) else None
            raise Unavailable(f"the backend's stream failed: {shown(error or chunk)}")
        self.begun = True
        self._head.update((k, v) for k, v in chunk.items() if k != "choices" and v is not None)
        choices = []
        for raw in chunk["choices"]:
            choice = raw
            if isinstance(raw, dict) and raw.get("delta") is None and "message" in raw:
                choice = {key: value for key, value in raw.items() if key != "message"}
                choice["delta"] = raw["message"]
            check_delta(choice)
            joined = self._choices.setdefault(choice.get("index") or 0, _empty_choice())
            delta = choice.get("delta") or {}
            if calls := delta.get("tool_calls"):
                placed = [_placed(joined["message"]["tool_calls"], joined["places"], part) for part in calls]
                choice = {**choice, "delta": {**delta, "tool_calls": placed}}
            choice = _whole(choice, joined["pieces"])
            _add_choice(joined, choice)
            choices.append(choice)
        return {**chunk, "choices": choices}

    def completion(self) -> JSON:
        """The completion. Raises `Unavailable` if the stream ended before the answer did."""
        choices = []
        for index, choice in sorted(self._choices.items()):
            if choice["finish_reason"] is None:
                raise Unavailable("the backend's stream ended in the middle of its answer")
            message: JSON = dict(choice["message"])
            if calls := message.pop("tool_calls"):
                message["tool_calls"] = [calls[at] for at in sorted(calls)]
            rest = {key: value for key, value in choice.items() if key not in ("places", "pieces")}
            choices.append({**rest, "index": index, "message": message})
        return {**self._head, "object": "chat.completion", "choices": choices}


def _empty_choice() -> JSON:
    message: JSON = {"role": "assistant", "content": None, "tool_calls": {}}
    kept = {"places": {}, "pieces": Pieces()}
    return {"message": message, "finish_reason": None, "logprobs": None, **kept}


def _whole(choice: JSON, waiting: Pieces) -> JSON:
    """A choice whose texts and arguments are whole; its last one has what waits."""
    delta = choice.get("delta") or {}
    calls = [(part, part.get("function") or {}) for part in delta.get("tool_calls") or ()]
    all_given = [(field, delta.get(field)) for field in _TEXT_FIELDS]
    all_given += [(part["index"], function.get("arguments")) for part, function in calls]
    pieces = [(text, piece) for text, piece in all_given if piece and isinstance(piece, str)]
    if waiting.are_whole(*(piece for _, piece in pieces)):
        return choice
    ready = [one for text, piece in pieces for one in waiting.add(text, piece)]
    if choice.get("finish_reason") is not None:
        ready += waiting.add(None, "")
    whole = {**delta, **{text: "" for text, _ in pieces if text in _TEXT_FIELDS}}
    parts = [{**part, "function": {**function, "arguments": ""}} for part, function in calls]
    for text, piece in ready:
        if text in _TEXT_FIELDS:
            whole[text] = (whole.get(text) or "") + piece
        else:
            is_new = any(part["index"] == text for part in parts)
            parts.insert(len(parts) if is_new else 0, {"index": text, "function": {"arguments": piece}})
    if parts:
        whole["tool_calls"] = parts
    whole_choice: JSON = mended({**choice, "delta": whole})  # its log probabilities too
    return whole_choice


def _add_choice(joined: JSON, choice: Mapping[str, Any]) -> None:
    for key, value in (choice.get("delta") or {}).items():
        if key == "tool_calls":
            for call in value or ():
                _add_call(joined["message"]["tool_calls"][call["index"]], call)
        elif key == "role":
            joined["message"]["role"] = value or "assistant"
        elif isinstance(value, str):
            before = joined["message"].get(key)
            joined["message"][key] = before + value if isinstance(before, str) else value
        elif value is not None:
            joined["message"][key] = value
    for key, value in choice.items():
        if key in ("delta", "index") or value is None:
            continue
        if key == "logprobs":
            joined["logprobs"] = _appended(joined["logprobs"] or {}, value)
        elif key == "token_ids":
            joined[key] = [*joined.get(key, []), *_list(value)]
        else:
            joined[key] = value


def _appended(before: JSON, more: Mapping[str, Any]) -> JSON:
    joined = {**before, **more}
    for key in _LOGPROB_LISTS:
        if isinstance(more.get(key), list) or isinstance(before.get(key), list):
            joined[key] = [*_list(before.get(key)), *_list(more.get(key))]
    return joined


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _placed(calls: dict[int, JSON], places: dict[Any, int], part: Mapping[str, Any]) -> JSON:
    """A part of a call with the index of its call, which is begun where there is none."""
    index, call_id = part.get("index"), part.get("id")
    function = part.get("function")
    named = isinstance(function, dict) and bool(function.get("name"))
    at = places.get(index)
    if index is None:
        same = (at for at, call in calls.items() if call_id and call["id"] == call_id)
        at = next(same, max(calls, default=None))
    if at is None:
        begins = True
    elif call_id:
        begins = named and calls[at]["id"] != call_id
    else:
        begins = index is None and named and bool(calls[at]["function"]["name"])
    if begins or at is None:
        at = index if index is not None and index not in calls else max(calls, default=-1) + 1
        calls[at] = {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
    places[index] = at
    return {**part, "index": at}


def _add_call(call: JSON, part: Mapping[str, Any]) -> None:
    call["id"] = part.get("id") or call["id"]
    function = part.get("function")
    for key in ("name", "arguments"):
        more = function.get(key) if isinstance(function, dict) else None
        if isinstance(more, str):
            call["function"][key] += more

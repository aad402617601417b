"""The protocols of models: OpenAI's Responses and Chat Completions, and Anthropic's Messages.

Each answers the body of a request by asking a model, either whole or as server-sent events that are yielded
while the model produces them. The model is whatever has the methods of `Model`: a `ModelServer`, or one whose
calls are recorded for an external harness (`gym_serve.servers.captures`).
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from gym_serve.observe.timeline import TTFT, USAGE, microseconds
from gym_serve.servers.context import closing, current
from gym_serve.types.errors import BadRequest, GymError, Unavailable
from gym_serve.types.protocols import (
    FINAL_EVENTS,
    MessageStream,
    chat_chunks,
    chat_sse,
    error_message,
    message_events,
    message_to_params,
    response_events,
    response_to_message,
    responses_sse,
    schemas,
)
from gym_serve.types.requests import JSON

_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls")


class Model(Protocol):
    """What a protocol asks of a model; `gym_serve.servers.model.ModelServer` describes the methods."""

    async def responses(self, body: JSON) -> JSON: ...

    async def chat_completions(self, body: JSON) -> JSON: ...

    def stream_responses(self, body: JSON) -> AsyncIterator[JSON]: ...

    def stream_chat(self, body: JSON) -> AsyncIterator[JSON]: ...


class WireProtocol(NamedTuple):
    """A way to ask a model."""

    summary: str
    result: str
    request: JSON
    response: JSON
    answer: Callable[[Model, Any], Awaitable[JSON]]
    stream: Callable[[Model, Any], AsyncGenerator[bytes, None]]


def without_stream(body: Any) -> Any:
    """A request without the keys that ask for a stream; models never see them."""
    if not isinstance(body, dict):
        return body
    return {key: value for key, value in body.items() if key not in ("stream", "stream_options")}


def finished_stream(op: str, body: Any, answer: Any) -> bytes:
    """A finished answer as server-sent events. Raises `Unavailable`: it is not what the protocol says."""
    try:
        if op.endswith("v1/responses"):
            return b"".join(responses_sse(response_events(answer)))
        if op.endswith("v1/messages"):
            return b"".join(responses_sse(message_events(answer)))
        return b"".join(chat_sse(chat_chunks(answer, include_usage=_includes_usage(body))))
    except (AttributeError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise Unavailable(f"the answer of {op} cannot be streamed: {problem}") from error


def error_event(op: str, error: GymError) -> bytes:
    """The event that ends a stream in a failure, as the protocol of ``op`` defines it."""
    body = error.to_body()
    if op.endswith("v1/messages"):
        return b"".join(responses_sse([error_message(error.status, body["error"])]))
    if op.endswith("v1/responses"):
        event = {"type": "error", "code": error.code, "message": error.message, "param": None}
        return b"".join(responses_sse([event]))
    return next(chat_sse([body]))


def models_list(names: Sequence[str]) -> JSON:
    """The answer of ``GET /v1/models``."""
    now = int(time.time())
    models = [{"id": name, "object": "model", "created": now, "owned_by": "gym_serve"} for name in names]
    return {"object": "list", "data": models}


async def _responses(model: Model, body: Any) -> JSON:
    _check_input(body)
    return await model.responses(without_stream(body))


async def _stream_responses(model: Model, body: Any) -> AsyncGenerator[bytes, None]:
    _check_input(body)
    notes, begun = current().notes, time.monotonic()
    async with closing(model.stream_responses(without_stream(body))) as events:
        async for event in events:
            _note(notes, event, begun)
            yield b"".join(responses_sse([event]))


async def _chat(model: Model, body: Any) -> JSON:
    check_messages(body)
    return await model.chat_completions(without_stream(body))


async def _stream_chat(model: Model, body: Any) -> AsyncGenerator[bytes, None]:
    """The usage comes in a chunk of its own at the end, if the request asks for it."""
    check_messages(body)
    include_usage = _includes_usage(body)
    usage: Any = None
    last: JSON = {}
    notes, begun = current().notes, time.monotonic()
    async with closing(model.stream_chat(without_stream(body))) as chunks:
        async for chunk in chunks:
            last.update({key: chunk.get(key) for key in ("id", "object", "created", "model")})
            usage = usage if chunk.get("usage") is None else chunk["usage"]
            if chunk.get("choices"):
                if TTFT not in notes and _has_text(chunk):
                    notes[TTFT] = microseconds(time.monotonic() - begun)
                shown = {key: value for key, value in chunk.items() if key != "usage"}
                yield _chunk({**shown, "usage": None} if include_usage else shown)
    notes[USAGE] = usage
    end = b"".join(chat_sse([]))
    yield _chunk({**last, "choices": [], "usage": usage}) + end if include_usage else end


async def _messages(model: Model, body: Any) -> JSON:
    check_messages(body)
    return response_to_message(await model.responses(message_to_params(body)), body)


async def _stream_messages(model: Model, body: Any) -> AsyncGenerator[bytes, None]:
    check_messages(body)
    stream = MessageStream(body)
    notes, begun = current().notes, time.monotonic()
    async with closing(model.stream_responses(message_to_params(without_stream(body)))) as events:
        async for event in events:
            _note(notes, event, begun)
            if text := b"".join(responses_sse(stream.event(event))):
                yield text


def _note(notes: JSON, event: JSON, begun: float) -> None:
    """Note the first token of a Responses stream, and its usage, for the metrics of the server."""
    kind = event.get("type")
    if TTFT not in notes and isinstance(kind, str) and kind.endswith(".delta"):
        notes[TTFT] = microseconds(time.monotonic() - begun)
    elif kind in FINAL_EVENTS and isinstance(response := event.get("response"), dict):
        notes[USAGE] = response.get("usage")


def _has_text(chunk: JSON) -> bool:
    choice = chunk["choices"][0]
    delta = choice.get("delta") if isinstance(choice, dict) else None
    return isinstance(delta, dict) and any(delta.get(key) for key in _TEXTS)


def _includes_usage(body: JSON) -> bool:
    options: Any = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise BadRequest(f"`stream_options` must be an object, got {type(options).__name__}")
    return bool(options.get("include_usage"))


def _chunk(chunk: JSON) -> bytes:
    return next(chat_sse([chunk]))


def _check_input(body: Any) -> None:
    items = body.get("input") if isinstance(body, dict) else None
    if not isinstance(items, str):
        _check_list(items, "input", "a string or a list of items")


def check_messages(body: Any) -> None:
    """Raise `BadRequest` if a body has no messages, as OpenAI and Anthropic answer too."""
    messages = body.get("messages") if isinstance(body, dict) else None
    _check_list(messages, "messages", "a list of messages")
    if not messages:
        raise BadRequest("`messages` must have at least one message, got none")


def _check_list(entries: Any, key: str, wanted: str) -> None:
    if not isinstance(entries, list):
        raise BadRequest(f"`{key}` must be {wanted}, got {type(entries).__name__}")
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise BadRequest(f"`{key}[{index}]` must be an object, got {type(entry).__name__}")


# By operation. A stream raises its failures, also after the first event.
PROTOCOLS: Mapping[str, WireProtocol] = {
    "v1/responses": WireProtocol(
        "OpenAI Responses", "Response", schemas.PARAMS, schemas.RESPONSE, _responses, _stream_responses
    ),
    "v1/chat/completions": WireProtocol(
        "OpenAI Chat Completions", "ChatCompletion", schemas.CHAT, schemas.COMPLETION, _chat, _stream_chat
    ),
    "v1/messages": WireProtocol(
        "Anthropic Messages", "Message", schemas.MESSAGES, schemas.MESSAGE, _messages, _stream_messages
    ),
}

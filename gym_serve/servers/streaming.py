"""The streams of a model: what its three protocols send while it answers, as server-sent events.

Each function asks the model, emits the events as they come, and gives the whole answer, which is the same as
that of a call without a stream. A failure is raised, also when some events were emitted already.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from gym_serve.servers.context import Emit
from gym_serve.types.errors import InvalidRequest
from gym_serve.types.protocols import MessageStream, chat_sse, message_to_params, responses_sse
from gym_serve.types.requests import JSON

__all__ = ["OnEvent", "Streaming", "plain", "stream_chat", "stream_messages", "stream_responses"]

OnEvent = Callable[[JSON], Awaitable[None]]
"""Takes an event of a stream."""


class Streaming(Protocol):
    """What a model has to have for it."""

    async def stream_responses(self, body: JSON, on_event: OnEvent) -> JSON:
        """See `gym_serve.servers.model.ModelServer`."""
        ...

    async def stream_chat(self, body: JSON, on_chunk: OnEvent) -> JSON:
        """See `gym_serve.servers.model.ModelServer`."""
        ...


def plain(body: JSON) -> JSON:
    """A request without the keys that ask for a stream."""
    return {key: value for key, value in body.items() if key not in ("stream", "stream_options")}


async def stream_responses(model: Streaming, body: JSON, emit: Emit) -> JSON:
    """OpenAI's Responses."""

    async def on_event(event: JSON) -> None:
        await emit(b"".join(responses_sse([event])))

    return await model.stream_responses(plain(body), on_event)


async def stream_messages(model: Streaming, body: JSON, emit: Emit) -> JSON:
    """Anthropic's Messages; gives the Response."""
    stream = MessageStream(body)

    async def on_event(event: JSON) -> None:
        if made := b"".join(responses_sse(stream.event(event))):
            await emit(made)

    return await model.stream_responses(message_to_params(plain(body)), on_event)


async def stream_chat(model: Streaming, body: JSON, emit: Emit) -> JSON:
    """OpenAI's Chat Completions; the usage comes last, if it is asked for."""
    options: Any = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise InvalidRequest("`stream_options` must be an object")
    include_usage = bool(options.get("include_usage"))
    last: JSON = {}

    async def on_chunk(chunk: JSON) -> None:
        last.update({key: chunk.get(key) for key in ("id", "object", "created", "model")})
        if chunk.get("choices"):
            shown = {key: value for key, value in chunk.items() if key != "usage"}
            await emit(_chunk({**shown, "usage": None} if include_usage else shown))

    completion = await model.stream_chat(plain(body), on_chunk)
    end = b"".join(chat_sse([]))
    if include_usage:
        end = _chunk({**last, "choices": [], "usage": completion.get("usage")}) + end
    await emit(end)
    return completion


def _chunk(chunk: JSON) -> bytes:
    return next(chat_sse([chunk]))

"""The three protocols of a model: what its operations do with a body, whether a stream is asked for or not.

A model is whatever has the methods of `Answering`: a `ModelServer`, and one whose calls are recorded
(`gym_serve.servers.captures`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, Protocol

from gym_serve.servers.context import Emit, current
from gym_serve.servers.streaming import Streaming, plain, stream_chat, stream_messages, stream_responses
from gym_serve.types.errors import InvalidRequest
from gym_serve.types.protocols import message_to_params, response_to_message, schemas
from gym_serve.types.requests import JSON

__all__ = ["PROTOCOLS", "Answering", "WireProtocol"]


class Answering(Streaming, Protocol):
    """What a model has to have."""

    async def responses(self, body: JSON) -> JSON:
        """See `gym_serve.servers.model.ModelServer`."""
        ...

    async def chat_completions(self, body: JSON) -> JSON:
        """See `gym_serve.servers.model.ModelServer`."""
        ...


class WireProtocol(NamedTuple):
    """A way to ask a model.

    Attributes:
        summary: its name.
        request, response: JSON schemas of the body and the answer.
        answer: answers a body, in parts where the caller takes them (`CallContext.emit`).
    """

    summary: str
    request: JSON
    response: JSON
    answer: Callable[[Answering, Any], Awaitable[JSON]]


async def _responses(model: Answering, body: Any) -> JSON:
    given = body.get("input") if isinstance(body, dict) else None
    if not isinstance(given, str):
        _check_list(given, "input", "a string or a list of items")
    if (emit := _emit(body)) is None:
        return await model.responses(plain(body))
    return await stream_responses(model, body, emit)


async def _chat(model: Answering, body: Any) -> JSON:
    _check_messages(body)
    if (emit := _emit(body)) is None:
        return await model.chat_completions(plain(body))
    return await stream_chat(model, body, emit)


async def _messages(model: Answering, body: Any) -> JSON:
    _check_messages(body)
    if (emit := _emit(body)) is None:
        response = await model.responses(message_to_params(body))
    else:
        response = await stream_messages(model, body, emit)
    return response_to_message(response, body)


def _emit(body: JSON) -> Emit | None:
    """Takes the parts of the answer; None where it is wanted whole."""
    return current().emit if body.get("stream") else None


def _check_messages(body: Any) -> None:
    _check_list(body.get("messages") if isinstance(body, dict) else None, "messages", "a list of messages")


def _check_list(given: Any, key: str, wanted: str) -> None:
    if not isinstance(given, list):
        raise InvalidRequest(f"`{key}` must be {wanted}, got {type(given).__name__}")
    for index, entry in enumerate(given):
        if not isinstance(entry, dict):
            raise InvalidRequest(f"`{key}[{index}]` must be an object, got {type(entry).__name__}")


PROTOCOLS: Mapping[str, WireProtocol] = {
    "v1/responses": WireProtocol("OpenAI Responses", schemas.PARAMS, schemas.RESPONSE, _responses),
    "v1/chat/completions": WireProtocol("OpenAI Chat Completions", schemas.CHAT, schemas.COMPLETION, _chat),
    "v1/messages": WireProtocol("Anthropic Messages", schemas.MESSAGES, schemas.MESSAGE, _messages),
}
"""By operation."""

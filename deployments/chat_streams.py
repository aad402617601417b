"""Chat streams of a backend, joined to its completion and turned into the streams of a `ModelServer`.

A backend that is asked for a stream may answer whole instead, e.g. when the prompt exceeds its context. So a
stream of a backend yields decoded chunks and, where there is a whole answer, ends with a `Whole`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any, NamedTuple

from gym_serve.servers.context import closing
from gym_serve.types.protocols import ChunkJoiner, ResponseStream, chat_chunks
from gym_serve.types.requests import JSON

__all__ = ["Whole", "chat_stream", "joined", "response_stream"]


class Whole(NamedTuple):
    """The whole answer of a backend; the last item of a stream."""

    answer: Any
    """Decoded JSON; None if the prompt does not fit the model's context."""


async def joined(events: AsyncIterator[Any]) -> AsyncGenerator[JSON | Whole, None]:
    """The chunks of a backend's chat stream, each checked, and then the completion that they add up to.

    Raises:
        Unavailable: an event is not a chunk, or reports a failure; or the stream ended before the answer did.
    """
    joiner = ChunkJoiner()
    async with closing(events):
        async for event in events:
            if isinstance(event, Whole):
                yield event
                return
            joiner.add(event)
            yield event
    yield Whole(joiner.completion())


async def chat_stream(
    stream: AsyncIterator[JSON | Whole], answer: Callable[[JSON | None], JSON]
) -> AsyncGenerator[JSON, None]:
    """The chunks of `ModelServer.stream_chat`.

    Args:
        stream: chunks of the completion, and then the completion.
        answer: makes the answer without a stream of the completion.
    """
    begun = has_usage = False
    head: JSON = {}
    async with closing(stream):
        async for item in stream:
            if not isinstance(item, Whole):
                begun = True
                has_usage = has_usage or item.get("usage") is not None
                head = item
                yield item
                continue
            completion = answer(item.answer)
            if not begun:
                for chunk in chat_chunks(completion, include_usage=True):
                    yield chunk
            elif not has_usage and completion.get("usage") is not None:
                yield {**head, "choices": [], "usage": completion["usage"]}


async def response_stream(
    stream: AsyncIterator[JSON | Whole],
    answer: Callable[[JSON | None], JSON],
    params: Mapping[str, Any],
    *,
    parse_think: bool,
) -> AsyncGenerator[JSON, None]:
    """The events of `ModelServer.stream_responses`.

    Args:
        stream: chunks of the completion, and then the completion.
        answer: makes the Response without a stream of the completion.
        params: the Responses body that is answered.
        parse_think: take ``<think>`` tags in the text as reasoning.
    """
    events = ResponseStream(params, parse_think=parse_think)
    async with closing(stream):
        async for item in stream:
            if isinstance(item, Whole):
                last, _ = events.finish(answer(item.answer))
                for event in last:
                    yield event
            else:
                for event in events.chunk(item):
                    yield event

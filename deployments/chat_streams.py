"""Streams of a backend: read, joined to its completion, and turned into the streams of a `ModelServer`.

A backend that is asked for a stream may answer whole instead, e.g. when the prompt exceeds its context. So
the streams of a backend may hold a `Whole` answer, as their last item.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from gym_serve.servers.context import closing
from gym_serve.types.errors import Unavailable
from gym_serve.types.exact import Pieces, lenient_json, mended, no_json
from gym_serve.types.protocols import ChunkJoiner, ResponseStream, chat_chunks
from gym_serve.types.requests import JSON

_DONE = b"[DONE]"
_TEXT_OF_A_DELTA = ("type", "item_id", "output_index", "content_index", "summary_index")
_MAX_EVENT = 16 * 2**20  # bytes; one event can hold a whole answer with its tokens


class Whole(NamedTuple):
    """The whole answer of a backend; the last item of a stream."""

    answer: Any  # decoded JSON; None if the prompt does not fit the model's context


def is_event_stream(headers: Mapping[str, str]) -> bool:
    """Whether an answer with these headers is a stream."""
    return headers.get("Content-Type", "").lower().startswith("text/event-stream")


async def read_events(url: str, content: AsyncIterator[bytes]) -> AsyncGenerator[Any, None]:
    """The decoded events of a stream of ``url``. Raises Unavailable: an event is not JSON, or too large, or
    there is none.

    As other clients, it skips a byte order mark, events without data, and a last event that is cut short.
    """
    empty, first = True, True
    rest = b""
    data: list[bytes] = []
    size = 0
    async with closing(content):
        async for chunk in content:
            rest += chunk
            if first and len(rest) >= len(BOM_UTF8):
                rest, first = rest.removeprefix(BOM_UTF8), False
            *lines, rest = rest.split(b"\n")
            for raw in lines:
                line = raw.removesuffix(b"\r")
                if line.startswith(b"data:"):
                    data.append(line[5:].removeprefix(b" "))
                    size += len(line)
                elif not line and data:
                    event, data, size = b"\n".join(data), [], 0
                    if event not in (_DONE, b""):
                        empty = False
                        yield _decoded(url, event)
            if size + len(rest) > _MAX_EVENT:
                raise Unavailable(f"{url} sent an event of over {_MAX_EVENT} bytes")
    if rest.startswith(b"data:"):
        data.append(rest[5:].removeprefix(b" ").removesuffix(b"\r"))
    with suppress(Unavailable):
        if data and (event := b"\n".join(data)) not in (_DONE, b""):
            last = _decoded(url, event)
            empty = False
            yield last
    if empty:
        raise Unavailable(f"{url} answered a stream without any event")


async def joined(events: AsyncIterator[Any]) -> AsyncGenerator[JSON | Whole, None]:
    """The chunks of a backend's chat stream, each checked, and then the completion that they add up to.
    Raises Unavailable: an event is not a chunk, or reports a failure; or the stream ended before the answer
    did.
    """
    joiner = ChunkJoiner()
    async with closing(events):
        async for event in events:
            if isinstance(event, Whole):
                yield event
                return
            yield joiner.add(event)
    yield Whole(mended(joiner.completion()))


async def whole_events(events: AsyncIterator[JSON]) -> AsyncGenerator[JSON, None]:
    """The events of a Responses stream, numbered from 0; deltas are `Pieces`, other texts `mended`."""
    waiting, number = Pieces(), 0
    last: JSON = {}
    async with closing(events):
        async for event in events:
            piece = event.get("delta")
            if not isinstance(piece, str):
                whole = [*({**last, "delta": more} for _, more in waiting.add(None, "")), mended(event)]
            elif not piece or waiting.are_whole(piece):
                whole = [event]
            else:
                text = [event.get(key) for key in _TEXT_OF_A_DELTA]
                ready = waiting.add(text, piece)
                whole = [{**(event if of == text else last), "delta": more} for of, more in ready]
                last = event
            for one in whole:
                yield {**one, "sequence_number": number}
                number += 1


async def chat_stream(
    stream: AsyncIterator[JSON | Whole], answer: Callable[[JSON | None], JSON]
) -> AsyncGenerator[JSON, None]:
    """The chunks of `ModelServer.stream_chat`; ``answer`` makes the answer without a stream of the
    completion.
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
    think_is_open: bool = False,
) -> AsyncGenerator[JSON, None]:
    """The events of `ModelServer.stream_responses` to ``params``; ``answer`` makes the Response without a
    stream.
    """
    events = ResponseStream(params, parse_think=parse_think, think_is_open=think_is_open)
    async with closing(stream):
        async for item in stream:
            if isinstance(item, Whole):
                last, _ = events.finish(answer(item.answer))
                for event in last:
                    yield event
            else:
                for event in events.chunk(item):
                    yield event


def _decoded(url: str, event: bytes) -> Any:
    try:
        return lenient_json(event)
    except ValueError as error:
        raise Unavailable(f"{url} sent an event that is no JSON: {no_json(event, error)}") from None

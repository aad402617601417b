"""Server-sent events of a backend, decoded as they arrive.

(https://html.spec.whatwg.org/multipage/server-sent-events.html; of its fields, model APIs use ``data``, and
``event`` only to say again what the data's ``type`` says.)
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

import orjson

from gym_serve.servers.context import closing
from gym_serve.types.errors import Unavailable

__all__ = ["is_event_stream", "read_events"]

_DONE = b"[DONE]"
_MAX_EVENT = 16 * 2**20  # bytes; one event can hold a whole answer with its tokens


def is_event_stream(headers: Mapping[str, str]) -> bool:
    """Whether an answer with these headers is a stream."""
    return headers.get("Content-Type", "").lower().startswith("text/event-stream")


async def read_events(url: str, content: AsyncIterator[bytes]) -> AsyncGenerator[Any, None]:
    """The decoded events of a stream.

    Args:
        url: what was called, for errors.
        content: the body of the answer, in chunks of any size.

    Raises:
        Unavailable: an event is not JSON, or too large, or there is none.
    """
    empty = True
    rest = b""
    data: list[bytes] = []
    size = 0
    async with closing(content):
        async for chunk in content:
            *lines, rest = (rest + chunk).split(b"\n")
            for raw in lines:
                line = raw.removesuffix(b"\r")
                if line.startswith(b"data:"):
                    data.append(line[5:].removeprefix(b" "))
                    size += len(line)
                elif not line and data:
                    event, data, size = b"\n".join(data), [], 0
                    if event != _DONE:
                        empty = False
                        yield _decoded(url, event)
            if size + len(rest) > _MAX_EVENT:
                raise Unavailable(f"{url} sent an event of over {_MAX_EVENT} bytes")
    if empty:
        raise Unavailable(f"{url} answered a stream without any event")


def _decoded(url: str, event: bytes) -> Any:
    try:
        return orjson.loads(event)
    except orjson.JSONDecodeError as error:
        raise Unavailable(f"{url} sent an event that is no JSON ({error}): {event[:200]!r}") from None

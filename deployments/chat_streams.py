"""Chat streams on their way through a model: joined to the completion, and turned into Responses events.

What streams need not be sure to: a prompt over the context, say, is answered at once. Such an answer is
passed on as a stream of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from gym_serve.servers.streaming import OnEvent
from gym_serve.types.protocols import ChunkJoiner, ResponseStream, chat_chunks
from gym_serve.types.requests import JSON

__all__ = ["joined", "streamed_chat", "streamed_response"]


async def joined(ask: Callable[[OnEvent], Awaitable[Any]], on_chunk: OnEvent) -> Any:
    """The completion that the chunks of a backend add up to.

    Args:
        ask: asks the backend, which calls what it is given with each chunk. What it returns is the answer
            of a backend that does not stream.
        on_chunk: takes each chunk, after it was checked.

    Raises:
        Unavailable: a chunk is none, or tells of a failure; or the last one came before the answer's end.
    """
    joiner = ChunkJoiner()

    async def add(chunk: JSON) -> None:
        joiner.add(chunk)
        await on_chunk(chunk)

    answer = await ask(add)
    return joiner.completion() if joiner.begun else answer


async def streamed_chat(complete: Callable[[OnEvent], Awaitable[JSON]], on_chunk: OnEvent) -> JSON:
    """The completion that ``complete`` returns; its chunks go to ``on_chunk`` in any case."""
    begun = False

    async def passed_on(chunk: JSON) -> None:
        nonlocal begun
        begun = True
        await on_chunk(chunk)

    completion = await complete(passed_on)
    if not begun:
        for chunk in chat_chunks(completion, include_usage=False):
            await on_chunk(chunk)
    return completion


async def streamed_response(
    respond: Callable[[OnEvent], Awaitable[JSON]],
    on_event: OnEvent,
    params: Mapping[str, Any],
    *,
    parse_think: bool,
) -> JSON:
    """The Response that ``respond`` returns, as its events told it.

    Args:
        respond: makes the Response, and calls what it is given with each chunk of the chat stream.
        on_event: takes the events.
        params: the Responses body that is answered.
        parse_think: take ``<think>`` tags in the text as reasoning.
    """
    stream = ResponseStream(params, parse_think=parse_think)

    async def on_chunk(chunk: JSON) -> None:
        for event in stream.chunk(chunk):
            await on_event(event)

    events, response = stream.finish(await respond(on_chunk))
    for event in events:
        await on_event(event)
    return response

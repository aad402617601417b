"""The answer of an agent as a stream: what its model says, while it says it, and what its tools return.

A client reads an episode as one Response: the events of its model calls go out as they come, and the items
that no model made before the next call. A chat client reads what the model says alone: the calls of tools are
run here, and are not the client's to run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from gym_serve.servers.clients import ModelClient
from gym_serve.servers.context import closing
from gym_serve.types.protocols import (
    FINAL_EVENTS,
    CompletionStream,
    chat_to_params,
    event_object,
    final_event,
    is_answer,
    item_events,
    response_events,
    response_to_chat,
)
from gym_serve.types.requests import JSON

_BEGINNINGS = ("response.created", "response.queued", "response.in_progress")
_TEXTS = ("response.output_text.delta", "response.refusal.delta")


class EpisodeEvents:
    """The events of one episode. What a slow reader has not read yet waits: the episode does not."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[JSON | None] = asyncio.Queue()
        self._sent = 0
        self._done = 0  # items of which all events are out
        self._calls = 0
        self._id: Any = None
        self._ids: dict[int, str] = {}  # of the items, by place

    async def call(self, model: ModelClient, body: JSON, before: list[JSON]) -> JSON:
        """A model call of the episode, whose events go out as they come."""
        self._items(before)
        self._calls += 1
        at = len(before)

        def hear(event: JSON) -> None:
            kind = event.get("type")
            if kind in _BEGINNINGS:
                if self._calls == 1:
                    self._id = self._id or (event.get("response") or {}).get("id")
                    self._put(event)
            elif kind not in FINAL_EVENTS:
                index = event.get("output_index")
                self._put({**event, "output_index": at + index} if isinstance(index, int) else event)
                if kind == "response.output_item.done" and isinstance(index, int):
                    self._done = at + index + 1

        return await model.responses(body, hear)

    async def read(self, answer: Callable[[], Awaitable[JSON]]) -> AsyncIterator[JSON]:
        """The events of the episode that ``answer`` runs, the last of which has the whole Response."""

        async def run() -> None:
            _HEARD.set(self)
            try:
                self._finish(await answer())
            finally:
                self._queue.put_nowait(None)

        task = asyncio.create_task(run())
        try:
            while (event := await self._queue.get()) is not None:
                yield event
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)  # its session is closed by then

    def _items(self, items: list[JSON]) -> None:
        for place in range(self._done, len(items)):
            item = {"id": f"item_{place}", **items[place]}
            for event in item_events(item, place):
                self._put(event)
        self._done = max(self._done, len(items))

    def _finish(self, response: JSON) -> None:
        if not self._sent:  # the answer came whole, e.g. from an agent behind a URL
            for event in response_events(response):
                self._put(event)
            return
        self._items(response["output"])
        output = [{**item, "id": self._ids[place]} for place, item in enumerate(response["output"])]
        self._put(final_event({**response, "id": self._id or response.get("id"), "output": output}))

    def _put(self, event: JSON) -> None:
        """Send an event. Some models give the items of each answer the same ids; here, each has its own."""
        place = event.get("output_index")
        if isinstance(place, int):
            if isinstance(item := event.get("item"), dict):
                event = {**event, "item": {**item, "id": self._id_at(place, str(item.get("id") or "item"))}}
            elif "item_id" in event:
                event = {**event, "item_id": self._id_at(place, str(event["item_id"]))}
        self._queue.put_nowait({**event, "sequence_number": self._sent})
        self._sent += 1

    def _id_at(self, place: int, own: str) -> str:
        if place not in self._ids:
            self._ids[place] = f"{own}_{place}" if own in self._ids.values() else own
        return self._ids[place]


_HEARD: ContextVar[EpisodeEvents | None] = ContextVar("gym_serve_episode_events", default=None)


def heard() -> EpisodeEvents | None:
    """Where the events of the episode that begins now go; None where nobody reads them."""
    return _HEARD.get()


class SpokenAnswer:
    """An agent as the protocols read a model (`gym_serve.servers.protocols.Model`): what it says.

    ``whole``: the calls and outputs of tools are part of it, as in a Response.
    """

    def __init__(self, answer: Callable[[JSON], Awaitable[JSON]], *, whole: bool) -> None:
        self._answer = answer
        self._whole = whole

    async def responses(self, body: JSON) -> JSON:
        return await self._answer(body)

    async def chat_completions(self, body: JSON) -> JSON:
        """What the episode says last: the tool calls before it were already run here."""
        return response_to_chat(await self._answer(_params(body)), body)

    async def stream_responses(self, body: JSON) -> AsyncIterator[JSON]:
        events = EpisodeEvents().read(lambda: self._answer(body))
        async with closing(events if self._whole else _said(events)) as shown:
            async for event in shown:
                yield event

    async def stream_chat(self, body: JSON) -> AsyncIterator[JSON]:
        """`chat_completions` as chunks, after what the episode has said before its last tool call."""
        stream = CompletionStream(body)
        events = EpisodeEvents().read(lambda: self._answer(_params(body)))
        async with closing(_paragraphs(_said(events))) as paragraphs:
            async for event in paragraphs:
                for chunk in stream.event(event):
                    yield chunk


def _params(body: JSON) -> JSON:
    """The Responses body of a chat. One that names no tools does not say that there are none."""
    params = chat_to_params(body)
    return {key: params[key] for key in params if key != "tools" or body.get("tools") is not None}


async def _said(events: AsyncIterator[JSON]) -> AsyncIterator[JSON]:
    """Events without those of tools. Calls that the episode has not run are the last ones."""
    calls: list[JSON] = []  # events of calls, as long as nothing has run them
    items: dict[Any, bool] = {}  # whether it is a call, by place; no entry where it is not the model's
    async with closing(events):
        async for event in events:
            place = event.get("output_index")
            if event.get("type") == "response.output_item.added":
                item = event_object(event, "item")
                if is_answer(item):
                    items[place] = item.get("type") == "function_call"
                else:
                    calls.clear()
            if event.get("type") in FINAL_EVENTS:
                for call in calls:
                    yield call
                yield event
            elif items.get(place):
                calls.append(event)
            elif place is None or place in items:
                yield event


async def _paragraphs(events: AsyncIterator[JSON]) -> AsyncIterator[JSON]:
    """The events of `_said`, with an empty line between what was said before and after tools."""
    last, is_apart, spoken = -1, False, False
    async with closing(events):
        async for event in events:
            place, text = event.get("output_index"), event.get("delta")
            if isinstance(place, int) and place > last:
                last, is_apart = place, is_apart or place > last + 1
            if event.get("type") in _TEXTS and text:
                yield {**event, "delta": f"\n\n{text}"} if spoken and is_apart else event
                spoken, is_apart = True, False
            else:
                yield event

"""`RecordedModel`: a model whose calls are recorded, each in the capture of its session.

Whatever protocol a harness speaks, the model is asked for a Response, as a stream or whole, and what it
answered is recorded as that. A stream passes the model's events on as they come, but for the last one: that
follows when the call is recorded. So a harness that has seen the end of an answer and hangs up, or asks at
once what comes next, finds it recorded.
"""

from __future__ import annotations

from gym_serve.servers.answering import Answering
from gym_serve.servers.capture.captures import Captures
from gym_serve.servers.capture.tree import without_tokens
from gym_serve.servers.streaming import OnEvent
from gym_serve.types.protocols import FINAL_EVENTS, CompletionStream, chat_to_params, response_to_chat
from gym_serve.types.requests import JSON

__all__ = ["RecordedModel"]


class RecordedModel:
    """A model as a harness sees it: without token ids, which are for trainers.

    Args:
        model: the model.
        captures: where its calls are recorded.
    """

    def __init__(self, model: Answering, captures: Captures) -> None:
        self._model = model
        self._captures = captures

    async def responses(self, body: JSON) -> JSON:
        """See `ModelServer.responses` and `Captures.call`."""
        return _shown(await self._captures.call(body, self._model.responses))

    async def stream_responses(self, body: JSON, on_event: OnEvent) -> JSON:
        """See `ModelServer.stream_responses` and `Captures.call`."""
        held: list[JSON] = []

        async def passed_on(event: JSON) -> None:
            if event.get("type") in FINAL_EVENTS:
                held.append(event)
            else:
                await on_event(_shown_event(event))

        response = await self._captures.call(
            body, lambda params: self._model.stream_responses(params, passed_on)
        )
        for event in held:
            await on_event(_shown_event(event))
        return _shown(response)

    async def chat_completions(self, body: JSON) -> JSON:
        """See `ModelServer.chat_completions` and `Captures.call`."""
        return response_to_chat(await self.responses(chat_to_params(body)), body)

    async def stream_chat(self, body: JSON, on_chunk: OnEvent) -> JSON:
        """See `ModelServer.stream_chat` and `Captures.call`."""
        stream = CompletionStream(body)

        async def on_event(event: JSON) -> None:
            for chunk in stream.event(event):
                await on_chunk(chunk)

        return response_to_chat(await self.stream_responses(chat_to_params(body), on_event), body)


def _shown(response: JSON) -> JSON:
    return {**response, "output": list(map(without_tokens, response["output"]))}


def _shown_event(event: JSON) -> JSON:
    shown = event
    if isinstance(item := event.get("item"), dict):
        shown = {**shown, "item": without_tokens(item)}
    if isinstance(response := event.get("response"), dict) and isinstance(response.get("output"), list):
        shown = {**shown, "response": _shown(response)}
    return shown

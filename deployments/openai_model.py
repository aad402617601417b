"""`openai_model`: a model behind OpenAI's own API, or a server that speaks Responses as it does."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from pydantic import Field

from gym_serve.deployments.chat_streams import Whole, chat_stream, joined, whole_events
from gym_serve.deployments.endpoints import EndpointConfig, Urls
from gym_serve.deployments.http_client import HeaderSecret
from gym_serve.deployments.upstream import UpstreamModel
from gym_serve.servers.context import CallContext, closing, current
from gym_serve.types.errors import Unavailable
from gym_serve.types.protocols import (
    FINAL_EVENTS,
    TOKEN_KEYS,
    apply_sampling,
    check_completion,
    check_response,
    context_overflow_response,
    input_form,
    response_events,
    response_to_chat,
    responses_usage,
)
from gym_serve.types.requests import JSON

# Keys that rows and trainers use, and that OpenAI refuses.
_OWN_METADATA = frozenset({"extra_body", "chat_template_kwargs"})


class OpenAIModel(UpstreamModel):
    """A model behind an API that answers both Responses and Chat Completions."""

    class Config(EndpointConfig):
        api_key: HeaderSecret
        """The key of the API, e.g. ``${OPENAI_API_KEY}``."""
        base_url: Urls = Field(["https://api.openai.com/v1"], validate_default=True)
        """The API, or a list of them; see `chat_model`."""
        extra_body: JSON = Field(default_factory=dict)
        """Default fields of every request; the row and the request may say otherwise."""
        sampling_overrides: JSON = Field(default_factory=dict)
        """Fields of every request that hold whatever row and request say; null leaves a field out."""
        max_retries: int = Field(5, ge=0)
        """Further attempts after a 429, a 5xx or a broken connection."""

    config: Config

    async def responses(self, body: JSON) -> JSON:
        body, metadata = {**body, "input": _openai_input(body.get("input"))}, self.metadata()
        return self._response(body, await self._post("/responses", body), metadata)

    async def stream_responses(self, body: JSON) -> AsyncGenerator[JSON, None]:
        async with closing(whole_events(self._events(body))) as events:
            async for event in events:
                yield event

    async def _events(self, body: JSON) -> AsyncGenerator[JSON, None]:
        body, metadata = {**body, "input": _openai_input(body.get("input"))}, self.metadata()
        last: Any = None
        async with closing(self._stream("/responses", body)) as events:
            async for event in events:
                if isinstance(event, Whole):  # the API did not stream after all
                    for own_event in response_events(self._response(body, event.answer, metadata)):
                        yield own_event
                    return
                _check_event(event)
                if event["type"] in FINAL_EVENTS:
                    event["response"] = self._response(body, event.get("response") or {}, metadata)
                last = event["type"]
                yield event
        if last not in FINAL_EVENTS:
            raise Unavailable(f"the stream ended before its answer, with {str(last)[:100]!r}")

    def _response(self, body: JSON, response: Any, metadata: JSON) -> JSON:
        if response is None:
            return context_overflow_response({**body, "model": self.config.model})
        checked = check_response(response)
        if usage := responses_usage(checked.get("usage")):
            checked = {**checked, "usage": usage}
        for item in checked["output"][-1:]:
            item.update(metadata)
        return checked

    async def chat_completions(self, body: JSON) -> JSON:
        metadata = self.metadata()
        return {**self._completion(await self._post("/chat/completions", body)), **metadata}

    async def stream_chat(self, body: JSON) -> AsyncGenerator[JSON, None]:
        request, metadata = {**body, "stream_options": {"include_usage": True}}, self.metadata()
        stream = chat_stream(joined(self._stream("/chat/completions", request)), self._completion)
        async with closing(stream) as chunks:
            async for chunk in chunks:
                yield {**chunk, **metadata}

    def _completion(self, completion: Any) -> JSON:
        if completion is None:
            return response_to_chat(context_overflow_response({"model": self.config.model}))
        check_completion(completion)
        whole: JSON = completion
        return whole

    async def _post(self, path: str, body: JSON) -> Any:
        return await self._upstream.post(path, self._request(body), self._call())

    async def _stream(self, path: str, body: JSON) -> AsyncGenerator[Any, None]:
        request = {**self._request(body), "stream": True}
        async with closing(self._upstream.stream(path, request, self._call())) as events:
            async for event in events:
                yield event

    def _call(self) -> CallContext:
        return current().within(self.config.timeout)

    def _request(self, body: JSON) -> JSON:
        config = self.config
        request = apply_sampling(
            {**body, "model": config.model}, extra_body=config.extra_body, overrides=config.sampling_overrides
        )
        metadata = request.get("metadata")
        if isinstance(metadata, dict):
            request["metadata"] = {k: v for k, v in metadata.items() if k not in _OWN_METADATA}
        request = {key: value for key, value in request.items() if value is not None and value != {}}
        request.pop("stream", None)
        return request


def _check_event(event: Any) -> None:
    if not isinstance(event, dict):
        raise Unavailable(f"the stream has an event that is none: {str(event)[:200]}")
    if not isinstance(event.get("type"), str):
        raise Unavailable(f"the stream has an event without a type: {str(event)[:200]}")


def _openai_input(items: Any) -> Any:
    """The input as OpenAI takes it: items of Responses only, and no keys that it does not know."""
    if not isinstance(items, list):
        return items
    return [
        {key: value for key, value in input_item.items() if key not in TOKEN_KEYS}
        if isinstance(input_item, dict)
        else input_item
        for i, item in enumerate(items)
        for input_item in (input_form(item, f"input[{i}]") if isinstance(item, dict) else [item])
    ]

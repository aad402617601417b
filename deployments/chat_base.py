"""`ChatServer`: base class of the models that answer chat completions, by an endpoint or an engine inside.

A subclass completes chat bodies, whole (`complete_chat`) and as a stream (`stream_completion`). This class
makes Responses, Chat Completions and their streams of that, with the settings that all such models have.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from pydantic import Field

from gym_serve.deployments.chat_streams import Whole, chat_stream, response_stream
from gym_serve.servers import ModelServer
from gym_serve.servers.context import closing
from gym_serve.types.errors import BadRequest
from gym_serve.types.protocols import (
    ReasoningForm,
    chat_to_response,
    completion_tokens,
    context_overflow_response,
    response_to_chat,
    responses_to_chat,
)
from gym_serve.types.protocols.tokens import VERSIONS_KEY
from gym_serve.types.requests import JSON


class ChatServer(ModelServer):
    """A model that answers chat completions; a subclass writes `complete_chat`, `stream_completion`,
    `params_of`.
    """

    class Config(ModelServer.Config):
        extra_body: JSON = Field(default_factory=dict)
        """Default fields of every request; the row and the request may say otherwise."""
        chat_template_kwargs: JSON = Field(default_factory=dict)
        """Default arguments of the chat template, e.g. ``{enable_thinking: false}``."""
        sampling_overrides: JSON = Field(default_factory=dict)
        """Fields of every request that hold whatever row and request say; null leaves a field out, which the
        endpoint refuses. Training sets here the sampling of the policy that it optimizes."""
        reasoning_input: ReasoningForm = "field"
        """How the model is shown earlier reasoning that comes without token ids: ``field`` (beside the
        content; an endpoint needs a reasoning parser), ``think_tags`` (in the content) or ``drop``."""
        parse_think_tags: bool = True
        """Take ``<think>`` tags in an answer as reasoning. What precedes a lone ``</think>`` is reasoning as
        well, as the chat templates of many models open the tag. So is what begins
        with its line and is never closed."""
        think_is_open: bool = False
        """Whether the chat template opens the tag, so that a stream knows from its first token on that it is
        reasoning. It holds the text back then until the tag is closed."""
        return_token_ids: bool = False
        """Put the token ids and log probabilities of every call on its last output item."""

    config: Config

    async def complete_chat(self, chat: JSON) -> JSON | None:
        """The checked completion of a chat body; None if the prompt does not fit the model's context."""
        raise NotImplementedError

    def stream_completion(self, chat: JSON) -> AsyncIterator[JSON | Whole]:
        """The chunks of the completion, and then the completion."""
        raise NotImplementedError

    def params_of(self, body: JSON) -> JSON:
        """A Responses body with the name of the model that answers it."""
        raise NotImplementedError

    async def responses(self, body: JSON) -> JSON:
        metadata = self.metadata()
        return self._response(body, await self.complete_chat(self.chat_body(body)), metadata)

    async def stream_responses(self, body: JSON) -> AsyncGenerator[JSON, None]:
        metadata = self.metadata()
        stream = response_stream(
            self.stream_completion(self.chat_body(body)),
            lambda completion: self._response(body, completion, metadata),
            self.params_of(body),
            parse_think=self.config.parse_think_tags,
            think_is_open=self.config.think_is_open,
        )
        async with closing(stream) as events:
            async for event in events:
                yield event

    async def chat_completions(self, body: JSON) -> JSON:
        _check_messages(body)
        metadata = self.metadata()
        return self._completion(await self.complete_chat(body), metadata)

    async def stream_chat(self, body: JSON) -> AsyncGenerator[JSON, None]:
        _check_messages(body)
        metadata = self.metadata()
        stream = chat_stream(
            self.stream_completion(body), lambda completion: self._completion(completion, metadata)
        )
        async with closing(stream) as chunks:
            async for chunk in chunks:
                yield {**chunk, **metadata} if metadata else chunk

    def chat_body(self, body: JSON) -> JSON:
        """The chat body of a Responses body."""
        config = self.config
        return responses_to_chat(body, reasoning=config.reasoning_input, token_ids=config.return_token_ids)

    def _response(self, body: JSON, completion: JSON | None, metadata: JSON) -> JSON:
        params, config = self.params_of(body), self.config
        if completion is None:
            return context_overflow_response(params)
        response = chat_to_response(
            completion, params, parse_think=config.parse_think_tags, token_ids=config.return_token_ids
        )
        last = response["output"][-1]
        last.update(metadata)
        if last.get(VERSIONS_KEY):
            last["weight_version"] = str(last[VERSIONS_KEY][0]["version"])  # what the call began with
        return response

    def _completion(self, completion: JSON | None, metadata: JSON) -> JSON:
        if completion is None:
            model: Any = self.params_of({})["model"]
            return response_to_chat(context_overflow_response({"model": model}))
        tokens = completion_tokens(completion) if self.config.return_token_ids else None
        if tokens is not None:
            first, *others = completion["choices"]
            first = {**first, "message": {**first["message"], **tokens}}
            completion = {**completion, "choices": [first, *others]}
        return {**completion, **metadata} if metadata else completion


def _check_messages(body: JSON) -> None:
    for index, message in enumerate(body["messages"]):
        if not isinstance(message, dict):
            raise BadRequest(f"`messages[{index}]` must be an object, got {type(message).__name__}")

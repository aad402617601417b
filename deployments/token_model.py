"""`TokenModel`: a model that takes and gives tokens, so that the prompt of a later turn is exact."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from gym_serve.deployments.chat_base import ChatServer
from gym_serve.deployments.chat_streams import Whole
from gym_serve.deployments.token_prompts import continued_prompt, without_tokens
from gym_serve.servers.base import Operation
from gym_serve.servers.context import closing
from gym_serve.types.errors import BadRequest, InvalidRequest
from gym_serve.types.protocols import apply_sampling, check_completion, inline_audio
from gym_serve.types.requests import JSON


class TokenModel(ChatServer):
    """A model that takes and gives tokens; a subclass writes `complete`, `stream` and `render`."""

    class Config(ChatServer.Config):
        return_token_ids: bool = True
        """Put the token ids and log probabilities of every call on its last output item, and continue
        from them. Off for judges, which are not trained."""

    config: Config

    def __init__(self, *, name: str | None = None, **settings: Any) -> None:
        super().__init__(name=name, **settings)
        self.ends: frozenset[int] = frozenset()
        """Ids of the tokens that end a turn; set when the model starts."""

    async def complete(self, chat: JSON, prompt: list[int] | None) -> JSON | None:
        """The chat completion of a body with all sampling parameters, or of the prompt's tokens; with token
        ids where ``return_token_ids`` is on. None if the prompt does not fit the model's context.
        """
        raise NotImplementedError

    def stream(self, chat: JSON, prompt: list[int] | None) -> AsyncIterator[JSON | Whole]:
        """`complete` as a stream: the chunks, and then the whole completion, or that alone."""
        raise NotImplementedError

    async def render(self, chat: JSON, messages: list[JSON]) -> list[int]:
        """Tokens of ``messages`` and the opening of the next turn, with the tools of ``chat``."""
        raise NotImplementedError

    def operations(self) -> dict[str, Operation]:
        operations = super().operations()
        object_ = {"type": "object"}
        operations["tokenize"] = Operation(self._op_tokenize, "Tokens of a conversation", object_, object_)
        return operations

    def params_of(self, body: JSON) -> JSON:
        return {**body, "model": body.get("model") or self.name}

    async def complete_chat(self, chat: JSON) -> JSON | None:
        completion = await self.complete(*await self._prepared(chat))
        if completion is not None:
            check_completion(completion)
        return completion

    async def stream_completion(self, chat: JSON) -> AsyncGenerator[JSON | Whole, None]:
        async with closing(self.stream(*await self._prepared(chat))) as items:
            async for item in items:
                if isinstance(item, Whole) and item.answer is not None:
                    check_completion(item.answer)
                yield item

    async def _prepared(self, chat: JSON) -> tuple[JSON, list[int] | None]:
        body = self._merged(chat)
        prompt = None
        if self.config.return_token_ids:
            if body.get("n") not in (None, 1):
                raise BadRequest("n: token ids are returned for one choice only; see return_token_ids")
            prompt = await self.prompt_of(body)
        body["messages"] = without_tokens(body["messages"])
        return body, prompt

    def _merged(self, chat: JSON) -> JSON:
        config = self.config
        return apply_sampling(
            inline_audio(chat),
            extra_body=config.extra_body,
            chat_template_kwargs=config.chat_template_kwargs,
            overrides=config.sampling_overrides,
        )

    async def _prompt(self, chat: JSON) -> list[int]:
        return await self.prompt_of(chat) or await self.render(chat, chat["messages"])

    async def prompt_of(self, chat: JSON) -> list[int] | None:
        """The prompt that continues the tokens in a body's messages; None where there are none."""
        return await continued_prompt(chat["messages"], lambda m: self.render(chat, m), self.ends)

    async def count_tokens(self, body: JSON) -> int:
        return len(await self._prompt(self._merged(self.chat_body(body))))

    async def _op_tokenize(self, body: Any) -> JSON:
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            raise InvalidRequest("messages: a list of messages is missing")
        tokens = await self._prompt(body)
        return {"tokens": tokens, "count": len(tokens)}

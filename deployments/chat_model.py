"""`chat_model`: a model behind any OpenAI-compatible Chat Completions endpoint (vLLM, SGLang, ...)."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any, Literal

from gym_serve.deployments.chat_streams import Whole, joined
from gym_serve.deployments.token_model import ChatServer, continued_prompt, without_tokens
from gym_serve.deployments.upstream import PROMPT_KEYS, RowEndpointModel
from gym_serve.servers.context import CallContext, closing, current
from gym_serve.types.errors import BadRequest, EndpointMisconfigured, NotFound
from gym_serve.types.protocols import (
    apply_sampling,
    check_completion,
    completion_tokens,
    inline_audio,
    new_id,
    responses_to_chat,
)
from gym_serve.types.requests import JSON


class ChatModel(ChatServer, RowEndpointModel):
    """A model behind Chat Completions endpoints."""

    class Config(ChatServer.Config, RowEndpointModel.Config):
        inline_token_ids: bool = True
        """Ask for the ids in the answer itself (vLLM 0.10.2 and later). Off: the ids produced are
        read from the log probabilities, and those of the prompt from ``/tokenize``."""
        continue_tokens: bool = False
        """With ``return_token_ids``: begin every further prompt of an episode with exactly the tokens of the
        last call, and tokenize only what came after it. For vLLM 0.32 and later; a trainer's own endpoint
        that finds the tokens on the messages does not need it."""
        return_weight_versions: bool = False
        """Ask the endpoint for the version of the weights behind each token (vLLM 0.33 and later). Else calls
        carry the version that the trainer told (`Policy.update_weights`)."""
        replace_developer_role_with_system: bool = False
        """For chat templates that do not know the developer role."""
        max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
        """How the endpoint calls the limit of an answer; OpenAI's reasoning models refuse ``max_tokens``."""
        sequential_reasoning_allowed: bool = True
        """Off: a turn of reasoning alone is not continued, but ends as ``content_filter``."""

    config: Config

    def params_of(self, body: JSON) -> JSON:
        return {**body, "model": self.model_name}

    async def count_tokens(self, body: JSON) -> int:
        chat = self._backend_body(responses_to_chat(body, reasoning=self.config.reasoning_input))
        try:
            tokens = await self._tokens(chat, current().within(self.config.timeout))
        except (BadRequest, EndpointMisconfigured) as error:
            raise NotFound(f"{self.name} cannot count tokens: {error.message}") from None
        if not isinstance(tokens, list):
            raise NotFound(f"{self.name} cannot count tokens: its endpoint has no /tokenize as vLLM does")
        return len(tokens)

    async def complete_chat(self, chat: JSON) -> JSON | None:
        if self._is_filtered(chat):
            return _filtered(self.model_name)
        call = current().within(self.config.timeout)
        chat = await self._prepared(chat, call)
        prompt = chat if self.config.return_token_ids else {}
        answer = self._upstream.post("/chat/completions", chat, call)
        del chat  # it is 1.5 KB for each of the thousands of calls that wait here
        return await self._checked(await answer, prompt, call)

    async def stream_completion(self, chat: JSON) -> AsyncGenerator[JSON | Whole, None]:
        if self._is_filtered(chat):
            yield Whole(_filtered(self.model_name))
            return
        call = current().within(self.config.timeout)
        chat = await self._prepared(chat, call)
        body = {**chat, "stream": True, "stream_options": {"include_usage": True}}
        async with closing(joined(self._upstream.stream("/chat/completions", body, call))) as items:
            async for item in items:
                if isinstance(item, Whole):
                    yield Whole(await self._checked(item.answer, chat, call))
                else:
                    yield item

    def _is_filtered(self, chat: JSON) -> bool:
        return not self.config.sequential_reasoning_allowed and _ends_in_reasoning(chat)

    async def _prepared(self, chat: JSON, call: CallContext) -> JSON:
        chat = self._backend_body(chat)
        if self.config.return_token_ids and self.config.continue_tokens:
            return await self._continued(chat, call)
        return chat

    async def _checked(self, completion: JSON | None, prompt: JSON, call: CallContext) -> JSON | None:
        """A completion with the tokens that the settings ask for."""
        if completion is None:
            return None
        check_completion(completion)
        if not self.config.return_token_ids or completion_tokens(completion) is not None:
            return completion
        if completion.get("prompt_token_ids") is None:
            completion = {**completion, "prompt_token_ids": await self._tokens(prompt, call)}
        if completion_tokens(completion) is None:
            raise EndpointMisconfigured(
                "return_token_ids is on, but the endpoint sends no token ids with its answers: it takes "
                "vLLM's return_token_ids or return_tokens_as_token_ids, and logprobs"
            )
        return completion

    async def _continued(self, body: JSON, call: CallContext) -> JSON:
        """The body whose prompt is in tokens, where its messages carry some (vLLM takes them so)."""

        async def render(messages: list[JSON]) -> list[int]:
            tokens = await self._tokens({**body, "messages": messages}, call)
            if not isinstance(tokens, list):
                lack = "the endpoint has no /tokenize as vLLM does"
                raise EndpointMisconfigured(f"continue_tokens is on, but {lack}")
            return tokens

        prompt = await continued_prompt(body["messages"], render)
        body = {**body, "messages": without_tokens(body["messages"])}
        if prompt is not None:
            transfer = body.get("kv_transfer_params") or {}
            body["kv_transfer_params"] = {**transfer, "prompt_token_ids": prompt}
        return body

    async def _tokens(self, body: JSON, call: CallContext) -> Any:
        """The prompt of a body in tokens, by the endpoint's ``/tokenize``; None where it has none."""
        prompt = {key: body[key] for key in PROMPT_KEYS if key in body}
        tokenized = await self._upstream.post("/tokenize", prompt, call, below_v1=False)
        return tokenized.get("tokens") if isinstance(tokenized, dict) else None

    def _backend_body(self, chat: JSON) -> JSON:
        config = self.config
        chat = {**inline_audio(chat), "model": self.model_name}
        if config.replace_developer_role_with_system:
            chat["messages"] = [
                {**message, "role": "system"} if message.get("role") == "developer" else message
                for message in chat["messages"]
            ]
        if config.return_token_ids:
            chat.update(logprobs=True, top_logprobs=0, return_tokens_as_token_ids=True)
            if config.inline_token_ids:
                chat["return_token_ids"] = True
        if config.return_weight_versions:
            chat["return_weight_versions"] = True
        body = apply_sampling(
            chat,
            extra_body=config.extra_body,
            chat_template_kwargs=config.chat_template_kwargs,
            overrides=config.sampling_overrides,
        )
        for field in ("max_completion_tokens", "max_tokens"):
            if field != config.max_tokens_field and (limit := body.pop(field, None)) is not None:
                body.setdefault(config.max_tokens_field, limit)
        if config.return_token_ids and body.get("n") not in (None, 1):
            raise BadRequest("n: token ids are returned for one choice only")
        if body.get("top_logprobs") is None:
            body.pop("top_logprobs", None)
        elif body["top_logprobs"]:
            body["logprobs"] = True  # Responses implies it, chat refuses the one without the other.
        if body.get("stream"):
            body["stream"] = False  # Streams are made from the finished answer.
            body.pop("stream_options", None)
        return body


def _ends_in_reasoning(chat: JSON) -> bool:
    last = chat["messages"][-1] if chat["messages"] else {}
    return last.get("role") == "assistant" and not (last.get("content") or last.get("tool_calls"))


def _filtered(model: str) -> JSON:
    message = {"role": "assistant", "content": None}
    choice = {"index": 0, "message": message, "finish_reason": "content_filter", "logprobs": None}
    head = {"id": new_id("chatcmpl"), "object": "chat.completion", "created": int(time.time())}
    return {**head, "model": model, "choices": [choice]}

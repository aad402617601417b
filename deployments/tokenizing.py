"""`TokenizingModel`: the engine is elsewhere and knows tokens only; chats are rendered and parsed here.

This server does what stands between a conversation and such an engine: it renders the chat template, keeps
the exact tokens from turn to turn, and parses tool calls. It loads a tokenizer, and no model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from gym_serve.deployments.chat_streams import Whole
from gym_serve.deployments.chat_templates import completion, entries, may_call, render
from gym_serve.deployments.hf_engine.tool_calls import CALL_OPENING, split_calls
from gym_serve.deployments.token_model import TokenModel
from gym_serve.types.errors import BadRequest, GraphError, Unavailable
from gym_serve.types.protocols import new_id
from gym_serve.types.protocols.tokens import VERSIONS_KEY
from gym_serve.types.requests import JSON

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "seed", "ignore_eos", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words"),
    *("allowed_token_ids", "structured_outputs", "response_format"),
)


class ToolParser(NamedTuple):
    """How a model writes tool calls: ``split`` takes an answer's text and its chat body, and returns the text
    without its calls, and the calls; ``special_tokens`` says whether it has to see those in the text.
    """

    split: Callable[[str, JSON], tuple[str, list[JSON]]]
    special_tokens: bool = False


class Generation(NamedTuple):
    """What an engine generated: tokens, that which ends the turn included, each with its natural-log
    probability. ``versions`` of the weights are ``[{version, start, end}]``; ``cached`` counts tokens of the
    prompt.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    versions: list[JSON] | None = None
    cached: int | None = None


class TokenizingModel(TokenModel):
    """A model whose engine, elsewhere, takes tokens and gives tokens; a subclass writes `generate`."""

    class Config(TokenModel.Config):
        tokenizer: str
        """Folder or name of the policy's tokenizer."""
        chat_template: str | None = None
        """File of a chat template to use instead of the tokenizer's."""
        tool_call_parser: str | None = "hermes"
        """How the policy writes tool calls: ``hermes`` (Qwen's too), or another of vLLM's names, for which
        vLLM is needed where the server runs; None leaves them in the text."""
        max_model_len: int | None = Field(None, ge=1)
        """Most tokens of a prompt and its generation together; None leaves that to the engine."""

    config: Config

    def __init__(self, *, name: str | None = None, **settings: Any) -> None:
        super().__init__(name=name, **settings)
        self._tokenizer: Any = None
        self._parser: ToolParser | None = None

    async def generate(self, prompt: list[int], sampling: JSON) -> Generation | None:
        """What the engine generates, by vLLM's sampling parameters; None if the prompt does not fit its
        context.
        """
        raise NotImplementedError

    async def start(self) -> None:
        await super().start()
        self._tokenizer = await asyncio.to_thread(self.load_tokenizer)
        self.ends = frozenset(filter(lambda end: end is not None, [self._tokenizer.eos_token_id]))
        if (parser := self.config.tool_call_parser) is not None:
            self._parser = await asyncio.to_thread(tool_parser, parser, self._tokenizer)

    def load_tokenizer(self) -> Any:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            needed = self.requires["transformers"]
            raise GraphError(f"{self.name} needs {error.name}: pip install '{needed}'") from None
        tokenizer = AutoTokenizer.from_pretrained(self.config.tokenizer)
        if self.config.chat_template is not None:
            tokenizer.chat_template = Path(self.config.chat_template).read_text("utf-8")
        return tokenizer

    async def complete(self, chat: JSON, prompt: list[int] | None) -> JSON | None:
        if chat.get("n") not in (None, 1):
            raise BadRequest(f"`n` must be 1: {self.name} gives one choice for a call")
        if prompt is None:
            prompt = await self.render(chat, chat["messages"])
        sampling = {key: chat[key] for key in _SAMPLING if chat.get(key) is not None}
        limit = chat.get("max_completion_tokens") or chat.get("max_tokens")
        if (context := self.config.max_model_len) is not None:
            if len(prompt) >= context:
                return None
            limit = min(limit or context, context - len(prompt))
        if limit is not None:
            sampling["max_tokens"] = limit
        generation = await self.generate(prompt, sampling)
        return None if generation is None else self.completion_of(chat, prompt, generation)

    async def stream(self, chat: JSON, prompt: list[int] | None) -> AsyncGenerator[JSON | Whole, None]:
        yield Whole(await self.complete(chat, prompt))

    async def render(self, chat: JSON, messages: list[JSON]) -> list[int]:
        if self._tokenizer is None:
            raise Unavailable("the tokenizer is not loaded: call start() first")
        return await asyncio.to_thread(render, self._tokenizer, chat, messages)

    def completion_of(self, chat: JSON, prompt: list[int], generation: Generation) -> JSON:
        tokens, logprobs, finish, versions, cached = generation
        words = tokens[:-1] if tokens and tokens[-1] in self.ends else tokens
        text, calls = self._text(chat, words), list[JSON]()
        if self._parser is not None and may_call(chat):
            written = self._text(chat, words, special=True) if self._parser.special_tokens else text
            rest, calls = self._parser.split(written, chat)
            text = rest if calls else text
        content = entries(self._tokenizer, tokens, logprobs)
        scores = {"logprobs": {"content": content}, "token_ids": tokens}
        if versions:
            scores[VERSIONS_KEY] = versions
        model = self.params_of({})["model"]
        head = {"id": new_id("chatcmpl"), "created": int(time.time()), "model": model}
        finished = completion(head, prompt, (text, calls), finish, scores)
        if cached is not None:
            finished["usage"]["prompt_tokens_details"] = {"cached_tokens": cached}
        return finished

    def _text(self, chat: JSON, tokens: list[int], *, special: bool = False) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=not special)
        stops = chat.get("stop")
        for stop in [stops] if isinstance(stops, str) else stops or ():
            text = text.partition(stop)[0]
        return text


def tool_parser(name: str, tokenizer: Any) -> ToolParser:
    """The parser of tool calls of one of vLLM's names. Raises GraphError: vLLM is not here, or has none of
    this name.
    """
    if name == "hermes":
        special_tokens = CALL_OPENING in getattr(tokenizer, "all_special_tokens", ())
        return ToolParser(lambda text, chat: split_calls(text), special_tokens)
    try:
        from gym_serve.deployments.vllm_engine import _vllm

        split, special_tokens = _vllm.tool_parser(name, tokenizer)
    except ModuleNotFoundError as error:
        raise GraphError(
            f"tool_call_parser {name!r} needs {error.name} where the server runs: pip install "
            "'gym-serve[vllm]'; `hermes` needs none"
        ) from None
    return ToolParser(split, special_tokens)

"""`TokenizingModel`: the engine is elsewhere and knows tokens only; chats are rendered and parsed here.

This server does what stands between a conversation and such an engine: it renders the chat template, keeps
the exact tokens from turn to turn, and parses tool calls. It loads a tokenizer, and no model.

Tool calls in a text, in the style of Hermes and Qwen: ``<tool_call>{"name", "arguments"}</tool_call>``.

What does not fit this form stays in the text: it is the policy's own mistake, for the verifier to see.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from gym_serve.deployments.chat_streams import Whole
from gym_serve.deployments.token_model import TokenModel
from gym_serve.servers.transport import encode
from gym_serve.types.errors import BadRequest, GraphError, Unavailable
from gym_serve.types.exact import exact_json
from gym_serve.types.media import opened, pictures_of
from gym_serve.types.protocols import new_id
from gym_serve.types.protocols.tokens import VERSIONS_KEY
from gym_serve.types.requests import JSON

_PICTURES = "gym-serve[pictures]"
CALL_OPENING = "<tool_call>"
CALL_CLOSE = "</tool_call>"


def split_calls(text: str) -> tuple[str, list[JSON]]:
    """The text without its calls, and the calls as chat messages have them. Linear in the text's length."""
    rest: list[str] = []
    calls: list[JSON] = []
    at = 0
    while (start := text.find(CALL_OPENING, at)) >= 0:
        end = text.find(CALL_CLOSE, start)
        if end < 0:
            break
        call = _call(text[start + len(CALL_OPENING) : end])
        if call is None:
            rest.append(text[at : end + len(CALL_CLOSE)])
        else:
            rest.append(text[at:start])
            calls.append(call)
        at = end + len(CALL_CLOSE)
    rest.append(text[at:])
    left = "".join(rest)
    return (left.rstrip() if calls else left), calls


def _call(text: str) -> JSON | None:
    try:
        call = exact_json(text.encode("utf-8", "replace"))
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = encode(arguments).decode()
    return {
        "id": new_id("call"),
        "type": "function",
        "function": {"name": call["name"], "arguments": arguments},
    }


_OF_THE_ROW = frozenset({"add_generation_prompt", "continue_final_message", "documents"})
"""Arguments of `apply_chat_template` that a request may set."""
_TEXTS = ("text", "refusal", "input_text", "output_text", None)


def render(tokenizer: Any, chat: JSON, messages: list[JSON], processor: Any = None) -> list[int]:
    """Tokens of a conversation by the model's template, with the opening of the next turn. Raises BadRequest:
    the template refuses it, there is none, or a message has media that the model does not read.

    ``processor``: that of a model that reads pictures; None for one that reads text alone.
    """
    templates = processor or tokenizer
    arguments = chat.get("chat_template_kwargs") or {}
    # What is no variable of a template, but decides what its rendering does; another template among them.
    reserved = {"chat_template", *signature(tokenizer.apply_chat_template).parameters} - _OF_THE_ROW
    taken = reserved & arguments.keys()
    if taken:
        raise BadRequest(f"chat_template_kwargs: {', '.join(sorted(taken))} cannot be set by a request")
    mark = None if processor is None else str(processor.image_token)
    plain = [_plain(message, f"messages[{index}]", mark) for index, message in enumerate(messages)]
    try:
        text = templates.apply_chat_template(
            plain, tools=chat.get("tools"), tokenize=False, **{"add_generation_prompt": True, **arguments}
        )
    except Exception as error:  # a template is code of the model's author, and may raise anything
        raise BadRequest(f"the chat template refuses this: {type(error).__name__}: {error}") from None
    if urls := pictures_of(messages):
        try:
            images = [opened(url) for url in urls]
            tokens: list[int] = processor(text=[text], images=images, add_special_tokens=False)["input_ids"][
                0
            ]
            return list(tokens)
        except ValueError as error:
            raise BadRequest(f"the chat template does not show all pictures: {error}") from None
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def may_call(chat: JSON) -> bool:
    """Whether the answer to this body may call tools."""
    return bool(chat.get("tools")) and chat.get("tool_choice") != "none"


def entries(tokenizer: Any, tokens: list[int], log_probs: list[float]) -> list[JSON]:
    """The ``logprobs.content`` of a choice."""
    names = tokenizer.convert_ids_to_tokens(tokens)
    return [
        {"token": name, "logprob": log_prob, "bytes": None, "top_logprobs": []}
        for name, log_prob in zip(names, log_probs, strict=True)
    ]


def completion(
    head: JSON, prompt: list[int], content: tuple[str, list[JSON]], finish: str, scores: JSON
) -> JSON:
    """A chat completion of one choice: ``content`` is a text and calls; ``scores`` are fields of the choice,
    ``token_ids`` among them.
    """
    text, calls = content
    message: JSON = {"role": "assistant", "content": text or (None if calls else "")}
    choice = {
        "index": 0,
        "message": {**message, "tool_calls": calls} if calls else message,
        "finish_reason": "tool_calls" if calls and finish == "stop" else finish,
        **scores,
    }
    read, written = len(prompt), len(scores["token_ids"])
    usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    return {
        **head,
        "object": "chat.completion",
        "choices": [choice],
        "prompt_token_ids": prompt,
        "usage": usage,
    }


def _plain(message: JSON, where: str, mark: str | None) -> JSON:
    """A message as templates want it: text as a string, arguments of calls as objects. ``mark``: that of a
    picture, for a model that reads them."""
    content = message.get("content")
    if mark is not None:
        content = _marked(content, mark, where)
    elif isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]
        if media := next((p.get("type") for p in parts if p.get("type") not in _TEXTS), None):
            raise BadRequest(f"{where}: this model reads text only, got a part of type {str(media)[:40]!r}")
        content = "".join(str(part.get("text") or part.get("refusal") or "") for part in parts)
    plain = {**message, "content": content}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [{**c, "function": _decoded(c["function"])} for c in calls]
    return plain


def _marked(content: Any, mark: str, where: str) -> list[JSON]:
    """The content of a chat message as templates of models with eyes want it: texts, and marks of pictures.
    A text that spells the mark would shift the pictures, so it is written with a space in it. Raises
    BadRequest: it has media of another kind."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    marked: list[JSON] = []
    for part in parts:
        text = part.get("text") or part.get("refusal")
        if isinstance(text, str):
            marked.append({"type": "text", "text": text.replace(mark, f"{mark[:1]} {mark[1:]}")})
        elif part.get("type") == "image_url":
            marked.append({"type": "image"})
        elif text is not None or part.get("type") not in ("text", "refusal", "input_text", "output_text"):
            kind = str(part.get("type"))[:40]
            raise BadRequest(f"{where}: this model reads text and pictures, got a part of type {kind!r}")
    return marked


def _decoded(function: JSON) -> JSON:
    try:
        arguments = exact_json(function.get("arguments") or "{}")
    except ValueError:
        return function
    return {**function, "arguments": arguments} if isinstance(arguments, dict) else function


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
        pictures: bool = False
        """Whether the policy reads pictures: its processor is loaded beside the tokenizer."""
        max_model_len: int | None = Field(None, ge=1)
        """Most tokens of a prompt and its generation together; None leaves that to the engine."""

    config: Config

    def __init__(self, *, name: str | None = None, **settings: Any) -> None:
        super().__init__(name=name, **settings)
        self._tokenizer: Any = None
        self._processor: Any = None
        self._parser: ToolParser | None = None

    async def generate(self, prompt: list[int], sampling: JSON, pictures: Sequence[str]) -> Generation | None:
        """What the engine generates, by vLLM's sampling parameters; None if the prompt does not fit its
        context. ``pictures`` of the prompt are data URLs; a picture's tokens stand in the prompt.
        """
        raise NotImplementedError

    async def start(self) -> None:
        await super().start()
        self._tokenizer = await asyncio.to_thread(self.load_tokenizer)
        if self.config.pictures:
            self._processor = await asyncio.to_thread(self.load_processor)
        self.ends = frozenset(filter(lambda end: end is not None, [self._tokenizer.eos_token_id]))
        if (parser := self.config.tool_call_parser) is not None:
            self._parser = await asyncio.to_thread(tool_parser, parser, self._tokenizer)

    def load_processor(self) -> Any:
        """That of ``transformers`` for a policy that reads pictures."""
        try:
            from transformers import AutoProcessor

            processor = AutoProcessor.from_pretrained(self.config.tokenizer)
        except ImportError as error:
            raise GraphError(f"{self.name}: pictures need {error.name}: pip install '{_PICTURES}'") from None
        processor.chat_template = self._tokenizer.chat_template or processor.chat_template
        return processor

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
        generation = await self.generate(prompt, sampling, pictures_of(chat["messages"]))
        return None if generation is None else self.completion_of(chat, prompt, generation)

    async def stream(self, chat: JSON, prompt: list[int] | None) -> AsyncGenerator[JSON | Whole, None]:
        yield Whole(await self.complete(chat, prompt))

    async def render(self, chat: JSON, messages: list[JSON]) -> list[int]:
        if self._tokenizer is None:
            raise Unavailable("the tokenizer is not loaded: call start() first")
        return await asyncio.to_thread(render, self._tokenizer, chat, messages, self._processor)

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

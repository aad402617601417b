"""`TokenModel`: a model that takes and gives tokens, so that the prompt of a later turn is exact.

The next prompt is what the engine saw and made, then what came after. Decoding a generation and encoding
it again does not give the same tokens, so a turn that came from an engine is never rendered again: only
the messages after it are, in their place of the whole conversation. Where they begin is found without
knowing the template: the conversation is rendered with two different words in the place of the turn. What
both renderings end in comes after it.

`ChatServer`: base class of the models that answer chat completions, by an endpoint or an engine inside.

A subclass completes chat bodies, whole (`complete_chat`) and as a stream (`stream_completion`). This class
makes Responses, Chat Completions and their streams of that, with the settings that all such models have.

`EngineModel`: a model whose engine runs inside the server: exact tokens, and weights that change.

``weight_version`` beside tokens is the version with which the call *began*, the oldest that any of them can
have. One update at a time: the engine pauses, takes the weights, forgets what it cached, and goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gym_serve.deployments.chat_streams import Whole, chat_stream, response_stream
from gym_serve.servers import ModelServer
from gym_serve.servers.base import Operation, missing_path
from gym_serve.servers.context import closing
from gym_serve.servers.model import HoldMode, PauseMode
from gym_serve.types.errors import BadRequest, InvalidRequest, Unavailable
from gym_serve.types.protocols import (
    TOKEN_KEYS,
    ReasoningForm,
    apply_sampling,
    chat_to_response,
    check_completion,
    completion_tokens,
    context_overflow_response,
    inline_audio,
    response_to_chat,
    responses_to_chat,
)
from gym_serve.types.protocols.tokens import VERSIONS_KEY
from gym_serve.types.requests import JSON, problems_of


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


Render = Callable[[list[JSON]], Awaitable[list[int]]]
"""Token ids of a conversation, the opening of the next turn included."""

_PROMPT, _GENERATION, _ = TOKEN_KEYS
_WORDS = ("A", "B")


async def continued_prompt(
    messages: Sequence[JSON], render: Render, ends: Collection[int] = ()
) -> list[int] | None:
    """The prompt that begins with exactly the tokens of the last turn that carries them (docs/formats.md,
    Training tokens); None where no message does. ``ends`` are the tokens that end a turn; by default the one
    with which the template ends an assistant's. Raises BadRequest: the tokens are no lists of integers.
    """
    turn = next((i for i in reversed(range(len(messages))) if messages[i].get(_PROMPT) is not None), None)
    if turn is None:
        return None
    context = [*_ids(messages[turn], _PROMPT, turn), *_ids(messages[turn], _GENERATION, turn)]
    stand_ins = [{"role": "assistant", "content": word} for word in _WORDS]
    both = [without_tokens([*messages[:turn], one, *messages[turn + 1 :]]) for one in stand_ins]
    tail = _common_end(*[await render(conversation) for conversation in both])
    end = next((i for i, token in enumerate(tail) if token in ends), 0)
    # A turn that was cut off lacks the token that ends it.
    ended = bool(context and tail) and (context[-1] in ends or context[-1] == tail[end])
    return context + tail[end + ended :]


def without_tokens(messages: Sequence[JSON]) -> list[JSON]:
    """The messages without their token bundles."""
    return [{key: value for key, value in m.items() if key not in TOKEN_KEYS} for m in messages]


def _common_end(one: list[int], other: list[int]) -> list[int]:
    length = 0
    while length < min(len(one), len(other)) and one[-1 - length] == other[-1 - length]:
        length += 1
    return one[len(one) - length :]


def _ids(message: JSON, key: str, turn: int) -> list[int]:
    ids: Any = message.get(key)
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise BadRequest(f"messages[{turn}].{key} must be a list of token ids")
    return ids


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


_FORM = ConfigDict(extra="forbid", hide_input_in_errors=True)


class _Update(BaseModel):
    model_config = _FORM

    path: str
    version: str = Field(min_length=1)
    mode: PauseMode = "keep"


class _Pause(BaseModel):
    model_config = _FORM

    mode: PauseMode = "keep"


def missing_model(setting: str, model: str) -> Iterator[str]:
    """A sentence for `Server.preflight` if a setting names a folder that is not here."""
    if model.startswith(("/", "./", "../", "~")):
        yield from missing_path(setting, Path(model).expanduser())


class EngineModel(TokenModel):
    """A model with an engine inside; a subclass writes `running`, `load`, `pause`, `resume` and a
    `TokenModel`'s methods.
    """

    class Config(TokenModel.Config):
        weight_version: str = "0"
        """Version of the weights that it starts with."""
        weight_updates: bool = False
        """Take new weights while running (`Policy.update_weights`). Every client of the graph can then
        replace         the weights, so give the graph an ``auth_token``."""

    config: Config

    def __init__(self, *, name: str | None = None, **settings: Any) -> None:
        super().__init__(name=name, **settings)
        self.weight_version: str = self.config.weight_version
        self._updating = asyncio.Lock()
        self._broken: str | None = None
        self._held = False

    @property
    def running(self) -> int:
        """Generations that the engine has to do, those included that wait in it."""
        raise NotImplementedError

    async def load(self, weights: Path | bytes) -> None:
        """Replace the weights, while paused, by safetensors: a folder, a file, or its bytes. Raises
        BadRequest: they are not those of this model; nothing was changed.
        """
        raise NotImplementedError

    async def pause(self, mode: PauseMode) -> None:
        raise NotImplementedError

    async def resume(self) -> None:
        raise NotImplementedError

    async def hold(self, mode: HoldMode) -> None:
        self._held = True
        await super().hold(mode)
        if mode == "keep":
            async with self._updating:
                await self.pause("keep")

    async def release(self) -> None:
        self._held = False
        async with self._updating:
            await self.resume()
        await super().release()

    async def update_weights(
        self, weights: Path | bytes | None, version: str, mode: PauseMode = "keep"
    ) -> None:
        """Pause, replace the weights, and go on with ``version``."""
        if weights is None:
            raise BadRequest(f"{self.name} has its engine here: give `path` or `tensors` with a version")
        if not self.config.weight_updates:
            raise BadRequest(f"{self.name} takes no weights: set weight_updates in the graph")
        async with self._updating:
            try:
                await self.pause(mode)
                try:
                    await self.load(weights)
                    self.weight_version = version
                finally:
                    if not self._held:
                        await self.resume()
            except BadRequest:
                raise
            except Exception as error:  # an engine with half of the weights; what it raises is its own
                self._broken = f"loading the weights {version!r} failed: {error}"
                raise Unavailable(f"{self._broken}; the replica is replaced") from error

    async def check_health(self) -> None:
        if self._broken is not None:
            raise Unavailable(self._broken)

    def operations(self) -> dict[str, Operation]:
        operations = super().operations()
        answer = {"type": "object"}
        operations["load"] = Operation(self._op_load, "Generations in the engine", None, answer)
        if self.config.weight_updates:
            own = {
                "update": (self._op_update, "Load weights from a path", _Update.model_json_schema()),
                "pause": (self._op_pause, "Stop generating", _Pause.model_json_schema()),
                "resume": (self._op_resume, "Go on generating", None),
            }
            operations |= {f"weights/{op}": Operation(*parts, answer) for op, parts in own.items()}
        return operations

    async def _prepared(self, chat: JSON) -> tuple[JSON, list[int] | None]:
        if self._broken is not None:
            raise Unavailable(self._broken)
        return await super()._prepared(chat)

    async def _op_load(self, body: Any) -> JSON:
        return {"running": self.running, "weight_version": self.weight_version}

    async def _op_update(self, body: Any) -> JSON:
        update = _checked(_Update, body)
        await self.update_weights(Path(update.path), update.version, update.mode)
        return {"weight_version": self.weight_version}

    async def _op_pause(self, body: Any) -> JSON:
        await self.pause(_checked(_Pause, body).mode)
        return {"weight_version": self.weight_version}

    async def _op_resume(self, body: Any) -> JSON:
        await self.resume()
        return {"weight_version": self.weight_version}


def _checked(model: type[Any], body: Any) -> Any:
    try:
        return model.model_validate(body or {})
    except ValidationError as error:
        raise InvalidRequest(problems_of(error, "body")[0]) from None

"""`EngineModel`: a model whose engine runs inside the server: exact tokens, and weights that change.

- Every call carries its tokens, and the prompt of a later turn begins with exactly those
  (`gym_serve.deployments.token_prompts`).
- Weights have a version. What was generated after an update says so: ``weight_version`` beside the
  tokens is the version with which the call *began*, the oldest that any of its tokens can have.
- One update at a time: the engine pauses, takes the weights, forgets what it cached with the old ones,
  and goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gym_serve.deployments.chat_base import ChatServer
from gym_serve.deployments.chat_streams import Whole
from gym_serve.deployments.token_prompts import continued_prompt, without_tokens
from gym_serve.servers.base import Operation, missing_path
from gym_serve.servers.context import closing
from gym_serve.servers.model import PauseMode
from gym_serve.types.errors import BadRequest, InvalidRequest, Unavailable
from gym_serve.types.protocols import (
    apply_sampling,
    check_completion,
    inline_audio,
)
from gym_serve.types.requests import JSON

__all__ = ["EngineModel", "missing_model"]

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


class EngineModel(ChatServer):
    """Base class of the models with an engine inside.

    A subclass writes `complete`, `stream`, `render`, `running`, `load`, `pause` and `resume`.
    """

    class Config(ChatServer.Config):
        """Settings of every engine."""

        return_token_ids: bool = True
        """Put the token ids and log probabilities of every call on its last output item, and continue
        from them. Off for judges, whose tokens nobody trains on."""
        weight_version: str = "0"
        """Version of the weights that it starts with."""
        weight_updates: bool = False
        """Take new weights while running (`Gym.update_weights`). Whoever may call the graph may then call
        this as well: give the graph an ``auth_token``."""

    config: Config

    def __init__(self, *, name: str | None = None, **settings: Any) -> None:
        super().__init__(name=name, **settings)
        self.weight_version = self.config.weight_version
        self.ends: frozenset[int] = frozenset()
        """Ids of the tokens that end a turn; set when the engine starts."""
        self._updating = asyncio.Lock()
        self._broken: str | None = None

    async def complete(self, chat: JSON, prompt: list[int] | None) -> JSON | None:
        """The chat completion of a body, with token ids where ``return_token_ids`` is on.

        Args:
            chat: body of ``POST /v1/chat/completions``, all sampling parameters merged in.
            prompt: the prompt's tokens, instead of the messages'.

        Returns:
            None if the prompt does not fit the model's context.
        """
        raise NotImplementedError

    def stream(self, chat: JSON, prompt: list[int] | None) -> AsyncIterator[JSON | Whole]:
        """`complete` as a stream: the chunks while they are generated, and then the whole completion.

        It may give the completion alone. Closing the generator ends the generation.
        """
        raise NotImplementedError

    async def render(self, chat: JSON, messages: list[JSON]) -> list[int]:
        """Tokens of ``messages`` and the opening of the next turn, with the tools of ``chat``."""
        raise NotImplementedError

    @property
    def running(self) -> int:
        """Generations that the engine has to do, those included that wait in it."""
        raise NotImplementedError

    async def load(self, weights: Path | bytes) -> None:
        """Replace the weights, while paused.

        Args:
            weights: a folder or file of safetensors, or the bytes of such a file.

        Raises:
            BadRequest: they are not those of this model; nothing was changed.
        """
        raise NotImplementedError

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating; calls wait."""
        raise NotImplementedError

    async def resume(self) -> None:
        """Go on."""
        raise NotImplementedError

    async def update_weights(self, weights: Path | bytes, version: str, mode: PauseMode = "keep") -> None:
        """Pause, replace the weights, and go on with ``version``.

        Raises:
            BadRequest: the weights are not those of this model; it goes on with the old ones.
            Unavailable: the engine broke while loading; its next health check fails.
        """
        if not self.config.weight_updates:
            raise BadRequest(f"{self.name} takes no weights: set weight_updates in the graph")
        async with self._updating:
            try:
                await self.pause(mode)
                try:
                    await self.load(weights)
                    self.weight_version = version
                finally:
                    await self.resume()
            except BadRequest:
                raise
            except Exception as error:  # an engine with half of the weights; what it raises is its own
                self._broken = f"loading the weights {version!r} failed: {error}"
                raise Unavailable(f"{self._broken}; the replica is replaced") from error

    async def check_health(self) -> None:
        """See `Server.check_health`."""
        if self._broken is not None:
            raise Unavailable(self._broken)

    def operations(self) -> dict[str, Operation]:
        operations = super().operations()
        answer = {"type": "object"}
        tokenize = Operation(self._op_tokenize, "Tokens of a conversation", {"type": "object"}, answer)
        operations["tokenize"] = tokenize
        operations["load"] = Operation(self._op_load, "Generations in the engine", None, answer)
        if self.config.weight_updates:
            update, pause = _Update.model_json_schema(), _Pause.model_json_schema()
            operations |= {
                "weights/update": Operation(self._op_update, "Load weights from a path", update, answer),
                "weights/pause": Operation(self._op_pause, "Stop generating", pause, answer),
                "weights/resume": Operation(self._op_resume, "Go on generating", None, answer),
            }
        return operations

    def metadata(self) -> JSON:
        """See `ChatServer.metadata`: the version of the weights."""
        return {"weight_version": self.weight_version}

    def params_of(self, body: JSON) -> JSON:
        """See `ChatServer.params_of`."""
        return {**body, "model": body.get("model") or self.name}

    async def complete_chat(self, chat: JSON) -> JSON | None:
        """See `ChatServer.complete_chat`."""
        completion = await self.complete(*await self._prepared(chat))
        if completion is not None:
            check_completion(completion)
        return completion

    async def stream_completion(self, chat: JSON) -> AsyncGenerator[JSON | Whole, None]:
        """See `ChatServer.stream_completion`."""
        async with closing(self.stream(*await self._prepared(chat))) as items:
            async for item in items:
                if isinstance(item, Whole) and item.answer is not None:
                    check_completion(item.answer)
                yield item

    async def _prepared(self, chat: JSON) -> tuple[JSON, list[int] | None]:
        """The body and the tokens of the prompt, as `complete` takes them."""
        if self._broken is not None:
            raise Unavailable(self._broken)
        body = self._merged(chat)
        prompt = None
        if self.config.return_token_ids:
            if body.get("n") not in (None, 1):
                raise BadRequest("n: token ids are returned for one choice only; see return_token_ids")
            prompt = await self.prompt_of(body)
        body["messages"] = without_tokens(body["messages"])
        return body, prompt

    def _merged(self, chat: JSON) -> JSON:
        """A body with the sampling of row and deployment."""
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
        """See `ModelServer.count_tokens`."""
        return len(await self._prompt(self._merged(self.chat_body(body))))

    async def _op_tokenize(self, body: Any) -> JSON:
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            raise InvalidRequest("messages: a list of messages is missing")
        tokens = await self._prompt(body)
        return {"tokens": tokens, "count": len(tokens)}

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
        first = error.errors(include_input=False)[0]
        raise InvalidRequest(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None

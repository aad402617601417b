"""`hf_engine`: an embedded engine on ``transformers``, for machines without a GPU and for tests.

It starts in seconds, and its default is a tiny model that is made on the spot. It has no paged cache:
policies worth training run on `vllm_engine`.

An embedded engine on ``transformers``, for machines without a GPU and for tests (see `server`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from gym_serve.deployments.chat_streams import Whole
from gym_serve.deployments.hf_engine.sampling import Sampling
from gym_serve.deployments.hf_engine.streams import Stream, TextStream
from gym_serve.deployments.hf_engine.tiny_model import tiny_model
from gym_serve.deployments.token_model import EngineModel, missing_model
from gym_serve.deployments.tokenizing import CALL_OPENING, completion, entries, may_call, render, split_calls
from gym_serve.observe.timeline import TTFT, microseconds
from gym_serve.servers.context import closing, current
from gym_serve.servers.model import PauseMode
from gym_serve.types.errors import BadRequest, GraphError, Unavailable
from gym_serve.types.protocols import new_id
from gym_serve.types.requests import JSON

if TYPE_CHECKING:
    from gym_serve.deployments.hf_engine._batches import Batches, Row
    from gym_serve.deployments.hf_engine._grammar import Constraint, Grammars

__all__ = ["HFEngine"]


class _Generation(NamedTuple):
    prompt: list[int]
    sampling: Sampling
    limit: int
    constraint: Constraint | None


class HFEngine(EngineModel):
    """A causal language model of ``transformers`` in the server's own process."""

    requires: ClassVar[Mapping[str, str]] = {"torch": "gym-serve[hf]", "transformers": "gym-serve[hf]"}

    class Config(EngineModel.Config):
        model: str | None = None
        """Folder or name of the model; by default a tiny one with random weights, made at first use."""
        dtype: Literal["float32", "bfloat16", "float16"] = "float32"
        """Number format of the weights."""
        device: str = "cpu"
        """Device: ``cpu`` or ``cuda``."""
        max_model_len: int | None = Field(None, ge=1)
        """Most tokens of a prompt and its generation together; by default its positions."""
        max_batch: int = Field(64, ge=1)
        """Generations that start together at most."""

    config: Config

    @classmethod
    def preflight(cls, config: Config) -> Iterable[str]:
        yield from super().preflight(config)
        if config.model is not None:
            yield from missing_model("model", config.model)

    def __init__(self, *, name: str | None = None, **settings: Any) -> None:
        super().__init__(name=name, **settings)
        self._tokenizer: Any = None
        self._context = self._vocabulary = 0
        self._batches: Batches | None = None
        self._grammars: Grammars | None = None

    async def start(self) -> None:
        try:
            from gym_serve.deployments.hf_engine import _batches, _grammar
        except ImportError as error:
            raise GraphError(f"hf_engine needs {error.name}: pip install 'gym-serve[hf]'") from None
        config = self.config
        path = config.model or str(await asyncio.to_thread(tiny_model))
        model, tokenizer = await asyncio.to_thread(_batches.load_model, path, config.dtype, config.device)
        self._tokenizer = tokenizer
        self._context = config.max_model_len or int(model.config.max_position_embeddings)
        self._vocabulary = int(model.config.vocab_size)
        self.ends = _batches.end_tokens(model, tokenizer)
        self._grammars = _grammar.Grammars(tokenizer, self._vocabulary, self.ends)
        self._batches = _batches.Batches(model, self.ends, tokenizer.decode, config.max_batch)

    async def stop(self) -> None:
        if self._batches is not None:
            await self._batches.close()

    async def check_health(self) -> None:
        await super().check_health()
        if not self._engine.alive:
            raise Unavailable("the engine has stopped")

    async def complete(self, chat: JSON, prompt: list[int] | None) -> JSON | None:
        generation = await self._generation(chat, prompt)
        if generation is None:
            return None
        row = await self._engine.generate(*generation)
        if row.began is not None:
            current().notes[TTFT] = microseconds(row.began - row.asked)
        return self._finished(self._head(), chat, row)

    async def stream(self, chat: JSON, prompt: list[int] | None) -> AsyncGenerator[JSON | Whole, None]:
        generation = await self._generation(chat, prompt)
        if generation is None:
            yield Whole(None)
            return
        head, calls = self._head(), may_call(chat)
        ends = [*generation.sampling.stop, *([CALL_OPENING] if calls else [])]
        stream = Stream(head, TextStream(self._decode, ends, strip=calls), partial(self._scores, chat))
        async with closing(self._engine.stream(*generation)) as rows:
            async for row in rows:
                for chunk in stream.grown(row):
                    yield chunk
        finished = self._finished(head, chat, row)
        yield stream.end(row, finished)
        yield Whole(finished)

    async def _generation(self, chat: JSON, prompt: list[int] | None) -> _Generation | None:
        """What the engine has to generate; None if the prompt does not fit."""
        sampling = Sampling.of(chat)
        if prompt is None:
            prompt = await self.render(chat, chat["messages"])
        if any(token >= self._vocabulary for token in prompt):
            raise BadRequest(f"a token id of the prompt is none of this model's {self._vocabulary}")
        room = self._context - len(prompt)
        if room < 1 or not prompt:
            return None
        limit = min(room, sampling.max_tokens or room)
        assert self._grammars is not None
        return _Generation(prompt, sampling, limit, await asyncio.to_thread(self._grammars.constraint, chat))

    def _head(self) -> JSON:
        return {"id": new_id("chatcmpl"), "created": int(time.time()), "model": self.name}

    async def render(self, chat: JSON, messages: list[JSON]) -> list[int]:
        return render(self._tokenizer, chat, messages)

    async def load(self, weights: Path | bytes) -> None:
        from gym_serve.deployments.hf_engine import _batches

        model = self._engine.model
        tensors = await asyncio.to_thread(_batches.new_weights, model, weights)
        model.load_state_dict(tensors, strict=False)

    @property
    def running(self) -> int:
        return self._engine.running

    async def pause(self, mode: PauseMode) -> None:
        await self._engine.pause(abort=mode == "abort")

    async def resume(self) -> None:
        self._engine.resume()

    @property
    def _engine(self) -> Batches:
        if self._batches is None:
            raise Unavailable("the engine is not loaded: call start() first")
        return self._batches

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _finished(self, head: JSON, chat: JSON, row: Row) -> JSON:
        text = self._decode(row.tokens)
        for stop in row.sampling.stop:
            text = text.partition(stop)[0]
        parts = split_calls(text) if may_call(chat) else (text, list[JSON]())
        return completion(head, row.prompt, parts, row.finish, self._scores(chat, row, 0, len(row.tokens)))

    def _scores(self, chat: JSON, row: Row, begin: int, end: int) -> JSON:
        tokens = row.tokens[begin:end]
        content = entries(self._tokenizer, tokens, row.log_probs[begin:end])
        wanted = self.config.return_token_ids or bool(chat.get("logprobs"))
        return {"logprobs": {"content": content} if wanted else None, "token_ids": tokens}

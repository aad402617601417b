"""`BatchedEngine`: an engine that gives logits, and leaves the rest to this class: the chat template,
sampling, structured outputs, streams and tool calls.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import Field

from gym_serve.deployments.batched.sampling import Sampling
from gym_serve.deployments.batched.streams import Stream, TextStream
from gym_serve.deployments.chat_streams import Whole
from gym_serve.deployments.token_model import EngineModel
from gym_serve.deployments.tokenizing import CALL_OPENING, completion, entries, may_call, render, split_calls
from gym_serve.observe.timeline import TTFT, microseconds
from gym_serve.servers.context import closing, current
from gym_serve.servers.model import PauseMode
from gym_serve.types.errors import BadRequest, Unavailable
from gym_serve.types.media import pictures_of
from gym_serve.types.protocols import new_id
from gym_serve.types.requests import JSON

if TYPE_CHECKING:
    from gym_serve.deployments.batched.batches import Batches, Row, Steps
    from gym_serve.deployments.batched.grammar import Constraint, Grammars

__all__ = ["BatchedEngine"]


class _Generation(NamedTuple):
    prompt: list[int]
    sampling: Sampling
    limit: int
    constraint: Constraint | None
    pictures: list[str]


class BatchedEngine(EngineModel):
    """A causal language model in the server's own process; a subclass calls `begin` in `start`."""

    class Config(EngineModel.Config):
        max_model_len: int | None = Field(None, ge=1)
        """Most tokens of a prompt and its generation together; by default its positions."""

    config: Config

    def __init__(self, *, name: str | None = None, **settings: Any) -> None:
        super().__init__(name=name, **settings)
        self._tokenizer: Any = None
        self._processor: Any = None
        self._context = self._vocabulary = 0
        self._batches: Batches | None = None
        self._grammars: Grammars | None = None

    def begin(
        self, steps: Steps, tokenizer: Any, context: int, grammars: Grammars, processor: Any = None
    ) -> None:
        """Serve from now on. ``tokenizer`` has what `render`, `decode` and `entries` need of one of
        ``transformers``; ``context`` is the most tokens of a prompt and its generation; ``processor``: see
        `render`.
        """
        from gym_serve.deployments.batched.batches import Batches

        self._tokenizer, self._context, self._grammars = tokenizer, context, grammars
        self._processor = processor
        self._vocabulary, self.ends = grammars.vocabulary, grammars.ends
        self._batches = Batches(steps, self.ends, tokenizer.decode)

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
        constraint = await asyncio.to_thread(self._grammars.constraint, chat)
        return _Generation(prompt, sampling, limit, constraint, pictures_of(chat["messages"]))

    def _head(self) -> JSON:
        return {"id": new_id("chatcmpl"), "created": int(time.time()), "model": self.name}

    async def render(self, chat: JSON, messages: list[JSON]) -> list[int]:
        if self._processor is None:
            return render(self._tokenizer, chat, messages)
        return await asyncio.to_thread(render, self._tokenizer, chat, messages, self._processor)

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
        scores = self._scores(chat, row, 0, len(row.tokens))
        finished = completion(head, row.prompt, parts, row.finish, scores)
        if row.cached is not None:
            finished["usage"]["prompt_tokens_details"] = {"cached_tokens": row.cached}
        return finished

    def _scores(self, chat: JSON, row: Row, begin: int, end: int) -> JSON:
        tokens = row.tokens[begin:end]
        content = entries(self._tokenizer, tokens, row.log_probs[begin:end])
        wanted = self.config.return_token_ids or bool(chat.get("logprobs"))
        return {"logprobs": {"content": content} if wanted else None, "token_ids": tokens}

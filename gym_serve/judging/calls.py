"""`JudgeCalls`: the calls of one server to its judges: bounded, cached if asked for, with typed failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar
from weakref import WeakValueDictionary

from gym_serve.judging.cache import VerdictCache
from gym_serve.servers.clients import ModelClient
from gym_serve.types.errors import EndpointMisconfigured, GymError, NotFound, OperatorError, VerifierFailed
from gym_serve.types.requests import JSON

__all__ = ["Answer", "JudgeCalls", "Protocol"]

V = TypeVar("V")

Protocol = Literal["responses", "chat_completions", "pooling", "classify"]
"""How a judge is asked: to write, or (vLLM's routes of pooling models) for scores."""


@dataclass(frozen=True)
class Answer(Generic[V]):
    """One call of a judge.

    Attributes:
        request: the body that it was sent.
        response: its reply.
        verdict: what that says; None for a reply without a verdict.
    """

    request: JSON
    response: JSON
    verdict: V | None


class JudgeCalls:
    """Calls judges.

    Args:
        max_concurrency: calls at once; others wait for their turn. None sets no limit.
        cache: where replies are kept, or None.
    """

    def __init__(self, max_concurrency: int | None, cache: VerdictCache | None = None) -> None:
        self._slots = nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._cache = cache
        self._turns: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    async def ask(
        self,
        model: ModelClient,
        request: JSON,
        read: Callable[[JSON], V | None],
        *,
        protocol: Protocol = "responses",
        judge: int = 0,
        vote: int = 0,
    ) -> Answer[V]:
        """Ask a judge.

        Args:
            model: its model.
            request: the body of the call.
            read: the verdict of a reply; None if it gives none. May raise `VerifierFailed`.
            protocol: what ``request`` is.
            judge, vote: number of the judge and of the question, among several that are asked the same.

        Raises:
            VerifierFailed: the call failed, or its reply is none.
            OperatorError: the judge's endpoint refuses its key, or is none.
        """
        if self._cache is None:
            return await self._asked(model, request, read, protocol)
        key = self._cache.key(judge, protocol, request, vote)
        # The rollouts of a group often ask the same at the same time.
        turn = self._turns.setdefault(key, asyncio.Lock())
        async with turn:
            kept = await self._cache.get(key)
            if kept is not None and (verdict := _verdict_of(kept, read)) is not None:
                return Answer(request, kept, verdict)
            answer = await self._asked(model, request, read, protocol)
            if answer.verdict is not None:
                await self._cache.put(key, answer.response)
            return answer

    async def _asked(
        self, model: ModelClient, request: JSON, read: Callable[[JSON], V | None], protocol: Protocol
    ) -> Answer[V]:
        async with self._slots:
            response = await _called(model, protocol, request)
        return Answer(request, response, read(response))


def _verdict_of(kept: JSON, read: Callable[[JSON], V | None]) -> V | None:
    """What a kept reply says; None where it says nothing by now, as the labels of the verdict are others."""
    try:
        return read(kept)
    except VerifierFailed:
        return None


async def _called(model: ModelClient, protocol: Protocol, request: JSON) -> JSON:
    try:
        if protocol == "responses":
            return await model.responses(request)
        if protocol == "chat_completions":
            return await model.chat_completions(request)
        answer: JSON = await model.fetch(protocol, request)
        return answer
    except OperatorError:
        raise
    except NotFound as error:
        raise EndpointMisconfigured(error.message, server=error.server) from None
    except GymError as error:
        # Also one that no retry of the call would mend: the response is sound, and may be scored again.
        raise VerifierFailed(
            f"the judge failed: {error.message}", server=error.server, retry_after=error.retry_after
        ) from error

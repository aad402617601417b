"""`JudgeCalls`: the calls of one server to its judges: bounded, cached on request, with typed failures.

`VerdictCache` is opt-in, because a cached sample is not a fresh one. A key is made of the judge, the whole
request and the number of the vote; only replies with a verdict are kept. It is SQLite, so that the replicas
on a machine share a file. A cache that fails is logged and bypassed: it costs a call, never a verdict.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import sqlite3
import threading
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar
from weakref import WeakValueDictionary

import orjson
from pydantic import BaseModel, ConfigDict, Field

from gym_serve.observe.catalogue import JUDGE_CALLS
from gym_serve.servers.clients import ModelClient, name_of
from gym_serve.types.errors import (
    AuthorError,
    BadRequest,
    EndpointMisconfigured,
    GymError,
    NotFound,
    OperatorError,
    Overloaded,
    Unavailable,
    VerifierFailed,
)
from gym_serve.types.protocols import is_overflow_answer
from gym_serve.types.requests import JSON

V = TypeVar("V")
T = TypeVar("T")

Protocol = Literal["responses", "chat_completions", "pooling", "classify"]
"""How a judge is asked: for text, or for scores (vLLM's routes of pooling models)."""

_BUSY_SECONDS = 5.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer(Generic[V]):
    """One call of a judge: its body, and the verdict of the reply, None if it gives none."""

    request: JSON
    response: JSON
    verdict: V | None

    def to_json(self) -> JSON:
        """The call as a verdict of the environment reports it."""
        call = {"responses_create_params": self.request, "response": self.response}
        return {**call, "verdict_label": self.verdict}


class JudgeCalls:
    """Calls judges, ``max_concurrency`` at a time. A server manages it (`Server.manage`)."""

    def __init__(self, max_concurrency: int | None, cache: VerdictCache | None = None) -> None:
        self._slots = nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._cache = cache
        self._turns: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    async def start(self) -> None:
        """Nothing to do: the cache is open."""

    async def stop(self) -> None:
        if self._cache is not None:
            self._cache.close()

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
        """Make a call to a judge; ``read`` returns the verdict of a reply, or None. Raises VerifierFailed:
        the judge was too slow, or its reply is malformed, or (because of a `BadRequest`) it does not take the
        request; Overloaded, Unavailable: it is waited for as a policy is; OperatorError; AuthorError: the
        model's code is wrong.
        """
        if self._cache is None:
            return await self._asked(model, request, read, protocol)
        key = self._cache.key(judge, protocol, request, vote)
        # The rollouts of a group often ask the same question at the same time.
        turn = self._turns.setdefault(key, asyncio.Lock())
        async with turn:
            kept = await self._cache.get(key)
            with suppress(VerifierFailed):  # it has no verdict any more if the labels have changed
                if kept is not None and (verdict := read(kept)) is not None:
                    JUDGE_CALLS.add(name_of(model, "judge"), "cached")
                    return Answer(request, kept, verdict)
            answer = await self._asked(model, request, read, protocol)
            if answer.verdict is not None:
                await self._cache.put(key, answer.response)
            return answer

    async def _asked(
        self, model: ModelClient, request: JSON, read: Callable[[JSON], V | None], protocol: Protocol
    ) -> Answer[V]:
        outcome = "failed"
        try:
            async with self._slots:
                response = await _called(model, protocol, request)
            verdict = read(response)
            outcome = "no_verdict" if verdict is None else "verdict"
        finally:
            JUDGE_CALLS.add(name_of(model, "judge"), outcome)
        return Answer(request, response, verdict)


async def _called(model: ModelClient, protocol: Protocol, request: JSON) -> JSON:
    try:
        if protocol == "responses":
            answer: JSON = await model.responses(request)
        elif protocol == "chat_completions":
            answer = await model.chat_completions(request)
        else:
            answer = await model.fetch(protocol, request)
    except (AuthorError, OperatorError, Overloaded, Unavailable):
        raise
    except NotFound as error:
        raise EndpointMisconfigured(error.message, server=error.server) from None
    except GymError as error:
        # Also if retrying the call is useless: the response is sound and may be scored again later.
        message, wait = f"the judge failed: {error.message}", error.retry_after
        raise VerifierFailed(message, server=error.server, retry_after=wait) from error
    if is_overflow_answer(answer):
        refusal = BadRequest("the prompt does not fit its context")
        raise VerifierFailed(f"the judge failed: {refusal.message}") from refusal
    return answer


async def ask_within(ask: Callable[[int], Awaitable[T]], chars: int) -> T:
    """Ask a judge about a policy's text (``chars`` of it at first); about less of it if the judge refuses it,
    and at last about nothing. Else a policy could make a failure of its zero. Raises VerifierFailed: the
    judge failed, or refuses what is asked without the text, too; BadRequest: ``ask`` cannot ask, also without
    it.
    """
    for limit in (chars, chars // 8, chars // 64):
        try:
            return await ask(limit)
        except (BadRequest, VerifierFailed) as error:
            if not isinstance(error.__cause__ or error, BadRequest):
                raise
            logger.info("a judge refuses %d characters: %s", limit, error.message)
    return await ask(0)


class CacheSettings(BaseModel):
    """Settings of the cache."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path
    """The SQLite file, on a local disk. It is created with its folder if missing, and grows without limit."""
    model: str = Field(min_length=1)
    """Name and version of the judge's model: part of the key, because the file outlives the graph."""


class VerdictCache:
    """Replies by request. Raises BadRequest: the file cannot be opened."""

    def __init__(self, settings: CacheSettings) -> None:
        self._model = settings.model
        self._lock = threading.Lock()
        try:
            settings.path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(
                settings.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.execute("CREATE TABLE IF NOT EXISTS replies (key BLOB PRIMARY KEY, reply BLOB)")
        except (OSError, sqlite3.Error) as error:
            raise BadRequest(f"cannot open the verdict cache {settings.path}: {error}") from None

    def key(self, judge: int, protocol: str, request: JSON, vote: int) -> bytes:
        """The key of a call: of a judge, for a repetition (``vote``)."""
        parts = [self._model, judge, protocol, request, vote]
        try:
            written = orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)
        except TypeError:  # a lone surrogate, which models can produce, or an integer over 64 bits
            written = json.dumps(parts, sort_keys=True).encode()
        return hashlib.sha256(written).digest()

    async def get(self, key: bytes) -> JSON | None:
        rows = await asyncio.to_thread(self._execute, "SELECT reply FROM replies WHERE key = ?", key)
        try:
            return orjson.loads(rows[0][0]) if rows else None
        except orjson.JSONDecodeError as error:
            logger.warning("the verdict cache holds an entry that is not JSON: %s", error)
            return None

    async def put(self, key: bytes, reply: JSON) -> None:
        insert = "INSERT OR REPLACE INTO replies VALUES (?, ?)"
        await asyncio.to_thread(self._execute, insert, key, orjson.dumps(reply))

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def _execute(self, statement: str, *values: bytes) -> list[Any]:
        try:
            with self._lock:
                return self._database.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            logger.warning("the verdict cache failed: %s", error)
            return []

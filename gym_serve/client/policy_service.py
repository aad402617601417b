"""`PolicyService`: the trainer's side of a `callback_model`. It fetches requests and brings the answers.

It runs in the trainer's process, and asks every replica of the model for work. What a replica gives out is a
batch: all requests that wait there, up to a number. A batch whose callers have all gone is cancelled.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import secrets
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from gym_serve.observe.logs import admits
from gym_serve.servers.model import ANSWER, TAKE
from gym_serve.servers.threads import Threads
from gym_serve.servers.transport import Call, Reply, encode
from gym_serve.types.errors import GymError, InvalidRequest
from gym_serve.types.model_endpoint import PolicyAnswer, PolicyRequest
from gym_serve.types.requests import JSON

logger = logging.getLogger("gym_serve")

Generate = Callable[[list[PolicyRequest]], Any]
"""Answers a batch with a `PolicyAnswer` for each request, in their order: a function, which runs in a thread,
an asynchronous one, or a Ray actor with such a method ``generate``."""

Replicas = Callable[[], Awaitable[Mapping[str, Callable[[Call], Awaitable[Reply]]]]]
"""How to call each replica of the model that runs now, by its name."""

_WAIT_SECONDS = 10.0  # that a replica holds a question for work
_BUSY_SECONDS = 0.2  # between two questions while there is no room
_LOOK_SECONDS = 1.0  # between two looks for new replicas


class PolicyService:
    """Serves a policy until `stop`. ``generate``: see `Generate`; ``replicas``: see `Replicas`;
    ``max_batch``: most requests of a batch; ``concurrency``: most batches that are generated at a time."""

    def __init__(
        self, name: str, generate: Any, replicas: Replicas, max_batch: int, concurrency: int | None
    ) -> None:
        if max_batch < 1 or (concurrency is not None and concurrency < 1):
            raise InvalidRequest("`max_batch` and `concurrency` must be at least 1")
        self._name = name
        self._answers = _answering(generate)
        self._replicas = replicas
        self._max_batch = max_batch
        self._room = concurrency or (1_000_000 if _is_asynchronous(generate) else 1)
        self._taker = secrets.token_hex(8)
        self._task: asyncio.Task[None] | None = None
        self._batches: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        """End; batches that are generated are cancelled, and their requests wait for another trainer."""
        tasks = [task for task in (self._task, *self._batches) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        serving: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                try:
                    running = await self._replicas()
                except Exception as error:  # the cluster's control plane may be restarting
                    logger.warning("the replicas of %s cannot be listed: %s", self._name, error)
                    running = {}
                for replica, call in running.items():
                    if replica not in serving or serving[replica].done():
                        serving[replica] = asyncio.ensure_future(self._serve(call))
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            for task in serving.values():
                task.cancel()
            await asyncio.gather(*serving.values(), return_exceptions=True)

    async def _serve(self, call: Callable[[Call], Awaitable[Reply]]) -> None:
        """Serve one replica, until it is gone."""
        held: dict[str, asyncio.Task[None]] = {}
        while True:
            most = self._max_batch if len(self._batches) < self._room else 0
            body = {"taker": self._taker, "held": list(held), "most": most}
            try:
                reply = await call(Call(TAKE, encode({**body, "wait": _WAIT_SECONDS if most else 0.0})))
                work = reply.json()
            except GymError as error:
                logger.debug("a replica of %s is gone: %s", self._name, error.message)
                return
            for name in work["cancelled"]:
                task = held.pop(name, None)
                if task is not None and task not in held.values():  # nobody waits for any of its answers
                    task.cancel()
            if requests := [PolicyRequest(**request) for request in work["requests"]]:
                batch = asyncio.ensure_future(self._batch(call, requests, held))
                held.update((request.id, batch) for request in requests)
                self._batches.add(batch)
                batch.add_done_callback(self._batches.discard)
            elif not most:
                await asyncio.wait(self._batches, timeout=_BUSY_SECONDS, return_when=asyncio.FIRST_COMPLETED)

    async def _batch(
        self,
        call: Callable[[Call], Awaitable[Reply]],
        requests: list[PolicyRequest],
        held: dict[str, asyncio.Task[None]],
    ) -> None:
        try:
            answers = await self._answered(requests)
            with suppress(GymError):  # the replica is gone, and its callers with it
                (await call(Call(ANSWER, encode({"answers": answers})))).json()
        finally:
            for request in requests:
                held.pop(request.id, None)

    async def _answered(self, requests: list[PolicyRequest]) -> list[JSON]:
        try:
            answers = await self._answers(requests)
            if not isinstance(answers, Sequence) or len(answers) != len(requests):
                shown = len(answers) if isinstance(answers, Sequence) else type(answers).__name__
                raise InvalidRequest(f"`generate` must return {len(requests)} answers, got {shown}")
            return [_wire(request, each) for request, each in zip(requests, answers, strict=True)]
        except Exception as error:  # of the trainer's code: its calls fail, and are tried again
            kind = type(error).__name__
            if (more := admits(self._name, "generate", kind)) is not None:
                logger.exception("the policy behind %s failed%s", self._name, more)
            return [{"id": each.id, "error": f"{kind}: {error}"} for each in requests]


def _wire(request: PolicyRequest, answer: Any) -> JSON:
    if not isinstance(answer, PolicyAnswer):
        raise InvalidRequest(f"`generate` must return PolicyAnswer objects, got {type(answer).__name__}")
    return {
        "id": request.id,
        "token_ids": list(answer.token_ids),
        "logprobs": list(answer.logprobs),
        "finish_reason": answer.finish_reason,
        "spans": answer.spans,
    }


def _is_actor(generate: Any) -> bool:
    actor = getattr(sys.modules.get("ray"), "actor", None)
    return actor is not None and isinstance(generate, actor.ActorHandle)


def _is_asynchronous(generate: Any) -> bool:
    call = getattr(generate, "__call__", None)  # noqa: B004  # of an object with an asynchronous method
    return _is_actor(generate) or inspect.iscoroutinefunction(generate) or inspect.iscoroutinefunction(call)


def _answering(generate: Any) -> Callable[[list[PolicyRequest]], Awaitable[Any]]:
    """The function as one to be awaited on the event loop of this package."""
    if _is_actor(generate):
        return lambda requests: _of_actor(generate, requests)
    if not callable(generate):
        raise InvalidRequest(f"`generate` must be a function or a Ray actor, got {type(generate).__name__}")
    if not _is_asynchronous(generate):
        threads = Threads()
        return lambda requests: threads.run(partial(generate, requests))
    try:
        theirs = asyncio.get_running_loop()  # where the trainer's clients and engines live
    except RuntimeError:
        asynchronous: Callable[[list[PolicyRequest]], Awaitable[Any]] = generate
        return asynchronous

    def call(requests: list[PolicyRequest]) -> Awaitable[Any]:
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(generate(requests), theirs))

    return call


async def _of_actor(actor: Any, requests: list[PolicyRequest]) -> Any:
    import ray

    answer = actor.generate.remote(requests)
    try:
        return await asyncio.wrap_future(answer.future())
    except asyncio.CancelledError:
        ray.cancel(answer)  # an asynchronous actor ends the call
        raise

"""`Upstream`: the calls to the backend of a model, for every model deployment: where they go, and how often.

- Only a 429, a 5xx and a broken connection are tried again, after a random exponential wait or as
  long as the backend asks for (``Retry-After``), and never past the call's deadline. Repeating a
  model call is safe: it has no effect but its answer. A stream is not tried again once one of its events
  was passed on.
- Where nobody is at an endpoint, the call goes to another one at once (`gym_serve.deployments.endpoints`).
- Rate limits hold before a call leaves; a slow call may be made at a second endpoint as well.

One request and its answer are `gym_serve.deployments.connections`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping
from typing import Any

import orjson

from gym_serve.deployments.connections import Answer, Connections, PassedOn, Request
from gym_serve.deployments.endpoints import Endpoint, EndpointConfig, EndpointPool, RateLimit, hedged
from gym_serve.deployments.retries import pause_after
from gym_serve.servers.context import CallContext
from gym_serve.servers.streaming import OnEvent
from gym_serve.servers.transport import trimmed
from gym_serve.types.errors import BadRequest, OperatorError, Overloaded, Unavailable

__all__ = ["Upstream"]

_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_BYTES_PER_TOKEN = 4


class Upstream:
    """The endpoints of a model.

    Args:
        config: of the server.
    """

    def __init__(self, config: EndpointConfig) -> None:
        self.pool = EndpointPool(config.base_url)
        self._connections = Connections(config)
        self._watch: asyncio.Task[None] | None = None
        self.configure(config)

    def configure(self, config: EndpointConfig) -> None:
        """Change the settings; calls under way end where they began."""
        self._config = config
        self._connections.configure(config)
        self.pool.set(config.base_url, config.requests_per_minute, config.tokens_per_minute)
        if self._connections.are_open:
            self._start_watch()

    async def start(self) -> None:
        """Open the connections; needs a running event loop."""
        await self._connections.open()
        self._start_watch()

    async def stop(self) -> None:
        """Close them."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None
        await self._connections.close()

    def post(
        self,
        path: str,
        body: Mapping[str, Any],
        call: CallContext,
        *,
        below_v1: bool = True,
        on_event: OnEvent | None = None,
    ) -> Coroutine[Any, Any, Any]:
        """The decoded answer to a ``POST``; None where the prompt does not fit the model's context.

        Args:
            path: below the base URL, e.g. ``/chat/completions``.
            body: sent as JSON. Encoded at once, so that who waits for the answer need not keep it.
            below_v1: off for a path beside ``/v1``, as an engine's own routes are.
            call: whose affinity chooses the endpoint, and whose deadline holds for all attempts.
            on_event: takes the decoded events of a stream. If they come, the answer is the last one;
                a backend that does not stream answers as without it.

        Raises:
            BadRequest: the backend refuses the request; has the backend's message.
            OperatorError: it refuses the key, has no such model or path, or redirects.
            Overloaded, Unavailable: it did so at the last attempt; or its answer is no JSON, or a stream
                broke off.
            DeadlineExceeded: there was no answer in time.
        """
        data = _encode(body)
        tokens = 0
        if self._config.tokens_per_minute is not None:
            tokens = len(data) // _BYTES_PER_TOKEN + _limit_of(body)
        events = None if on_event is None else PassedOn(on_event)
        return self._send(Request(path, data, call, below_v1, events, tokens))

    async def _send(self, request: Request) -> Any:
        max_retries = self._config.max_retries
        failed = 0
        while True:
            try:
                answer = await self._attempt(request)
            except (Overloaded, Unavailable) as error:
                pause, left = pause_after(error, failed), request.call.timeout()
                failed += 1
                if failed > max_retries or (left is not None and pause >= left) or not request.repeatable:
                    raise
            else:
                return answer.decoded()
            await asyncio.sleep(pause)

    async def _attempt(self, request: Request) -> Answer:
        """Where nobody is at an endpoint, it goes on at the next one."""
        while True:
            endpoint = self.pool.pick(request.call.affinity, time.monotonic())
            try:
                if self._config.hedge_after is None or request.on_event is not None:
                    return await self._exchange(endpoint, request)
                return await self._hedged(endpoint, request, self._config.hedge_after)
            except Unavailable:
                now = time.monotonic()
                elsewhere = request.repeatable and self.pool.other(endpoint, now) is not None
                if endpoint.breaker.allows(now) or not elsewhere:
                    raise

    async def _hedged(self, endpoint: Endpoint, request: Request, after: float) -> Answer:
        def second() -> Coroutine[Any, Any, Answer] | None:
            other = self.pool.other(endpoint, time.monotonic())
            return None if other is None else self._exchange(other, request)

        return await hedged(self._exchange(endpoint, request), second, after)

    async def _exchange(self, endpoint: Endpoint, request: Request) -> Answer:
        limit = endpoint.limit  # that of now: the settings may change meanwhile
        endpoint.calls += 1  # those that wait for its limits included
        try:
            if limit is None:
                return await self._connections.send(endpoint, request)
            await self._wait(endpoint, limit, request)
            try:
                answer = await self._connections.send(endpoint, request)
            except (BadRequest, OperatorError, Overloaded, Unavailable):
                limit.settle(request.tokens, 0.0)  # who refuses a call, or is gone, generates nothing
                raise
        finally:
            endpoint.calls -= 1
        if limit.counts_tokens:
            limit.settle(request.tokens, _tokens_of(answer, request.tokens))
        return answer

    async def _wait(self, endpoint: Endpoint, limit: RateLimit, request: Request) -> None:
        """Wait until the rate limits let a call begin.

        Raises:
            Overloaded: that is after its deadline.
        """

        def check(wait: float) -> None:
            left = request.call.timeout()
            if left is not None and wait >= left:
                raise Overloaded(f"the rate limit of {endpoint.url} is used up", retry_after=wait)

        check(limit.expected(time.monotonic(), request.tokens))
        async with limit.turn(request.tokens):
            while wait := limit.begin(time.monotonic(), request.tokens):
                check(wait)
                await asyncio.sleep(wait)

    def _start_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._config.health_interval is not None:
            self._watch = asyncio.create_task(self._look_after(self._config.health_interval))

    async def _look_after(self, interval: float) -> None:
        while True:
            await asyncio.gather(*map(self._connections.probe, self.pool.endpoints))
            await asyncio.sleep(interval)


def _encode(body: Mapping[str, Any]) -> bytes:
    try:
        return trimmed(orjson.dumps(body))
    except TypeError as error:
        raise BadRequest(f"the request cannot be written as JSON: {error}") from None


def _limit_of(body: Mapping[str, Any]) -> int:
    """The most tokens that a request asks for; 0 if it does not say."""
    given = next((body[key] for key in _LIMITS if body.get(key) is not None), 0)
    return given if type(given) is int and given > 0 else 0


def _tokens_of(answer: Answer, otherwise: int) -> int:
    """The tokens that a call took, as its answer says."""
    try:
        found = answer.decoded()
    except Unavailable:
        return otherwise
    usage = found.get("usage") if isinstance(found, dict) else None
    total = usage.get("total_tokens") if isinstance(usage, dict) else None
    return total if type(total) is int and total >= 0 else otherwise

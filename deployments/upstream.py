"""`Upstream`: the calls to the backend of a model: where they go, and how often (one call is `connections`).

- Only a 429, a 5xx and a broken connection are tried again, after a random exponential wait or
  ``Retry-After``, and never past the call's deadline. A stream is not tried again after its first event.
- A limit per minute is waited for here; a longer wait is the run's (`gym_serve.rollouts.scheduling`).
- Where nobody is at an endpoint, the call goes to another one at once.
- A trainer that hands out an endpoint per episode names it in the row (``_ng_model``). The request then goes
  there, with the row's key and headers and none of the server's own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import orjson

from gym_serve.deployments.chat_streams import Whole
from gym_serve.deployments.connections import Answer, Connections, Request
from gym_serve.deployments.endpoints import Endpoint, EndpointConfig, EndpointPool, RateLimit, hedged
from gym_serve.deployments.http_client import pause_after
from gym_serve.observe.catalogue import ENDPOINT_UP, ENDPOINT_WAIT, MODEL_RETRIES
from gym_serve.observe.logs import fault
from gym_serve.observe.timeline import ENDPOINT, RETRIES
from gym_serve.servers import ModelServer
from gym_serve.servers.context import CallContext, closing, current
from gym_serve.servers.transport import trimmed
from gym_serve.types.errors import (
    BadRequest,
    EndpointMisconfigured,
    GymError,
    OperatorError,
    Overloaded,
    Unavailable,
)
from gym_serve.types.model_endpoint import MODEL_FIELD, ModelEndpoint
from gym_serve.types.requests import JSON

_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_BYTES_PER_TOKEN = 4
_LONGEST_PAUSE = 60.0  # seconds
_CHAT = "/chat/completions"
PROMPT_KEYS = ("model", "messages", "tools", "chat_template_kwargs", "mm_processor_kwargs")
"""What decides the prompt of a chat body, and so what ``/tokenize`` has to see too."""


class Upstream:
    """The endpoints of a model; by default over aiohttp."""

    def __init__(
        self, config: EndpointConfig, connections: Connections | None = None, model: str = "model"
    ) -> None:
        self._model = model
        self.pool = EndpointPool(config.base_url)
        self._connections = connections or Connections(config)
        self._watch: asyncio.Task[None] | None = None
        self.configure(config)

    def configure(self, config: EndpointConfig) -> None:
        self._config = config
        self._connections.configure(config)
        for endpoint in self.pool.endpoints:
            if endpoint.url not in config.base_url:
                for gauge in (ENDPOINT_UP, ENDPOINT_WAIT):
                    gauge.remove(self._model, endpoint.url)
        self.pool.set(config.base_url, config.requests_per_minute, config.tokens_per_minute)
        if self._connections.are_open:
            self._start_watch()

    async def start(self) -> None:
        await self._connections.open()
        self._start_watch()

    async def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None
        await self._connections.close()

    def post(
        self, path: str, body: Mapping[str, Any], call: CallContext, *, below_v1: bool = True
    ) -> Coroutine[Any, Any, Any]:
        """The decoded answer to a ``POST``; None where the prompt does not fit the model's context. Where
        only the prompt and the longest answer together do not fit, the answer may be shorter. ``below_v1`` is
        off for a path beside ``/v1``.

        Raises BadRequest: the backend refuses the request; has its message; OperatorError: it refuses the
        key, has no such model or path, or redirects; Overloaded, Unavailable: it did so at the last attempt;
        DeadlineExceeded: there was no answer in time.
        """
        return self._send(self._request(path, body, call, below_v1))

    def stream(self, path: str, body: Mapping[str, Any], call: CallContext) -> AsyncGenerator[Any, None]:
        """The decoded events of the answer to a ``POST`` whose body asks for a stream; one `Whole` if the
        backend answers whole. Raises as `post`; `Unavailable` also if the stream breaks off.
        """
        return self._stream(self._request(path, body, call, True))

    def _request(self, path: str, body: Mapping[str, Any], call: CallContext, below_v1: bool) -> Request:
        data = _encode(body)
        tokens = 0
        if self._config.tokens_per_minute is not None:
            limit = next((body[key] for key in _LIMITS if body.get(key) is not None), 0)
            limit = limit if type(limit) is int and limit > 0 else 0
            tokens = len(data) // _BYTES_PER_TOKEN + limit
        return Request(path, data, call, below_v1, tokens)

    async def _send(self, request: Request) -> Any:
        failed = 0
        while True:
            try:
                answer = await self._attempt(request)
            except (Overloaded, Unavailable) as error:
                pause = self._pause(request, error, failed)
                failed += 1
                self._retried(request, error)
            except BadRequest:
                if await self._is_too_long(request):
                    return None
                raise
            else:
                body = answer.decoded()
                if body is not None or (unlimited := _unlimited(request)) is None:
                    return body
                request = unlimited
                continue
            await asyncio.sleep(pause)

    async def _is_too_long(self, request: Request) -> bool:
        """Whether the prompt of a refused request has more tokens than the endpoint says that it takes."""
        endpoint = self._pick(request)
        if request.path != _CHAT or endpoint.named:
            return False
        if (context := await self._connections.context_of(endpoint)) is None:
            return False
        body = orjson.loads(request.data)
        data = _encode({key: body[key] for key in PROMPT_KEYS if key in body})
        try:
            counted = await self._send(Request("/tokenize", data, request.call, below_v1=False, tokens=0))
        except GymError:
            return False
        count = counted.get("count") if isinstance(counted, dict) else None
        return type(count) is int and count >= context

    async def _stream(self, request: Request) -> AsyncGenerator[Any, None]:
        failed = 0
        while True:
            begun = False
            endpoint = self._pick(request)
            try:
                async with closing(self._events(endpoint, request)) as events:
                    async for event in events:
                        full = isinstance(event, Whole) and event.answer is None
                        if full and not begun and (unlimited := _unlimited(request)) is not None:
                            request = unlimited
                            break
                        begun = True
                        yield event
                    else:
                        return
                continue
            except BadRequest:
                if begun or not await self._is_too_long(request):
                    raise
                yield Whole(None)
                return
            except (Overloaded, Unavailable) as error:
                if begun:
                    raise
                if isinstance(error, Unavailable) and self._may_go_on(endpoint):
                    self._retried(request, error)
                    continue
                pause = self._pause(request, error, failed)
                failed += 1
                self._retried(request, error)
            await asyncio.sleep(pause)

    def _pause(self, request: Request, error: Overloaded | Unavailable, failed: int) -> float:
        pause, left = pause_after(error, failed), request.call.timeout()
        too_long = (error.retry_after or 0.0) > _LONGEST_PAUSE or (left is not None and pause >= left)
        if failed >= self._config.max_retries or too_long:
            raise error
        message = f"a model call is tried again in {pause:.1f} s: {error.message}"
        fault(None, f"retry {error.code}", message, logging.INFO)
        return pause

    def _retried(self, request: Request, error: Overloaded | Unavailable) -> None:
        """Count a request that failed and is made again."""
        notes = request.call.notes
        notes[RETRIES] = notes.get(RETRIES, 0) + 1
        # The URLs of rows are any number.
        endpoint = "row" if request.call.endpoint is not None else notes.get(ENDPOINT, "unknown")
        MODEL_RETRIES.add(self._model, endpoint, error.code)

    def observe(self) -> None:
        now = time.monotonic()
        for endpoint in self.pool.endpoints:
            ENDPOINT_UP.set(self._model, endpoint.url, value=float(endpoint.breaker.allows(now)))
            wait = max(0.0, endpoint.refuses_until - now)
            ENDPOINT_WAIT.set(self._model, endpoint.url, value=wait)

    def _pick(self, request: Request) -> Endpoint:
        if (named := request.call.endpoint) is not None:
            return Endpoint(named.base_url, named=named)
        return self.pool.pick(request.call.affinity, time.monotonic())

    def _other(self, endpoint: Endpoint) -> Endpoint | None:
        """Another endpoint that may take a call at once; None for the calls of a row that names its own."""
        return None if endpoint.named else self.pool.other(endpoint, time.monotonic())

    def _may_go_on(self, endpoint: Endpoint) -> bool:
        """Whether an endpoint is unreachable, so that a call fails over to another one at once."""
        return not endpoint.breaker.allows(time.monotonic()) and self._other(endpoint) is not None

    async def _attempt(self, request: Request) -> Answer:
        while True:
            endpoint = self._pick(request)
            try:
                call, after = self._exchange(endpoint, request), self._config.hedge_after
                second = partial(self._second, endpoint, request)
                return await (call if after is None else hedged(call, second, after))
            except Unavailable as error:
                if not self._may_go_on(endpoint):
                    raise
                self._retried(request, error)

    def _second(self, endpoint: Endpoint, request: Request) -> Coroutine[Any, Any, Answer] | None:
        other = self._other(endpoint)
        return None if other is None else self._exchange(other, request)

    async def _exchange(self, endpoint: Endpoint, request: Request) -> Answer:
        async with self._admitted(endpoint, request) as limit:
            request.call.notes[ENDPOINT] = endpoint.url
            answer = await self._connections.send(endpoint, request)
        request.call.notes[ENDPOINT] = endpoint.url  # of two hedged calls, this one was answered
        if limit is not None and limit.counts_tokens:
            try:
                used = _tokens_of(answer.decoded(), request.tokens)
            except Unavailable:
                used = request.tokens
            limit.settle(request.tokens, used)
        return answer

    async def _events(self, endpoint: Endpoint, request: Request) -> AsyncGenerator[Any, None]:
        last: Any = None
        request.call.notes[ENDPOINT] = endpoint.url
        async with (
            self._admitted(endpoint, request) as limit,
            closing(self._connections.stream(endpoint, request)) as events,
        ):
            async for event in events:
                last = event
                yield event
        if limit is not None:
            answer = last.answer if isinstance(last, Whole) else last
            limit.settle(request.tokens, _tokens_of(answer, request.tokens))

    @asynccontextmanager
    async def _admitted(self, endpoint: Endpoint, request: Request) -> AsyncGenerator[RateLimit | None, None]:
        """Wait for the rate limits of an endpoint; the block makes the call."""
        limit = endpoint.limit  # the current one: the settings may change during the call
        endpoint.calls += 1  # calls that wait for the limits count as well
        try:
            if limit is not None:
                await self._wait(endpoint, limit, request)
            try:
                yield limit
            except (BadRequest, OperatorError, Overloaded, Unavailable) as error:
                endpoint.refuses_until = time.monotonic() + (error.retry_after or 0.0)
                if limit is not None:  # a refused call, or one that failed, generated nothing
                    limit.settle(request.tokens, 0.0)
                raise
        finally:
            endpoint.calls -= 1

    async def _wait(self, endpoint: Endpoint, limit: RateLimit, request: Request) -> None:
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


class UpstreamModel(ModelServer):
    """Base class of the models behind HTTP endpoints."""

    config: EndpointConfig

    def __init__(self, *, name: str | None = None, **settings: Any) -> None:
        super().__init__(name=name, **settings)
        self._upstream = self.manage(Upstream(self.config, self.connections(), self.name))

    def connections(self) -> Connections:
        return Connections(self.config)

    def observe(self) -> None:
        super().observe()
        self._upstream.observe()

    def reconfigure(self, settings: JSON) -> None:
        super().reconfigure(settings)
        self._upstream.configure(self.config)

    async def responses(self, body: JSON) -> JSON:
        raise NotImplementedError


def without_limit(body: JSON) -> JSON | None:
    """A body that leaves the length of its answer to what room the prompt leaves; None if it does already."""
    if not any(body.get(key) is not None for key in _LIMITS):
        return None
    return {key: value for key, value in body.items() if key not in _LIMITS}


def _unlimited(request: Request) -> Request | None:
    body = without_limit(orjson.loads(request.data))
    return None if body is None else request._replace(data=_encode(body))


def _encode(body: Mapping[str, Any]) -> bytes:
    try:
        return trimmed(orjson.dumps(body))
    except TypeError as error:
        raise BadRequest(f"the request cannot be written as JSON: {error}") from None


def _tokens_of(answer: Any, otherwise: int) -> int:
    """The tokens that a call took, as its decoded answer says."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    total = usage.get("total_tokens") if isinstance(usage, dict) else None
    return total if type(total) is int and total >= 0 else otherwise


class RowEndpointModel(UpstreamModel):
    """Base class of the models behind HTTP endpoints that rows may replace."""

    class Config(EndpointConfig):
        row_endpoints: bool | list[str] = False
        """Whether a rollout may bring the endpoint of its model with it (``_ng_model`` of its row, or
        ``rollouts(..., endpoint=)``), instead of this server's: ``true`` for any, or the hosts that may be
        named (``10.0.0.7`` or ``10.0.0.7:8000``). It gets the row's key, never this server's."""
        row_endpoints_over_http: bool = False
        """Likewise for rows that come through the graph's HTTP address: whoever may call the graph can then
        make it send requests to those hosts."""

    config: Config

    def check_endpoint(self, endpoint: ModelEndpoint) -> None:
        allowed = self.config.row_endpoints
        if not allowed:
            raise EndpointMisconfigured(
                f"{self.name} takes no endpoint from rows: set `row_endpoints` if their source is trusted"
            )
        if endpoint.over_http and not self.config.row_endpoints_over_http:
            raise BadRequest(f"{self.name} takes no endpoint (`{MODEL_FIELD}`) over HTTP")
        address = urlsplit(endpoint.base_url)
        if allowed is not True and not {address.netloc, address.hostname} & set(allowed):
            raise BadRequest(f"{self.name} takes no endpoint at {address.netloc}; see `row_endpoints`")

    @property
    def model_name(self) -> str:
        endpoint = current().endpoint
        return (endpoint and endpoint.model) or self.config.model

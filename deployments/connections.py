"""`Connections`: one HTTP request to one endpoint of a model, and what its answer means.

A prompt that does not fit the context is an answer, not an error. Cancelling a call closes its connection, on
which engines stop generating. The key is in the request's header and nowhere else: not in an error, which
shows no query either, and not at another host, as redirects are refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

import aiohttp
from msgspec.structs import replace

from gym_serve.deployments.chat_streams import Whole, is_event_stream, read_events
from gym_serve.deployments.endpoints import Endpoint, EndpointConfig
from gym_serve.deployments.http_client import (
    check_connection,
    open_session,
    proxy_of,
    redirected,
    shown_error,
)
from gym_serve.observe.tracing import span
from gym_serve.servers.context import CallContext, closing, stream_in, time_limit
from gym_serve.types.errors import DeadlineExceeded, Unavailable
from gym_serve.types.exact import foreign_json, no_json
from gym_serve.types.model_endpoint import MODEL_FIELD
from gym_serve.types.protocols import generation_in, refusal, says_full
from gym_serve.types.requests import JSON

_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
_SHORTEST_SECRET = 8  # characters: a header of fewer is a name or a number, and may stand in any message


class Request(NamedTuple):
    """A request, the same at every attempt; ``tokens`` is an estimate, for the rate limits."""

    path: str
    data: bytes
    call: CallContext
    below_v1: bool
    tokens: int


def traced(headers: Mapping[str, Any], request: Request) -> Mapping[str, Any]:
    """Headers, and the span of the request, under which an engine that records spans puts its own."""
    span = request.call.traceparent
    return headers if span is None else {**headers, "traceparent": span}


class Answer(NamedTuple):
    """An answer: ``body`` is the decoded one, None if the prompt does not fit the model's context;
    ``problem`` says why the body is none, which is no reason to ask again at once.
    """

    body: Any
    problem: Unavailable | None = None

    def decoded(self) -> Any:
        """The body. Raises Unavailable: it is no JSON, or null."""
        if self.problem is not None:
            raise self.problem
        return self.body


class Response(NamedTuple):
    """The answer of an endpoint, before its body is read."""

    status: int
    headers: Mapping[str, str]
    content: AsyncIterator[bytes]  # the body, in chunks of any size


class NoConnection(Exception):
    """Nobody answers at an endpoint: its breaker opens at once, and callers get `Unavailable`."""


class Connections:
    """The connections of one model server."""

    def __init__(self, config: EndpointConfig) -> None:
        self._session: aiohttp.ClientSession | None = None
        self.configure(config)

    @property
    def are_open(self) -> bool:
        return self._session is not None

    def configure(self, config: EndpointConfig) -> None:
        key = config.api_key.get_secret_value()
        bearer = config.api_key_header.lower() == "authorization"
        further = {name: value.get_secret_value() for name, value in config.headers.items()}
        self._secrets = [key, *(value for value in further.values() if len(value) >= _SHORTEST_SECRET)]
        self._headers = {
            "Content-Type": "application/json",
            config.api_key_header: f"Bearer {key}" if bearer else key,
            **further,
        }
        self._max_bytes = config.max_answer_mb << 20
        self._query = f"?{urlencode(config.query)}" if config.query else ""

    async def open(self) -> None:
        self._session = open_session()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def send(self, endpoint: Endpoint, request: Request) -> Answer:
        """The answer of an endpoint. Raises BadRequest, OperatorError, Overloaded, Unavailable: what it says,
        or that it broke off; DeadlineExceeded: there was no answer in time.
        """
        url = self._url(endpoint, request)
        try:
            with time_limit(request.call.timeout()):
                async with self._exchange(endpoint, request) as response:
                    text = await self._read(url, response)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(f"no answer from {url} in time") from None
        return self._answer(url, response, text, endpoint)

    async def stream(self, endpoint: Endpoint, request: Request) -> AsyncGenerator[Any, None]:
        """The decoded events of an answer; one `Whole` if the endpoint does not stream. Raises as `send`."""
        try:
            async with closing(self._events(endpoint, request)) as events:
                async for event in events:
                    yield event
        except asyncio.TimeoutError:
            raise DeadlineExceeded(f"no answer from {self._url(endpoint, request)} in time") from None

    async def _events(self, endpoint: Endpoint, request: Request) -> AsyncGenerator[Any, None]:
        url, call = self._url(endpoint, request), request.call
        text: bytes | None = None
        async with AsyncExitStack() as stack:
            with time_limit(call.timeout()):
                response = await stack.enter_async_context(self._exchange(endpoint, request))
            if response.status < 300 and is_event_stream(response.headers):
                chunks = stream_in(call, self._content(url, response))
                async with closing(read_events(url, chunks)) as events:
                    async for event in events:
                        if (written := _withheld(url, event)) or self._is_refused(url, event, endpoint):
                            yield Whole(written)
                            return
                        yield event
            else:
                with time_limit(call.timeout()):
                    text = await self._read(url, response)
        if text is not None:
            yield Whole(self._answer(url, response, text, endpoint).decoded())

    @asynccontextmanager
    async def _exchange(self, endpoint: Endpoint, request: Request) -> AsyncGenerator[Response, None]:
        """Send a request; the block reads the answer. The endpoint's breaker learns how it ends."""
        if not self.are_open:
            raise Unavailable("the connections are not open: call start() first")
        breaker = endpoint.breaker
        if request.call.timeout() == 0.0:
            raise DeadlineExceeded(f"no time left for a call of {self._url(endpoint, request)}")
        breaker.began(time.monotonic())
        try:
            with span("POST", request.call.traceparent, "client") as request_span:
                if request_span.recording:
                    request = request._replace(
                        call=replace(request.call, traceparent=request_span.traceparent)
                    )
                    host = urlsplit(endpoint.url).hostname
                    request_span.set({"http.request.method": "POST", "server.address": host})
                async with self._post(endpoint, request) as response:
                    request_span.set({"http.response.status_code": response.status})
                    if response.status >= 400:
                        request_span.fail(str(response.status), "")
                    yield response
        except NoConnection as error:
            breaker.failed(time.monotonic(), gone=True)
            raise Unavailable(str(error)) from None
        except asyncio.CancelledError:
            if request.call.is_over():  # by a deadline, not by a caller that went away
                breaker.failed(time.monotonic())
            raise
        except (asyncio.TimeoutError, Unavailable):  # also if the body is not an answer
            breaker.failed(time.monotonic())
            raise
        if response.status >= 500:
            breaker.failed(time.monotonic())
        else:
            breaker.succeeded()

    @asynccontextmanager
    async def _post(self, endpoint: Endpoint, request: Request) -> AsyncGenerator[Response, None]:
        assert self._session is not None
        url, headers = self._url(endpoint, request), self._headers
        if (named := endpoint.named) is not None:  # by a row: its own key, and none of this server's
            key = {"Authorization": f"Bearer {named.api_key}"} if named.api_key else {}
            headers = {"Content-Type": "application/json", **key, **named.headers}
        try:
            async with self._session.post(
                url if named else f"{url}{self._query}",
                data=request.data,
                headers=traced(headers, request),
                proxy=proxy_of(endpoint.url),
                allow_redirects=False,
            ) as response:
                yield Response(response.status, response.headers, response.content.iter_any())
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            check_connection(url, error)
            by = " by the proxy of the environment" if proxy_of(endpoint.url) else ""
            raise NoConnection(f"no connection to {url}{by}: {error}") from None
        except asyncio.TimeoutError:
            raise
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"{url} broke off: {type(error).__name__}: {shown_error(error)}") from None

    def _url(self, endpoint: Endpoint, request: Request) -> str:
        base = endpoint.url
        return (base if request.below_v1 else base.removesuffix("/v1")) + request.path

    async def _read(self, url: str, response: Response) -> bytes:
        return b"".join([part async for part in self._content(url, response)])

    def _answer(self, url: str, response: Response, text: bytes, endpoint: Endpoint) -> Answer:
        status, headers = response.status, response.headers
        if status < 300:
            try:
                body = foreign_json(text)
            except ValueError as error:
                return Answer(None, Unavailable(f"{url} answered what is no JSON: {no_json(text, error)}"))
            if body is None:  # which is not what a prompt that does not fit is
                return Answer(None, Unavailable(f"{url} answered null"))
            if written := _withheld(url, body):
                return Answer(written)
            return Answer(None if self._is_refused(url, body, endpoint) else body)
        if status < 400:
            raise redirected(url, headers, f"{MODEL_FIELD}.base_url" if endpoint.named else "base_url")
        shown = text.decode("utf-8", "replace")
        if written := _withheld(url, shown):
            return Answer(written)
        refused = refusal(url, status, headers, shown, self._secrets_of(endpoint), answered=endpoint.answered)
        if refused is None:
            return Answer(None)
        raise refused

    def _is_refused(self, url: str, body: Any, endpoint: Endpoint) -> bool:
        """Whether a body with status 200 says that the prompt does not fit."""
        full = says_full(url, body, self._secrets_of(endpoint))
        endpoint.answered |= not full
        return full

    def _secrets_of(self, endpoint: Endpoint) -> Iterable[str]:
        return endpoint.named.secrets if endpoint.named else self._secrets

    async def _content(self, url: str, response: Response) -> AsyncIterator[bytes]:
        size = 0
        async for part in response.content:
            size += len(part)
            if size > self._max_bytes:
                raise Unavailable(f"{url} answered over {self._max_bytes >> 20} MB (max_answer_mb)")
            yield part

    async def probe(self, endpoint: Endpoint) -> None:
        """Look whether somebody is at an endpoint, and tell its breaker."""
        try:
            async with self._models_of(endpoint) as response:
                well = response.status < 500  # a 404 comes from somebody who is there
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            well = False
        endpoint.breaker.looked(time.monotonic(), there=well)

    async def context_of(self, endpoint: Endpoint) -> int | None:
        """The most tokens of a prompt and its answer, as vLLM and SGLang publish it; None if it does not."""
        try:
            async with self._models_of(endpoint) as response:
                listing = foreign_json(await response.read())
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError):
            return None
        models = listing.get("data") if isinstance(listing, dict) else None
        if not isinstance(models, list):
            return None
        limits = [model.get("max_model_len") for model in models if isinstance(model, dict)]
        return max((limit for limit in limits if type(limit) is int), default=None)

    def _models_of(self, endpoint: Endpoint) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        assert self._session is not None
        return self._session.get(
            f"{endpoint.url}/models{self._query}",
            headers=self._headers,
            timeout=_PROBE_TIMEOUT,
            proxy=proxy_of(endpoint.url),
            allow_redirects=False,
        )


def _withheld(url: str, body: Any) -> JSON | None:
    """A completion of what the model wrote, where its endpoint refuses to pass that on as a call or as JSON:
    it is the model's answer, and no failure. None for any other body."""
    if (text := generation_in(body)) is None or not url.endswith("/chat/completions"):
        return None
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return {"object": "chat.completion", "choices": [choice]}

"""`SdkConnections`: the requests of `openai_model`, sent by OpenAI's own SDK.

The SDK sends one request and knows the API's headers and their changes. The choice of an endpoint, retries,
rate limits and deadlines stay with `Upstream`, so the SDK does not retry, and its errors become those of
`Connections`. Bodies are passed as they are, because fields that the SDK does not know must survive.

The SDK is imported when the connections are opened: that takes longer than all of gym_serve.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

from gym_serve.deployments.connections import Connections, NoConnection, Request, Response, traced
from gym_serve.deployments.endpoints import Endpoint, EndpointConfig
from gym_serve.types.errors import Unavailable

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_CONNECT_SECONDS = 10.0
_PROBE_SECONDS = 5.0


class SdkConnections(Connections):
    """The connections of one model server, by OpenAI's SDK."""

    def __init__(self, config: EndpointConfig) -> None:
        self._sdk: AsyncOpenAI | None = None
        self._clients: dict[str, AsyncOpenAI] = {}
        super().__init__(config)

    @property
    def are_open(self) -> bool:
        """See `Connections.are_open`."""
        return self._sdk is not None

    def configure(self, config: EndpointConfig) -> None:
        """See `Connections.configure`."""
        super().configure(config)
        self._config = config
        self._clients = {}

    async def open(self) -> None:
        """See `Connections.open`."""
        from openai import DEFAULT_CONNECTION_LIMITS, AsyncOpenAI, DefaultAioHttpClient, Timeout

        # The caller bounds its concurrency: a second limit here would only hide a queue.
        limits = type(DEFAULT_CONNECTION_LIMITS)(max_connections=None, max_keepalive_connections=None)
        timeout = Timeout(None, connect=_CONNECT_SECONDS)  # each call has a limit of its own
        self._sdk = AsyncOpenAI(
            api_key="set by each client",
            base_url="http://unused.invalid",
            max_retries=0,
            timeout=timeout,
            http_client=DefaultAioHttpClient(follow_redirects=False, limits=limits, timeout=timeout),
        )

    async def close(self) -> None:
        """See `Connections.close`."""
        if self._sdk is not None:
            await self._sdk.close()
            self._sdk, self._clients = None, {}

    def _client(self, url: str) -> AsyncOpenAI:
        """The client of an endpoint, with the settings of now."""
        assert self._sdk is not None
        if url not in self._clients:
            config = self._config
            self._clients[url] = self._sdk.with_options(
                api_key=config.api_key.get_secret_value(), base_url=url, default_query=config.query
            )
        return self._clients[url]

    def _request_headers(self) -> dict[str, Any]:
        """The headers that the settings add to the SDK's own; `Omit` removes one of these."""
        from openai import Omit

        config = self._config
        headers: dict[str, Any] = {name: value.get_secret_value() for name, value in config.headers.items()}
        if config.api_key_header.lower() != "authorization":
            headers = {
                "Authorization": Omit(),
                config.api_key_header: config.api_key.get_secret_value(),
                **headers,
            }
        return headers

    @asynccontextmanager
    async def _post(self, endpoint: Endpoint, request: Request) -> AsyncGenerator[Response, None]:
        """See `Connections._post`."""
        from openai import APIConnectionError, APIStatusError, AsyncStream

        url = self._url(endpoint, request)
        try:
            try:
                stream = await self._client(endpoint.url).post(
                    request.path,
                    cast_to=object,
                    body=orjson.loads(request.data),
                    options={"headers": traced(self._request_headers(), request)},
                    stream=True,  # its body is read here, whether it is a stream or not
                    stream_cls=AsyncStream[object],
                )
                answer, close = stream.response, stream.close
            except APIStatusError as error:
                answer, close = error.response, error.response.aclose
            try:
                yield Response(answer.status_code, answer.headers, _content(answer))
            finally:
                await close()
        except APIConnectionError as error:
            cause = error.__cause__
            if _is_gone(error):
                raise NoConnection(f"no connection to {url}: {cause}") from None
            raise Unavailable(f"{url} broke off: {type(cause).__name__}: {cause}") from None
        except asyncio.TimeoutError:
            raise
        except (_httpx().HTTPError, OSError) as error:
            raise Unavailable(f"{url} broke off: {type(error).__name__}: {error}") from None

    async def probe(self, endpoint: Endpoint) -> None:
        """See `Connections.probe`."""
        from openai import APIConnectionError, APIStatusError

        try:
            await self._client(endpoint.url).models.list(
                extra_headers=self._request_headers(), timeout=_PROBE_SECONDS
            )
            well = True
        except APIStatusError as error:
            well = error.status_code < 500  # a 404 comes from a server that runs
        except APIConnectionError:
            well = False
        except Exception:  # an answer that the SDK cannot read comes from a server that runs
            well = True
        endpoint.breaker.looked(time.monotonic(), there=well)


def _is_gone(error: BaseException | None) -> bool:
    """Whether no connection could be made, by the aiohttp error that the SDK's error wraps."""
    while error is not None:
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _httpx() -> Any:
    """The HTTP library below the SDK: httpx, or httpx2 from version 3 on."""
    from openai import DEFAULT_CONNECTION_LIMITS

    return import_module(type(DEFAULT_CONNECTION_LIMITS).__module__.partition(".")[0])


async def _content(answer: Any) -> AsyncIterator[bytes]:
    if answer.is_stream_consumed or answer.is_closed:  # the SDK has read the body of an error
        yield answer.content
        return
    async for chunk in answer.aiter_bytes():
        yield chunk

"""`RemoteHttp`: the requests to an external agent, and every way in which they fail, as typed failures.

A request is sent once: whether an agent that broke off has done its work cannot be known, so trying again
is up to whoever asked for the rollout. A redirect is not followed, to no address that the graph does not
name. Cancelling a request closes its connection, which is how the agent learns that nobody waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import aiohttp
import orjson
from pydantic import SecretStr

from gym_serve.deployments.proxies import proxy_of, shown_error
from gym_serve.deployments.retries import redirected, retry_after
from gym_serve.servers.context import current
from gym_serve.servers.deadline import time_limit
from gym_serve.servers.transport import encode
from gym_serve.types.errors import (
    DeadlineExceeded,
    EndpointAccessDenied,
    EndpointMisconfigured,
    GymError,
    NotFound,
    Unauthorized,
    Unavailable,
    error_from_body,
)

__all__ = ["RemoteHttp"]

_CONNECT_SECONDS = 10.0
_LONGEST_WAIT = 3600.0  # seconds of a Retry-After that are believed
_STAGES = ("seed", "model", "tool", "verify", "close")


class RemoteHttp:
    """Posts to one base URL.

    Args:
        url: the base URL.
        headers: sent with every request.
        max_bytes: of an answer.
    """

    def __init__(self, url: str, headers: Mapping[str, SecretStr], max_bytes: int) -> None:
        self.url = url
        self._headers = headers
        self._max_bytes = max_bytes
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Open the connection pool."""
        # The caller bounds its concurrency and its time: limits here would only hide a queue.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
        )

    async def stop(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def post(self, op: str, body: Any, cookies: dict[str, str] | None = None) -> Any:
        """The decoded answer to ``POST {url}/{op}``, within the deadline of the current context.

        Args:
            cookies: sent along; those of the answer are put there.

        Raises:
            Unavailable: no connection, one that broke off, a status of 500 or more, or an answer that
                is too long or no JSON.
            DeadlineExceeded: no answer in time.
            GymError: another status of 400 or more, as the agent's error body or the status says.
        """
        if self._session is None:
            raise Unavailable("the connections are not open: call start() first")
        context = current()
        headers = {name: value.get_secret_value() for name, value in self._headers.items()}
        headers |= {"content-type": "application/json", "x-request-id": context.request_id}
        if context.affinity:
            headers["x-session-affinity"] = quote(context.affinity, ":", errors="replace")  # of any script
        try:
            with time_limit(context.timeout()):
                async with self._session.post(
                    f"{self.url}/{op}",
                    data=encode(body),
                    headers=headers,
                    cookies=cookies,
                    proxy=proxy_of(self.url),
                    allow_redirects=False,
                ) as answer:
                    text = await self._read(answer)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Unavailable(f"no connection to {self.url}: {error}") from None
        except (asyncio.TimeoutError, TimeoutError):
            raise DeadlineExceeded(f"{self.url} did not answer {op} in time") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"{self.url} broke off: {type(error).__name__}: {shown_error(error)}") from None
        if cookies is not None:
            cookies.update({name: morsel.value for name, morsel in answer.cookies.items()})
        if answer.status >= 300:
            raise self._failure(answer, text)
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise Unavailable(f"{self.url} answered {op} with what is no JSON ({error})") from None

    async def _read(self, answer: aiohttp.ClientResponse) -> bytes:
        chunks, size = [], 0
        async for chunk in answer.content.iter_chunked(1 << 16):
            size += len(chunk)
            if size > self._max_bytes:
                raise Unavailable(f"{self.url} answered more than {self._max_bytes} bytes")
            chunks.append(chunk)
        return b"".join(chunks)

    def _failure(self, answer: aiohttp.ClientResponse, text: bytes) -> GymError:
        if answer.status < 400:
            return redirected(self.url, answer.headers, "url")
        shown = text.decode("utf-8", "replace")
        for value in self._headers.values():  # should the agent repeat them
            if secret := value.get_secret_value():
                shown = shown.replace(secret, "***")
        try:
            said: Any = orjson.loads(shown)
        except orjson.JSONDecodeError:
            said = shown
        error = error_from_body(answer.status, said)
        if type(error) is NotFound:
            error = EndpointMisconfigured(f"{error.message} (see url)")
        elif type(error) is Unauthorized:
            error = EndpointAccessDenied(f"{error.message} (it refuses what this server's headers say)")
        error.message = f"{self.url}: {error.message[:2000]}"
        wait = error.retry_after if error.retry_after is not None else retry_after(answer.headers)
        error.retry_after = None if wait is None else min(max(wait, 0.0), _LONGEST_WAIT)
        error.stage = error.stage if error.stage in _STAGES else None
        error.server = None  # the agent's name for itself means nothing in this graph
        return error

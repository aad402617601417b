"""A harness behind a URL: it is told of the rollout in one ``POST``, and answers when it is done."""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp
import orjson
from pydantic import SecretStr

from gym_serve.deployments.harness_agent.task import Task, masked
from gym_serve.deployments.retries import redirected
from gym_serve.servers.transport import encode
from gym_serve.types.errors import (
    EndpointAccessDenied,
    EndpointMisconfigured,
    NotFound,
    Unauthorized,
    Unavailable,
    error_from_body,
)
from gym_serve.types.requests import JSON

__all__ = ["HttpHarness"]

_CONNECT_SECONDS = 10.0
_MAX_ANSWER = 1 << 24  # bytes


class HttpHarness:
    """Asks a server to work.

    Args:
        url: where it is asked.
        headers: sent with every request.
    """

    def __init__(self, url: str, headers: Mapping[str, SecretStr]) -> None:
        self._url = url
        self._headers = headers
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        # The caller bounds its concurrency and its time: limits here would only hide a queue.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
        )

    async def stop(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def run(self, task: Task) -> JSON:
        """See `Harness.run`.

        Raises:
            Unavailable: there is no connection, it broke off, or the answer is no JSON object.
            GymError: the harness answered with a status of 400 or more.
        """
        if self._session is None:
            raise Unavailable("the connections are not open: call start() first")
        body = {**task._asdict(), "api_key": task.api_key.get_secret_value()}
        headers = {name: value.get_secret_value() for name, value in self._headers.items()}
        headers["content-type"] = "application/json"
        try:
            async with self._session.post(
                self._url, data=encode(body), headers=headers, allow_redirects=False
            ) as answer:
                text = await _limited(answer)
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"the harness {self._url} broke off: {type(error).__name__}: {error}") from None
        shown = text.decode("utf-8", "replace")
        for secret in (task.api_key, *self._headers.values()):  # should it repeat them: rollouts are kept
            shown = masked(shown, secret)
        try:
            said = orjson.loads(shown) if text else {}
        except orjson.JSONDecodeError:
            said = shown
        if 300 <= answer.status < 400:
            raise redirected(self._url, answer.headers, "url")
        if answer.status >= 400:
            failure = error_from_body(answer.status, said)
            if type(failure) is NotFound:
                raise EndpointMisconfigured(f"{self._url}: {failure.message} (see url)")
            if type(failure) is Unauthorized:
                raise EndpointAccessDenied(f"{self._url}: {failure.message} (see headers)")
            raise failure
        if not isinstance(said, dict):
            raise Unavailable(f"the harness answered no JSON object: {str(said)[:200]!r}")
        return said


async def _limited(answer: aiohttp.ClientResponse) -> bytes:
    chunks, size = [], 0
    async for chunk in answer.content.iter_chunked(1 << 16):
        size += len(chunk)
        if size > _MAX_ANSWER:
            raise Unavailable(f"the harness answered more than {_MAX_ANSWER} bytes")
        chunks.append(chunk)
    return b"".join(chunks)

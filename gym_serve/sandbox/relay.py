"""`ModelRelay`: programs in a box ask a model, and reach nothing else.

The programs are hostile. So what is passed on are the requests of a model's protocols to one address, which
the box does not know, with a token that it does not have. Paths are letters, and connections are few.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
import socket
from collections.abc import Mapping

import aiohttp
from aiohttp import web
from pydantic import SecretStr
from yarl import URL

_SILENT = logging.Logger("relay", logging.CRITICAL)  # else a program could fill the log with bad requests
_PATH = re.compile(r"/v1(/[A-Za-z0-9_-]+){1,4}(\?[A-Za-z0-9_=&.%-]*)?")
_MOST_CONNECTIONS = 64
_CONNECT_SECONDS = 10.0
_CHUNK = 1 << 16
_OF_CONNECTION = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
_NOT_PASSED_ON = _OF_CONNECTION | {"host", "authorization", "x-api-key", "cookie", "expect", "set-cookie"}


def model_variables(base_url: str, key: str) -> dict[str, str]:
    """The environment variables in which the clients of OpenAI and Anthropic find a model; ``base_url`` ends
    with ``/v1``."""
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),  # its client adds the version
        "ANTHROPIC_AUTH_TOKEN": key,
    }


class ModelRelay:
    """Answers at a socket as one model does; an async context manager.

    Args:
        listener: where the programs ask (`Listens.listen`); closed at the end.
        url: address of the model, which ends with ``/v1``.
        token: what the model asks for; the programs show ``key`` instead.
    """

    def __init__(self, listener: socket.socket, url: str, token: SecretStr) -> None:
        self._listener = listener
        self._url = url.removesuffix("/v1")
        self._token = token
        self.base_url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        """Address of the model, for the programs."""
        self.key = secrets.token_urlsafe(24)
        """What they show: in a box with the machine's network, others reach the socket too."""
        self.failure: str | None = None
        """Why the model could not be reached, the last time that it could not."""

    async def __aenter__(self) -> ModelRelay:
        connecting = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
        connector = aiohttp.TCPConnector(limit=_MOST_CONNECTIONS)
        # As they come: bytes are neither unpacked nor packed here.
        self._client = aiohttp.ClientSession(
            timeout=connecting,
            connector=connector,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("accept-encoding", "user-agent"),
        )
        answering = web.Server(
            self._answer, handler_cancellation=True, access_log=None, auto_decompress=False, logger=_SILENT
        )
        self._answering = answering

        def accepted() -> asyncio.BaseProtocol:
            return answering() if len(answering.connections) < _MOST_CONNECTIONS else _Refused()

        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(accepted, sock=self._listener)
        return self

    async def __aexit__(self, *raised: object) -> None:
        self._server.close()
        await self._answering.shutdown(0)
        await self._client.close()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        shown = request.headers.get("x-api-key") or request.headers.get("authorization") or ""
        token = shown.removeprefix("Bearer ").encode("utf-8", "replace")
        if not hmac.compare_digest(token, self.key.encode()):
            return _refusal(401, "the key must be that of OPENAI_API_KEY")
        path = request.raw_path
        if request.method not in ("GET", "POST") or not _PATH.fullmatch(path):
            return _refusal(404, "there is only a model here, below /v1")
        headers = _passed_on(request.headers)
        headers["authorization"] = f"Bearer {self._token.get_secret_value()}"
        url = URL(self._url + path, encoded=True)
        body = request.content if request.can_read_body else None
        try:
            exchange = self._client.request(
                request.method, url, headers=headers, data=body, allow_redirects=False
            )
            async with exchange as answer:
                self.failure = None
                return await _passed_back(request, answer)
        except (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError) as error:
            self.failure = f"the model cannot be reached from the box's machine: {error}"
            return _refusal(503, "the model cannot be reached")

    @property
    def connections(self) -> int:
        """How many of the programs' connections are open."""
        return len(self._answering.connections)


class _Refused(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


def _passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _NOT_PASSED_ON}


async def _passed_back(request: web.BaseRequest, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status, headers=_passed_on(answer.headers))
    await response.prepare(request)
    async for chunk in answer.content.iter_chunked(_CHUNK):
        await response.write(chunk)
    await response.write_eof()
    return response


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=status)

"""The HTTP transport: any URL with the routes of docs/formats.md (another cluster, NeMo Gym)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from http.cookiejar import CookieJar, DefaultCookiePolicy
from http.cookies import SimpleCookie
from importlib import import_module
from typing import Any
from urllib.parse import quote

import httpx
import orjson

from gym_serve.servers.context import patience
from gym_serve.servers.protocols import PROTOCOLS, finished_stream, without_stream
from gym_serve.servers.runner import GETS
from gym_serve.servers.tools import UNAVAILABLE, UnavailableTools, is_tool_name
from gym_serve.servers.transport import Call, Reply, encode
from gym_serve.transports import http_notes
from gym_serve.types.errors import (
    DeadlineExceeded,
    EndpointMisconfigured,
    GymError,
    NotFound,
    PolicyDeadline,
    ToolFailed,
    Unavailable,
)
from gym_serve.types.model_endpoint import MODEL_FIELD

_PROBE_SECONDS = 2.0


class HttpTransport:
    """Reaches any URL with the routes of docs/formats.md: another cluster, another language, NeMo Gym.
    ``url``: base URL; ``{url}/seed_session``, ``{url}/v1/responses`` and so on; ``unavailable_tools``:
    whether a tool's answer of 429, 502, 503 or 504 is a failure, or the tool's output."""

    def __init__(
        self,
        server: str,
        url: str,
        headers: Mapping[str, str] | None = None,
        unavailable_tools: UnavailableTools = "fail",
    ) -> None:
        self.server = server
        self.url = url.rstrip("/")
        self._headers = dict(headers or {})
        self._shows = unavailable_tools == "show"
        import_module(
            "httpx_aiohttp"
        )  # takes 0.2 s: not while a call waits, and not if there is no such server
        self._client: httpx.AsyncClient | None = None

    async def call(self, call: Call) -> Reply:
        if self._client is None:
            self._client = new_client(self._headers)
        headers = {
            b"content-type": b"application/json",
            b"x-request-id": call.request_id.encode(),
            http_notes.HEADER.encode(): http_notes.ASKED.encode(),
        }
        headers |= session_headers(call.session, call.affinity)
        if call.traceparent is not None:
            headers[b"traceparent"] = call.traceparent.encode()
        if call.timeout is not None:
            headers[b"x-request-timeout"] = b"%.3f" % max(call.timeout, 0.001)
        secrets: list[str] = []
        if call.endpoint is not None:
            secrets, call = call.endpoint.secrets, with_endpoint(call)
        method = "GET" if call.op in GETS else "POST"
        tool = call.op.removeprefix("tools/") if call.op.startswith("tools/") else None
        if tool is not None and not is_tool_name(tool):
            # The name was written by the model; it must not choose the route of this request.
            return Reply.failed(NotFound(f"no tool {tool[:100]!r}", server=self.server), call.session)
        begun = time.monotonic()
        try:
            answer = await self._client.request(
                method,
                f"{self.url}/{tool or call.op}",
                content=call.body or None,
                headers=headers,
                timeout=None if call.timeout is None else call.timeout + patience(call.timeout),
            )
        except httpx.HTTPError as error:
            # By its cause: httpx-aiohttp calls a refused connection a ConnectTimeout as well.
            if call.timeout is not None and isinstance(error.__cause__, asyncio.TimeoutError):
                message = f"{self.url} did not answer {call.op} within {call.timeout:.6g} s"
                if tool is not None and await self._answers():
                    raise PolicyDeadline(message, server=self.server, stage="tool") from None
                raise DeadlineExceeded(message, server=self.server) from None
            kind = type(error.__cause__ or error).__name__
            raise Unavailable(
                f"{call.op} did not reach {self.url}: {kind}: {error}", server=self.server
            ) from error
        length, took = answer.headers.get(http_notes.HEADER), time.monotonic() - begun
        content, notes = http_notes.split_notes(answer.content, length, took)
        wrong = misdirected(self.url, answer.status_code, answer.headers, content)
        if wrong is not None:
            wrong.server = self.server
            raise wrong
        status = answer.status_code
        if status == 404 and call.op in _REQUIRED and not _is_ours(content):
            excerpt = content[:200].decode("utf-8", "replace")
            raise EndpointMisconfigured(
                f"{self.url} has no {call.op} (see url): {excerpt}", server=self.server
            )
        if tool is not None and self._shows and status in UNAVAILABLE:
            status = ToolFailed.status
        session = session_of(answer, call.session)
        return Reply(status, without(secrets, content), session, notes=notes)

    async def _answers(self) -> bool:
        """Whether the server answers anything at all: one that does still runs what it was asked."""
        assert self._client is not None
        with suppress(httpx.HTTPError):
            await self._client.get(self.url, timeout=_PROBE_SECONDS)
            return True
        return False

    async def stream(self, call: Call) -> AsyncGenerator[bytes, None]:
        """See `Transport.stream`; the server is asked for a whole answer, whose events come in one chunk."""
        body = orjson.loads(call.body)
        reply = await self.call(call._replace(body=encode(without_stream(body))))
        try:
            answer = reply.json()
        except GymError as error:
            error.server = error.server or self.server
            raise
        yield finished_stream(call.op, body, answer)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None


def misdirected(url: str, status: int, headers: Mapping[str, str], content: bytes) -> GymError | None:
    """The error of an answer that comes from no graph; None for any other answer."""
    if 300 <= status < 400:
        where = headers.get("location", "")[:200]
        return EndpointMisconfigured(f"{url} redirects to {where!r}: set url to where it leads")
    if status == 404 and _NO_ROUTE in content:
        return Unavailable(f"no graph at {url}, or its proxy is still starting")
    return None


def without(secrets: list[str], content: bytes) -> bytes:
    """An answer without the keys that were sent: rollouts are kept."""
    for secret in secrets:
        content = content.replace(secret.encode(), b"***")
    return content


def with_endpoint(call: Call) -> Call:
    """The call with the endpoint of the row's model in the row, as another graph or agent takes it. Raises
    EndpointMisconfigured: it is for a model, whose protocol has no place for it."""
    assert call.endpoint is not None
    if call.op != "run":
        raise EndpointMisconfigured(f"`{MODEL_FIELD}` cannot be sent to a server of the type `http`")
    row = {**orjson.loads(call.body), MODEL_FIELD: call.endpoint.complete}
    return call._replace(body=encode(row))


_COOKIE = "cookie:"
_REQUIRED = frozenset({"run", "seed_session", "verify", *PROTOCOLS})
"""Operations that every server of a kind has; if one is missing, the URL is not that of such a server."""
_NO_ROUTE = b"/-/routes for available routes"
"""Serve's proxy answers every path like this until it knows which applications run."""


def _is_ours(content: bytes) -> bool:
    """Whether an error body comes from gym_serve, whose servers name what was not found."""
    try:
        error: Any = orjson.loads(content).get("error")
        return isinstance(error["code"], str)
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError):
        return False


def new_client(headers: Mapping[str, str]) -> httpx.AsyncClient:
    """A client of servers elsewhere, by the proxies of the environment (httpx's ``trust_env``).

    It keeps no cookie: sessions are per call, and an episode that seeds with the cookie of another one would
    share its session.
    """
    no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=()))
    transport = import_module("httpx_aiohttp").AiohttpTransport(limits=httpx.Limits(max_connections=None))
    return httpx.AsyncClient(cookies=no_cookies, transport=transport, headers=dict(headers))


def session_headers(session: str | None, affinity: str | None = None) -> dict[bytes, bytes]:
    """The headers of a call in a session, as `session_of` has found it; without one, of a new episode."""
    if session is None:
        # A row may name its rollout in any script.
        key = quote(affinity or "", ":", errors="replace").encode()
        return {b"x-session-affinity": key} if key else {}
    if session.startswith(_COOKIE):
        return {b"cookie": session.removeprefix(_COOKIE).encode()}
    return {b"x-session-id": session.encode(), b"cookie": f"gym_session={session}".encode()}


def session_of(answer: httpx.Response, before: str | None) -> str | None:
    """The session of an answer: gym_serve's header, else all cookies (NeMo Gym's sessions)."""
    if session := answer.headers.get("x-session-id"):
        return str(session)
    if set_cookies := answer.headers.get_list("set-cookie"):
        cookies: SimpleCookie = SimpleCookie()
        if before and before.startswith(_COOKIE):
            cookies.load(before.removeprefix(_COOKIE))
        for set_cookie in set_cookies:
            cookies.load(set_cookie)
        return _COOKIE + "; ".join(f"{name}={morsel.coded_value}" for name, morsel in cookies.items())
    return before

"""The transports that need no Ray: HTTP, to any URL with the routes of docs/formats.md, and inline.

Between two graphs of gym_serve, notes of a reply (`gym_serve.observe.timeline`) cross as well. Who wants
them sends the header `NOTES_HEADER`; anybody else gets the answer that the formats define. The notes
follow the body, as JSON, and the answer's `NOTES_HEADER` is their length in bytes: a header would be too
short for the prompts of judges, and a key in the body would change what a model reads of a tool. The
server at a URL may be anybody's, so it is believed, within limits, what it tells of its own call: no step
outside of it, and none that only an agent makes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import suppress
from http.cookiejar import CookieJar, DefaultCookiePolicy
from http.cookies import SimpleCookie
from importlib import import_module
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import msgspec
import orjson

from gym_serve.observe.timeline import MODEL_CALLS, QUEUED, TTFT, microseconds
from gym_serve.servers.context import patience
from gym_serve.servers.protocols import PROTOCOLS, finished_stream, without_stream
from gym_serve.servers.runner import GETS, ServerRunner
from gym_serve.servers.tools import UNAVAILABLE, UnavailableTools, is_tool_name
from gym_serve.servers.transport import Call, Reply, encode
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
from gym_serve.types.timeline import ModelStep

NOTES_HEADER = "x-gym-notes"
NOTES_WANTED = "1"
"""The value of `NOTES_HEADER` in a request."""

_LARGEST = 4 * 2**20  # bytes
_TEXTS = ("prompt", "answer")

_Name = Annotated[str, msgspec.Meta(max_length=256)]
_Url = Annotated[str, msgspec.Meta(max_length=2048)]
_Microseconds = Annotated[int, msgspec.Meta(ge=0, le=10**13)]


class _Calls(msgspec.Struct):
    """Model calls that a server made; see `Recorder.take`."""

    age: _Microseconds
    servers: list[_Name]
    endpoints: list[_Url]
    steps: list[ModelStep]


class _Notes(msgspec.Struct, omit_defaults=True):
    replica: _Name | None = None
    queued: _Microseconds | None = None
    endpoint: _Url | None = None
    retries: _Microseconds | None = None
    ttft: _Microseconds | None = None
    model_calls: _Calls | None = None


def with_notes(reply: Reply) -> tuple[bytes, dict[str, str]]:
    """The content of an answer, with the notes of the reply behind it, and the header that says so.

    The texts of judges are left out where there are too many of them.
    """
    notes = {key: value for key, value in (reply.notes or {}).items() if key in _Notes.__struct_fields__}
    header = encode(notes)
    if len(header) > _LARGEST and MODEL_CALLS in notes:
        calls = notes[MODEL_CALLS]
        steps = [_without_texts(step) for step in calls["steps"]]
        header = encode({**notes, MODEL_CALLS: {**calls, "steps": steps}})
    if not notes or len(header) > _LARGEST:
        return reply.content, {}
    return reply.content + header, {NOTES_HEADER: str(len(header))}


def split_notes(content: bytes, length: str | None, seconds: float) -> tuple[bytes, dict[str, Any] | None]:
    """Body and notes of an answer to somebody who asked for them.

    Args:
        length: the answer's `NOTES_HEADER`.

    Returns:
        the body, and what is believed of the notes, None for nothing. Of an answer without notes, or with
        something else in their place, all is body.
    """
    try:
        size = int(length or "0")
        if not 0 < size <= min(len(content), _LARGEST):
            return content, None
        notes = msgspec.json.decode(content[-size:], type=_Notes)
    except (ValueError, msgspec.DecodeError):
        return content, None
    took = microseconds(seconds)
    believed: dict[str, Any] = msgspec.to_builtins(notes)
    for key in (QUEUED, TTFT):
        if key in believed:
            believed[key] = min(believed[key], took)
    if (calls := notes.model_calls) is not None:
        steps = [_as_recorded(step) for step in calls.steps if _is_of_the_call(step, calls, took)]
        believed[MODEL_CALLS]["steps"] = steps
    return content[:-size], believed


def _is_of_the_call(step: ModelStep, calls: _Calls, took: int) -> bool:
    """Whether a server can have made a step in a call that took so many microseconds."""
    return (
        calls.age - took <= step.ts <= step.ts + step.dur <= calls.age
        and step.server < len(calls.servers)
        and (step.more.endpoint is None or step.more.endpoint < len(calls.endpoints))
        and step.more.stage is not None  # without one, it is the agent's own
    )


def _as_recorded(step: ModelStep) -> list[Any]:
    kind, ts, dur, queued, *others, more = msgspec.to_builtins(step)
    return [kind, int(ts), int(dur), int(queued), *others, more]


def _without_texts(step: list[Any]) -> list[Any]:
    if type(step[-1]) is not dict:
        return step
    return [*step[:-1], {key: value for key, value in step[-1].items() if key not in _TEXTS}]


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
            NOTES_HEADER.encode(): NOTES_WANTED.encode(),
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
        length, took = answer.headers.get(NOTES_HEADER), time.monotonic() - begun
        content, notes = split_notes(answer.content, length, took)
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


class InlineTransport:
    """Reaches a server inside this process."""

    def __init__(self, runner: ServerRunner) -> None:
        self.server = runner.server.name
        self.runner = runner

    def call(self, call: Call) -> Coroutine[Any, Any, Reply]:
        return self.runner.dispatch(call)

    def stream(self, call: Call) -> AsyncGenerator[bytes, None]:
        return self.runner.stream(call)

    async def close(self) -> None:
        """Nothing: whoever started the runner stops it."""

"""HTTP on one side, `Call` and `Reply` on the other: what the gateway reads and writes.

Routes are ``/{server}/{operation}``, with the operations of docs/formats.md. A tool is a route of its
environment like the others, but has a namespace of its own inside (``tools/{name}``), so that no tool and no
path can be taken for ``verify`` or another route. A model is also found below ``/{model}/rollouts/{id}``,
where its calls are recorded for an external harness (`gym_serve.servers.captures`): the id is a session,
and is part of the path because harnesses set no headers.

Bodies pass through as bytes. They are decoded only if the answer depends on their content: a request for a
stream, and a verdict that overrides keys of its row.

The request headers are in docs/http.md. Serve has a deadline of its own (``x-request-timeout-seconds``),
which its proxy answers with 408 and plain text; ``x-request-timeout`` is answered like every other failure.
"""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import NamedTuple

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gym_serve.graph.spec import Node, nearest
from gym_serve.observe.tracing import checked_parent
from gym_serve.servers.captures import CLOSE, OPEN, TRAJECTORIES
from gym_serve.servers.model import COUNT_TOKENS
from gym_serve.servers.protocols import PROTOCOLS, error_event, without_stream
from gym_serve.servers.runner import EACH, GETS
from gym_serve.servers.tools import RESERVED, is_tool_name
from gym_serve.servers.transport import Call, Reply, Transport, encode
from gym_serve.transports import NOTES_HEADER, NOTES_WANTED, with_notes
from gym_serve.types.errors import (
    BadRequest,
    GymError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    TooLarge,
)
from gym_serve.types.exact import exact_json
from gym_serve.types.protocols import error_message

SESSION_COOKIE = "gym_session"

_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # the latter is nginx's
_OF_ANTHROPIC = ("/v1/messages", "/v1/messages/count_tokens")
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:/+=@-]{1,128}")
_MEDIA_TYPE = "application/json"
_POSTS = frozenset({"run", "aggregate_metrics", OPEN, COUNT_TOKENS, *PROTOCOLS})
_IN_SESSION = frozenset({"verify", "step", "close", "close_session"})


class Route(NamedTuple):
    """A place to send a call to.

    Attributes:
        server: name of the server.
        op: its operation.
        method: HTTP method that the route takes.
        beside: another method that the path takes, for another operation.
        in_session: whether the call goes to the replica that holds the client's session.
        session: the session that the path names.
    """

    server: str
    op: str
    method: str = "POST"
    in_session: bool = False
    session: str | None = None
    beside: str | None = None


def find_route(method: str, path: str, nodes: Mapping[str, Node]) -> Route:
    """The server and operation of a path below the graph's, without a slash at either end.

    An operation that no format defines has the method POST; only the server knows which ones there are.

    Raises:
        NotFound: the server is unknown, or cannot have such a route.
    """
    server, _, op = path.partition("/")
    if server not in nodes:
        shown = server[:100]
        raise NotFound(f"unknown server {shown!r}{nearest(shown, nodes)}")
    if op.startswith(EACH):
        raise NotFound(f"{server} has no route /{op[:100]}")
    if nodes[server].kind == "model" and op.startswith(f"{OPEN}/"):
        return _in_capture(method, server, op)
    resources = nodes[server].kind == "resources"
    if op in GETS:
        return Route(server, op, "GET")
    if resources and op in RESERVED:
        return Route(server, op, in_session=op in _IN_SESSION)
    if resources and is_tool_name(op):
        return Route(server, f"tools/{op}", in_session=True)
    if resources or (method != "POST" and op not in _POSTS):
        raise NotFound(f"{server} has no route /{op[:100]}")
    return Route(server, op)


def _in_capture(method: str, server: str, op: str) -> Route:
    _, session, called = (*op.split("/", 2), "")[:3]
    if called:
        in_v1 = f"{OPEN}/{called}"
        return Route(server, in_v1, "GET" if called in GETS else "POST", session=session)
    if method == "DELETE":
        return Route(server, CLOSE, "DELETE", session=session, beside="GET")
    return Route(server, TRAJECTORIES, "GET", session=session, beside="DELETE")


def wrong_method(request: Request, *methods: str) -> Response | None:
    """The refusal of a request whose method is none of ``methods``; None for any other one."""
    if request.method in methods or (request.method == "HEAD" and "GET" in methods):
        return None
    path, use = request.scope["path"][:100], " or ".join(methods)
    response = failed(MethodNotAllowed(f"the method of {path} must be {use}, got {request.method[:20]}"))
    response.headers["allow"] = ", ".join((*methods, "HEAD") if "GET" in methods else methods)
    return response


def request_id_of(request: Request) -> str:
    """The id that came with a request, or a new one if that is unfit for a log line."""
    header = request.headers.get("x-request-id", "")
    return header if _REQUEST_ID.fullmatch(header) else uuid.uuid4().hex


async def body_of(request: Request, limit: int) -> bytes:
    """The body of a request; its length is checked before it is read.

    Serve's proxy reads all that a client sends until it is answered. So a body without a length is refused:
    it could be counted only after the proxy has read it.

    Args:
        limit: the most bytes that it may have.

    Raises:
        TooLarge: it has more.
        BadRequest: it has no ``Content-Length``, or is compressed.
    """
    if (encoding := request.headers.get("content-encoding", "identity")).lower() not in ("identity", ""):
        raise BadRequest(
            f"`content-encoding` is not supported, got {encoding[:20]!r}; send the body as it is"
        )
    if "transfer-encoding" in request.headers:
        raise BadRequest("`transfer-encoding` is not supported; send the body with a `content-length`")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal():
        raise BadRequest(f"`content-length` must be a number of bytes, got {length[:20]!r}")
    if len(length) > 18 or int(length) > limit:
        raise TooLarge(
            f"the body must have at most {limit} bytes (gateway.max_request_bytes), got {length[:18]}"
        )
    return await request.body()


def timeout_of(request: Request) -> float | None:
    """Seconds that the client waits; None for no limit. Raises BadRequest: the header is not a positive
    number."""
    header = request.headers.get("x-request-timeout")
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise BadRequest(f"`x-request-timeout` must be a positive number of seconds, got {header[:40]!r}")
    return seconds


def traceparent_of(request: Request) -> str | None:
    """The span of the client that a request is a part of, if it names one (W3C Trace Context)."""
    return checked_parent(request.headers.get("traceparent"))


def session_of(request: Request, other: str | None = None) -> str | None:
    """The session of a request: its header, else ``other``, else its cookie."""
    return request.headers.get("x-session-id") or other or request.cookies.get(SESSION_COOKIE) or None


def known_agent(name: object, agents: Sequence[str]) -> str:
    """The agent of a row. ``name``: as the row says it, else the default agent; None for none. Raises
    InvalidRequest: nothing names it; NotFound: there is no such agent."""
    if name is None:
        named = ", ".join(agents) or "none"
        raise InvalidRequest(f"`agent_ref` is missing, and there is no default agent; agents: {named}")
    if name not in agents:
        shown = str(name)[:100]
        raise NotFound(f"unknown agent {shown!r}{nearest(shown, agents)}")
    return str(name)


def stream_of(op: str, body: bytes) -> tuple[bytes, bool]:
    """Whether a model call asks for a stream.

    Returns:
        the body to pass on, without ``stream`` and ``stream_options`` if it asks for none, as servers do
        not know these keys; and whether it does.

    Raises:
        BadRequest: ``stream`` is not a boolean, or ``stream_options`` not an object.
    """
    if op.removeprefix(f"{OPEN}/") not in PROTOCOLS or b'"stream' not in body:
        return body, False
    try:
        content = exact_json(body)
    except ValueError:
        return body, False  # the server says what is wrong with it
    if not isinstance(content, dict):
        return body, False
    if not isinstance(content.get("stream"), bool | None):
        raise BadRequest(f"`stream` must be a boolean, got {str(content['stream'])[:40]!r}")
    if not isinstance(content.get("stream_options"), dict | None):
        raise BadRequest(f"`stream_options` must be an object, got {str(content['stream_options'])[:40]!r}")
    if content.get("stream"):
        return body, True
    return encode(without_stream(content)), False


def merged(request: bytes, verdict: Reply) -> Reply:
    """The answer of ``/verify``: the request's fields, overridden and followed by the verdict's."""
    fields = verdict.json()
    if not fields or any(_may_stand_in(key, request) for key in fields):
        return verdict._replace(body=encode({**exact_json(request), **fields}))
    # The encoded objects are joined without decoding them: an episode with its token ids is megabytes.
    head = request.rstrip()[:-1].rstrip()
    comma = b"" if head.endswith(b"{") else b","
    return verdict._replace(body=head + comma + verdict.body.lstrip()[1:])


def _may_stand_in(key: str, request: bytes) -> bool:
    """Whether a request may have a key; a key with special characters can be written in several ways."""
    return not (key.isascii() and key.isidentifier()) or b'"%s"' % key.encode() in request


def answer(reply: Reply, request: Request | None = None) -> Response:
    """The reply, unchanged: a model reads the error of a tool, so nothing is added to its body."""
    if request is not None and request.headers.get(NOTES_HEADER) == NOTES_WANTED:
        content, headers = with_notes(reply)
        response = Response(content, reply.status, headers, media_type=_MEDIA_TYPE)
    else:
        response = Response(reply.content, reply.status, media_type=_MEDIA_TYPE)
    if reply.status == 401:
        response.headers["www-authenticate"] = 'Bearer realm="gym_serve"'
    if reply.status in (429, 503):
        try:
            reply.json()
        except GymError as error:
            if error.retry_after is not None:
                response.headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    return response


def failed(error: GymError) -> Response:
    """The response that carries a failure."""
    return answer(Reply.failed(error))


def in_form_of(path: str, response: Response) -> Response:
    """A response in the form of its protocol: failures of Anthropic's Messages have a form of their own."""
    if response.status_code < 400 or not path.rstrip("/").endswith(_OF_ANTHROPIC):
        return response
    try:
        body = orjson.loads(bytes(response.body))
    except orjson.JSONDecodeError:
        body = {}
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict) and body.get("type") != "error":
        response.body = encode(error_message(response.status_code, error))
        response.headers["content-length"] = str(len(response.body))
    return response


def keep_session(response: Response, session: str, path: str) -> None:
    """Hand the client its session, for requests below ``path``."""
    response.headers["x-session-id"] = session
    response.set_cookie(SESSION_COOKIE, session, path=path, httponly=True, samesite="lax")


def drop_session(response: Response, path: str) -> None:
    """Make the client forget its session."""
    response.delete_cookie(SESSION_COOKIE, path=path, httponly=True, samesite="lax")


async def open_stream(transport: Transport, call: Call) -> StreamingResponse:
    """The answer of a call as server-sent events, which the client reads while the server produces them.

    The first event decides: a call that fails before it is answered like any other, with its status. One that
    fails later ends in the error event of its protocol. A client that goes away cancels the call, down to the
    model's backend, and one that reads slowly makes the model wait.

    Raises:
        GymError: the call failed before its first event.
    """
    events = transport.stream(call)
    try:
        first = await anext(events, b"")
    except BaseException:
        await events.aclose()
        raise
    return ClosingStream(_chunks(call.op, first, events), events, "text/event-stream")


class ClosingStream(StreamingResponse):
    """A stream, of which nothing runs any more once the response has ended, however."""

    def __init__(
        self, content: AsyncGenerator[bytes, None], source: AsyncGenerator[bytes, None], media_type: str
    ) -> None:
        super().__init__(content, media_type=media_type, headers=_STREAM_HEADERS)
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._source.aclose()


async def _chunks(op: str, first: bytes, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    yield first
    try:
        async for chunk in events:
            yield chunk
    except GymError as error:
        yield error_event(op, error)
    except Exception as error:
        yield error_event(op, GymError(f"the stream of {op} failed: {type(error).__name__}: {error}"))

"""HTTP on one side, `Call` and `Reply` on the other: what the gateway reads and writes.

Bodies pass through as bytes. They are decoded only where the answer depends on what is in them:
a request for a stream, and a verdict that overrides keys of its row.

Request headers, beside the body:

| header | meaning |
|---|---|
| ``x-request-id`` | names the request in logs; Serve's proxy makes one up, and echoes it |
| ``x-request-timeout`` | seconds that the client waits; then the call is cancelled: 504 |
| ``x-session-id``, or the cookie ``gym_session`` | session with a resources server |
| ``x-session-affinity`` | key of an episode; its model calls go to one replica |

Serve has a deadline of its own (``x-request-timeout-seconds``), which its proxy answers with 408
and plain text; the one here is answered like every other failure.
"""

from __future__ import annotations

import math
import re
import uuid

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gym_serve.servers.captures import OPEN
from gym_serve.servers.protocols import PROTOCOLS, without_stream
from gym_serve.servers.transport import Reply, encode
from gym_serve.types.errors import BadRequest, GymError, InvalidRequest, TooLarge
from gym_serve.types.protocols import error_message

__all__ = [
    "SESSION_COOKIE",
    "STREAM_HEADERS",
    "answer",
    "body_of",
    "drop_session",
    "failed",
    "in_form_of",
    "keep_session",
    "merged",
    "request_id_of",
    "session_of",
    "stream_of",
    "timeout_of",
]

SESSION_COOKIE = "gym_session"

STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""For streams; the latter is nginx's."""

_OF_ANTHROPIC = ("/v1/messages", "/v1/messages/count_tokens")
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:/+=@-]{1,128}")
_MEDIA_TYPE = "application/json"


def request_id_of(request: Request) -> str:
    """The id that came with a request, or a new one where that has no place in a log line."""
    given = request.headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


async def body_of(request: Request, limit: int) -> bytes:
    """The body of a request, which is looked at before it is read.

    Serve's proxy takes all that a client sends for as long as nobody has answered. So a body that does not
    tell its length is refused: it could be counted only when the proxy has it.

    Args:
        limit: bytes that it may have.

    Raises:
        TooLarge: it has more.
        BadRequest: it does not tell its length.
    """
    if "transfer-encoding" in request.headers:
        raise BadRequest("send the body in one piece, with a Content-Length, not with a Transfer-Encoding")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal():
        raise BadRequest(f"Content-Length must be a number of bytes, got {length[:20]!r}")
    if len(length) > 18 or int(length) > limit:
        raise TooLarge(
            f"the body has {length[:18]} bytes; the graph takes {limit} at most (gateway.max_request_bytes)"
        )
    return await request.body()


def timeout_of(request: Request) -> float | None:
    """Seconds that the client waits; None for no limit.

    Raises:
        BadRequest: the header is no positive number.
    """
    given = request.headers.get("x-request-timeout")
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise BadRequest(f"`x-request-timeout` must be a positive number of seconds, got {given[:40]!r}")
    return seconds


def session_of(request: Request, other: str | None = None) -> str | None:
    """The session that a request belongs to: its header goes before ``other``, and that before the cookie."""
    return request.headers.get("x-session-id") or other or request.cookies.get(SESSION_COOKIE) or None


def stream_of(op: str, body: bytes) -> tuple[bytes, bool]:
    """Whether a model call asks for a stream.

    Returns:
        the body to pass on, without ``stream`` and ``stream_options`` if it asks for none, as servers do
        not know these keys; and whether it does.

    Raises:
        InvalidRequest: ``stream`` is no boolean, or ``stream_options`` no object.
    """
    if op.removeprefix(f"{OPEN}/") not in PROTOCOLS or b'"stream' not in body:
        return body, False
    try:
        asked = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body, False  # the server says what is wrong with it
    if not isinstance(asked, dict):
        return body, False
    if not isinstance(asked.get("stream"), bool | None):
        raise InvalidRequest(f"`stream` must be a boolean, got {str(asked['stream'])[:40]!r}")
    if not isinstance(asked.get("stream_options"), dict | None):
        raise InvalidRequest("`stream_options` must be an object")
    if asked.get("stream"):
        return body, True
    return encode(without_stream(asked)), False


def merged(request: bytes, verdict: Reply) -> Reply:
    """The answer of ``/verify``: the request's fields, and the verdict's in their place or after them."""
    fields = verdict.json()
    if not fields or any(_may_stand_in(key, request) for key in fields):
        return verdict._replace(body=encode({**orjson.loads(request), **fields}))
    # The two objects join as they are: an episode with its token ids is megabytes.
    head = request.rstrip()[:-1].rstrip()
    comma = b"" if head.endswith(b"{") else b","
    return verdict._replace(body=head + comma + verdict.body.lstrip()[1:])


def _may_stand_in(key: str, request: bytes) -> bool:
    """Whether a request may have a key; any but a plain one could be written in several ways."""
    return not (key.isascii() and key.isidentifier()) or b'"%s"' % key.encode() in request


def answer(reply: Reply) -> Response:
    """The reply as it is: a tool's error is what a model reads, so nothing is added to a body."""
    response = Response(reply.body, reply.status, media_type=_MEDIA_TYPE)
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
    """A response as the protocol of its path has it: failures of Anthropic's Messages have their own form."""
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

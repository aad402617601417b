"""Who may ask the viewer, and what its answers allow a browser to do.

Rollouts are private, and written by a model: the page that shows them must neither be read by another site
nor be steered by what it shows.

- On loopback, the ``Host`` header must name this machine: a site whose name is pointed at 127.0.0.1 (DNS
  rebinding) has its own name there. Elsewhere a token is required.
- What changes something needs the header ``X-Gym-Serve``, which no form and no other site can send.
- The policy of content allows no inline script or style and no other host.
"""

from __future__ import annotations

import hmac
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gym_serve.gateway.access import is_loopback
from gym_serve.types.errors import Forbidden, GymError, Unauthorized

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:;"
    " media-src data: blob:; font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
"""Of every answer."""


class Guard:
    """ASGI middleware: refuses requests, and adds `HEADERS` to all answers. ``token``: what API requests must
    bear; None on loopback."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                if scope["path"].startswith("/api/"):
                    headers["Cache-Control"] = "no-store"
                else:
                    headers["Cache-Control"] = "no-cache"
            await send(message)

        refused = self._refusal(scope)
        answer: ASGIApp = self._app if refused is None else error_answer(refused)
        await answer(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> GymError | None:
        headers = Headers(scope=scope)
        if self._token is None and not _is_here(headers.get("host", "")):
            return Forbidden("the Host header must name this machine, such as 127.0.0.1 or localhost")
        if scope["path"].startswith("/api/") and self._token is not None:
            header = headers.get("authorization", "")
            if not hmac.compare_digest(header.encode(), f"Bearer {self._token}".encode()):
                return Unauthorized(
                    "the token is missing or wrong: open the URL that `gym-serve view` printed"
                )
        if scope["method"] not in ("GET", "HEAD") and headers.get("x-gym-serve") != "1":
            return Forbidden("a change needs the header X-Gym-Serve: 1")
        return None


def error_answer(error: GymError, status: int | None = None, **more: Any) -> Response:
    """The answer that tells an error."""
    import orjson

    body = {"error": {"code": error.code, "message": error.message, **more}}
    return Response(orjson.dumps(body), status or error.status, media_type="application/json")


def _is_here(header: str) -> bool:
    """Whether a ``Host`` header names this machine alone."""
    try:
        name = urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return False
    return is_loopback(name.removesuffix("."))

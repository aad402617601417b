"""The viewer's HTTP API and page. It only reads, except annotations.

Who may ask the viewer, and what its answers allow a browser to do.

Rollouts are private, and written by a model: the page that shows them must neither be read by another site
nor be steered by what it shows.

- On loopback, the ``Host`` header must name this machine: a site whose name is pointed at 127.0.0.1 (DNS
  rebinding) has its own name there. Elsewhere a token is required.
- What changes something needs the header ``X-Gym-Serve``, which no form and no other site can send.
- The policy of content allows no inline script or style and no other host.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gym_serve.gateway.access import is_loopback
from gym_serve.metrics import Failures
from gym_serve.types.errors import (
    BadRequest,
    Forbidden,
    GymError,
    InvalidRequest,
    NotFound,
    TooLarge,
    Unauthorized,
)
from gym_serve.types.exact import exact_bytes
from gym_serve.view.conversation import read_rollout
from gym_serve.view.expression import NAMES, BadExpression, written
from gym_serve.view.queries import MOST_ROWS, read_rollouts, read_tasks, reading_all
from gym_serve.view.runs import Reading
from gym_serve.view.sources import shown
from gym_serve.view.statistics import compare_runs, read_summary
from gym_serve.view.tokens import read_tokens
from gym_serve.view.view import View

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


STATIC = Path(__file__).parent / "static"
_LARGEST_BODY = 1 << 20

_Handler = Callable[[View, Request], Any]


def application(view: View, token: str | None = None) -> Guard:
    """The viewer as an ASGI application. ``token``: what requests must bear; None for a viewer that only this
    machine reaches."""
    routes: list[BaseRoute] = [
        *(Route(f"/api/{path}", _answering(view, handler)) for path, handler in _HANDLERS.items()),
        Route("/api/annotations/{run}/{n:int}", _annotating(view), methods=["GET", "PUT"]),
        Route("/", _page),
    ]
    if STATIC.is_dir():
        routes.append(Mount("/static", StaticFiles(directory=STATIC)))
    handlers: dict[Any, Any] = {HTTPException: _refused, Exception: _failed}
    return Guard(Starlette(routes=routes, exception_handlers=handlers), token)


def runs_json(view: View) -> dict[str, Any]:
    """The runs and how far they are indexed."""
    entries = []
    for run in view.runs.values():
        with run.reading() as reading:
            state = reading.state
            rows = reading.sql("SELECT count(*) FROM rollouts")
            extra = bool(state.get("unfinished")) + bool(state.get("error"))
            entries.append(
                {
                    "id": run.id,
                    "name": run.files.name,
                    "path": shown(run.files.main),
                    "bytes": state.get("bytes", 0),
                    "indexed_bytes": state.get("indexed", 0),
                    "rollouts": rows[0][0] if rows else 0,
                    "done": bool(state.get("done")),
                    "problems": reading.problems(),
                    "problem_count": state.get("problems", 0) + extra,
                }
            )
    return {"runs": entries, "live": False}


def _runs(view: View, request: Request) -> Any:
    view.find()
    return runs_json(view)


def _summary(view: View, request: Request) -> Any:
    runs = view.chosen(request.query_params.getlist("run"))
    return read_summary(runs, _where(request), _failures(request))


def _table(read: Callable[..., Any]) -> _Handler:
    def page(view: View, request: Request) -> Any:
        limit = number_of(request, "limit")
        span = number_of(request, "offset") or 0, min(MOST_ROWS, 100 if limit is None else limit)
        runs = view.chosen(request.query_params.getlist("run"))
        return read(runs, _where(request), request.query_params.get("sort"), *span)

    return page


def _rollout(view: View, request: Request) -> Any:
    with _reading(view, request) as reading:
        return read_rollout(reading, _n(request), number_of(request, "from"), number_of(request, "to"))


def _raw(view: View, request: Request) -> Any:
    with _reading(view, request) as reading:
        return Response(reading.line(_n(request)), media_type="text/plain; charset=utf-8")


def _tokens(view: View, request: Request) -> Any:
    with _reading(view, request) as reading:
        return read_tokens(reading, _n(request), number_of(request, "from") or 0, number_of(request, "to"))


def _compare(view: View, request: Request) -> Any:
    params = request.query_params
    left, right = view.run(params.get("left", "")), view.run(params.get("right", ""))
    own = (params.get("left_where", ""), params.get("right_where", ""))
    return compare_runs(left, right, _where(request), *own, failures=_failures(request))


def _suggestions(view: View, request: Request) -> Any:
    prefix = request.query_params.get("prefix", "").lower()
    return {"names": [name for name in names_of(view) if name.lower().startswith(prefix)]}


def names_of(view: View) -> list[str]:
    """The names that a filter of these runs may have."""
    with reading_all(list(view.runs.values())) as readings:
        own = dict.fromkeys(name for reading in readings for name in reading.own)
    return [*NAMES, *map(written, own)]


def _exported(view: View, request: Request) -> Any:
    runs = view.chosen(request.query_params.getlist("run"))
    lines = [
        orjson.dumps({"run": run.files.name, **line}, option=orjson.OPT_APPEND_NEWLINE)
        for run in runs
        for line in run.annotations.lines()
    ]
    headers = {"Content-Disposition": 'attachment; filename="annotations.jsonl"'}
    return Response(b"".join(lines), media_type="application/jsonl", headers=headers)


_HANDLERS: dict[str, _Handler] = {
    "runs": _runs,
    "summary": _summary,
    "rollouts": _table(read_rollouts),
    "tasks": _table(read_tasks),
    "compare": _compare,
    "suggestions": _suggestions,
    "annotations.jsonl": _exported,
    "rollout/{run}/{n:int}": _rollout,
    "rollout/{run}/{n:int}/raw": _raw,
    "rollout/{run}/{n:int}/tokens": _tokens,
}


def _answering(view: View, handler: _Handler) -> Callable[[Request], Any]:
    async def answer(request: Request) -> Response:
        try:
            return await run_in_threadpool(lambda: _encoded(handler(view, request)))
        except GymError as error:
            return _told(error)

    return answer


def _annotating(view: View) -> Callable[[Request], Any]:
    async def annotate(request: Request) -> Response:
        try:
            content = None
            if request.method == "PUT":
                content = await _body(request)
            return await run_in_threadpool(lambda: _encoded(_annotation(view, request, content)))
        except GymError as error:
            return _told(error)

    return annotate


def _annotation(view: View, request: Request, given: Any) -> Any:
    n = _n(request)
    with _reading(view, request) as reading:
        rows = reading.sql("SELECT id FROM details WHERE n = ?", (n,))
    if not rows:
        raise NotFound(f"there is no rollout {n}")
    annotations = reading.run.annotations
    return annotations.of(n, rows[0][0]) if given is None else annotations.put(n, rows[0][0], given)


async def _body(request: Request) -> Any:
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > _LARGEST_BODY:
            raise TooLarge(f"the body must have at most {_LARGEST_BODY:,} bytes")
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is no JSON: {error}") from None


def _encoded(answer: Any) -> Response:
    if isinstance(answer, Response):
        return answer
    return Response(exact_bytes(answer), media_type="application/json")


def _told(error: GymError) -> Response:
    if isinstance(error, BadExpression):
        return error_answer(error, 400, position=error.position)
    return error_answer(error)


async def _refused(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return error_answer(
        NotFound("there is no such page") if status == 404 else BadRequest(str(error)), status
    )


async def _failed(request: Request, error: Exception) -> Response:
    return error_answer(GymError(f"the viewer failed: {error!r}"), 500)


async def _page(request: Request) -> Response:
    page = STATIC / "index.html"
    if not page.exists():
        return error_answer(NotFound("the page is not installed; the API is at api/runs"))
    return FileResponse(page)


def _reading(view: View, request: Request) -> AbstractContextManager[Reading]:
    return view.reading(request.path_params["run"])


def _n(request: Request) -> int:
    n: int = request.path_params["n"]
    if n >= 1 << 62:
        raise NotFound("there is no such rollout")
    return n


def _where(request: Request) -> str:
    return request.query_params.get("where", "")


def _failures(request: Request) -> Failures:
    choice = request.query_params.get("failures") or "mask"
    if choice not in ("mask", "zero"):
        raise BadRequest(f"`failures` must be mask or zero, got {choice[:20]!r}")
    return "zero" if choice == "zero" else "mask"


def number_of(request: Request, name: str) -> int | None:
    """A query parameter that is an integer from 0; None without it."""
    text = request.query_params.get(name)
    if text is None or text == "":
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise BadRequest(f"`{name}` must be an integer from 0, got {text[:20]!r}")
    return int(text)

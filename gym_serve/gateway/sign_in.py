"""Sign-in: how a person in a browser shows a graph's token, once, to all of its pages.

A page that is asked for without a token is answered with a form, under the same address and with 401. It
posts the token to ``/sign-in``, which answers with a pass (`gym_serve.gateway.access`) in a cookie and leads
back to the page. The token is in no address and in no log, and no script sees it or the pass.
``next`` of the form is that page, below the graph's root; ``DELETE`` takes the pass back from this browser.
"""

from __future__ import annotations

import asyncio
import html
import re
from collections import Counter
from urllib.parse import parse_qs, quote

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from gym_serve.gateway import html_pages, wire
from gym_serve.gateway.access import PASS_COOKIE, PASS_SECONDS, Access
from gym_serve.observe.logs import fault
from gym_serve.types.errors import GymError, Overloaded, Unauthorized

SIGN_IN = "sign-in"
"""The route."""

_WRONG_SECONDS = 1.0
_MOST_WRONG = 4
"""A wrong token is answered after a second, and so many of a client wait at once: it guesses 4 a second."""

_wrong: Counter[str] = Counter()  # that wait, by client

_LARGEST_FORM = 16_384
_PAGE = re.compile(r"(?:[A-Za-z0-9_.-]+(?:/[A-Za-z0-9_.-]+)*/?)?")  # a path that cannot lead to another host


def wants_form(request: Request) -> bool:
    """Whether a request that lacks the token is a person's, who opens a page in a browser."""
    return request.method == "GET" and "text/html" in request.headers.get("accept", "")


def form(root: str, page: str, error: GymError | None = None) -> HTMLResponse:
    """The page that asks for the token."""
    title = html.escape(root.strip("/") or "gym_serve")
    page = page if _PAGE.fullmatch(page) else ""
    message = "" if error is None else f"<p role=alert>{html.escape(error.message)}.</p>"
    return html_pages.page(
        f"<!doctype html><html lang=en>{html_pages.HEAD}<title>Sign in to {title}</title>"
        f"<main><h1>Sign in to {title}</h1>{message}"
        f'<form method=post action="{html.escape(quote(root))}/{SIGN_IN}">'
        f"<input type=hidden name=next value='{html.escape(page)}'>"
        "<p><label>The graph's token (its auth_token)<br><input type=password name=token required autofocus "
        "autocomplete=current-password></label> <button>Sign in</button></p></form></main></html>",
        Unauthorized.status,
        posts=True,
    )


async def answer(request: Request, root: str, access: Access) -> Response:
    """Answer a request for ``/sign-in``. Raises TooLarge, BadRequest: the form is none; Overloaded: the
    client guesses tokens."""
    path = f"{quote(root)}/"
    if request.method == "DELETE":
        response: Response = Response(status_code=204)
        response.delete_cookie(PASS_COOKIE, path, httponly=True, samesite="strict")
        return response
    if request.method == "GET":
        return form(root, "")
    if wrong := wire.wrong_method(request, "POST", "DELETE"):
        return wrong
    body = (await wire.body_of(request, _LARGEST_FORM)).decode("utf-8", "replace")
    fields = {name: values[0] for name, values in parse_qs(body, keep_blank_values=True).items()}
    page = fields.get("next", "")
    page = page if _PAGE.fullmatch(page) else ""
    response = RedirectResponse(f"{path}{page}", status_code=303)
    if access.secured:
        client = request.client.host if request.client else "a client"
        if _wrong[client] >= _MOST_WRONG:
            raise Overloaded("too many wrong tokens at once; try again in a moment")
        try:
            cookie = access.pass_of(fields.get("token", ""))
        except Unauthorized as error:
            _wrong[client] += 1
            try:
                await asyncio.sleep(_WRONG_SECONDS)
            finally:
                _wrong.subtract([client])
                if not _wrong[client]:
                    del _wrong[client]
            fault(None, "sign-in", f"{client} has typed a wrong token")
            return form(root, page, error)
        secure = "https" in (request.url.scheme, request.headers.get("x-forwarded-proto"))
        response.set_cookie(
            PASS_COOKIE, cookie, PASS_SECONDS, path=path, httponly=True, samesite="strict", secure=secure
        )
    return response

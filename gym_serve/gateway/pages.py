"""The pages of a graph: its root, its API documentation, sign-in, and those that packages add.

Names come from the graph file, and types may be import paths: everything is escaped, and the content security
policy allows the one style sheet, and a script of the graph's own where a page has one. So a page shows text
also where an escape is forgotten.

The API documentation has every route with its schema, a command, and a form to try it. It loads nothing
from the network, which clusters often lack, and can be read without its script (``docs_page.js``), which
makes the forms.

Sign-in shows a graph's token, once, to all of its pages. A page that is asked for without a token is
answered with a form, under the same address and with 401. It posts the token to ``/sign-in``, which
answers with a pass (`gym_serve.gateway.access`) in a cookie and leads back to the page. The token is in no
address and in no log, and no script sees it or the pass. ``next`` of the form is that page, below the
graph's root; ``DELETE`` takes the pass back from this browser.

Packages add pages and sites to every graph: entry points of the group ``gym_serve.pages``.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import html
import re
import shlex
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote

import orjson
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from gym_serve.gateway import wire
from gym_serve.gateway.access import PASS_COOKIE, PASS_SECONDS, Access
from gym_serve.gateway.host import LiveEpisodesOfGraph
from gym_serve.graph.spec import Node
from gym_serve.observe.logs import fault
from gym_serve.types.errors import GymError, Overloaded, Unauthorized

STYLE = (
    ":root{color-scheme:light dark;background:Canvas;color:CanvasText}"
    "body{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "pre,code,textarea,input{font:14px/1.45 ui-monospace,monospace;overflow-wrap:anywhere}"
    "pre{white-space:pre-wrap;margin:.5rem 0}td,th{text-align:left;vertical-align:top;padding:0 1rem 0 0}"
    "summary{cursor:pointer;padding:.2rem 0}.route{border-top:1px solid #8886}"
    ".route[open]{padding-bottom:1rem}details details,form,.answer{margin-left:1rem}.command,.answer pre{"
    "padding:.5rem;border:1px solid #8886}textarea,label input:not([type=checkbox]){display:block;width:100%;"
    "box-sizing:border-box;margin-bottom:.5rem}button{font:inherit;margin:.5rem .5rem .5rem 0}"
    "@media(max-width:40rem){table,tbody,tr,td{display:block}th{display:none}tr{padding:.4rem 0}}"
)
"""The style sheet of every page."""

HEAD = (
    '<meta charset=utf-8><meta name=viewport content="width=device-width, initial-scale=1">'
    f"<style>{STYLE}</style>"
)
"""How the head of every page begins."""

_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
_HEADERS = {
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_SCRIPT = "; script-src 'self'; connect-src 'self'; require-trusted-types-for 'script'; trusted-types 'none'"
_LINKS = {
    "ui": "episodes while they run, and the load of the servers",
    "docs": "every route, with its schema and a form to try it",
    "openapi.json": "the same, as OpenAPI 3.1",
    "graph": "every server with its settings",
    "episodes": "what runs now",
    "health": "state of every server",
    "pressure": "load of every server, and the bottleneck",
    "stats": "metrics: what all replicas have counted",
}
KINDS = {"agent": "agent", "resources": "environment", "model": "model"}
"""What each kind of server is called, in the order in which people want to read of them."""

_ENDPOINTS = ("agent", "model")


def response(content: str, status: int = 200, *, posts: bool = False, script: bool = False) -> HTMLResponse:
    """The response that carries a page, whose style is `STYLE`. ``posts``: whether it has a form, which is
    posted to the graph; ``script``: whether it has a script, which comes from the graph and asks the graph
    alone."""
    headers = dict(_HEADERS)
    if posts:
        policy = headers["content-security-policy"]
        headers["content-security-policy"] = policy.replace("form-action 'none'", "form-action 'self'")
        headers["referrer-policy"] = "same-origin"  # else browsers post the form with `Origin: null`
    if script:
        headers["content-security-policy"] += _SCRIPT
    return HTMLResponse(content, status, headers)


def home(
    prefix: str, nodes: Mapping[str, Node], default_agent: str | None, sites: Collection[str] = ()
) -> str:
    """The page at the root of a graph: what runs, and where to go on."""
    links = "".join(
        f'<li><a href="{_path(prefix, name)}">/{name}</a>: {what}</li>'
        for name, what in _LINKS.items()
        if name != "ui" or name in sites
    )
    order = list(KINDS)
    rows = sorted(nodes.values(), key=lambda node: order.index(node.kind))
    servers = "".join(_row(prefix, node, is_default=node.name == default_agent) for node in rows)
    title = html.escape(prefix.strip("/") or "gym_serve")
    return (
        f"<!doctype html><html lang=en>{HEAD}<title>{title}</title>"
        f"<main><h1>{title}</h1><p>A graph of gym_serve.</p><ul>{links}</ul>"
        "<table><tr><th>server<th>kind<th>type<th>base URL for OpenAI's clients</tr>"
        f"{servers}</table></main></html>"
    )


def _row(prefix: str, node: Node, *, is_default: bool) -> str:
    kind = f"default {KINDS[node.kind]}" if is_default else KINDS[node.kind]
    endpoint = f"<code>{_path(prefix, node.name)}/v1</code>" if node.kind in _ENDPOINTS else ""
    name, type_ = html.escape(node.name), html.escape(str(node.type))
    return f"<tr><td><code>{name}</code><td>{kind}<td><code>{type_}</code><td>{endpoint}</tr>"


def _path(prefix: str, name: str) -> str:
    return html.escape(f"{quote(prefix)}/{quote(name, safe='')}")


SCRIPT = "docs.js"
"""The route of the script."""

_SHOWN_HEADERS = ("x-session-id", "mcp-session-id", "idempotency-key")
_EVENTS = "text/event-stream"


@lru_cache
def script() -> bytes:
    """The script of the page."""
    return Path(__file__).with_name("docs_page.js").read_bytes()


def reference(document: Mapping[str, Any]) -> str:
    """The HTML of an OpenAPI document (`gym_serve.gateway.api_docs.openapi`)."""
    secured = "security" in document
    routes: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            shown = _route(document, method, path, operation)
            routes.setdefault("".join(operation.get("tags", ())), []).append(shown)
    shared = html.escape(_json(document["components"]["schemas"]))
    sections = [("", "The graph", "")]
    sections += [(tag["name"], tag["name"], tag["description"]) for tag in document["tags"]]
    parts = "".join(
        f'<h2 id="{html.escape(id)}">{html.escape(title)}</h2><p>{html.escape(description)}</p>'
        + "".join(routes.get(id, ()))
        for id, title, description in sections
    )
    servers = "".join(
        f"<li><a href='#{html.escape(tag['name'])}'>{html.escape(tag['name'])}</a>: "
        f"{html.escape(tag['description'])}</li>"
        for tag in document["tags"]
    )
    url = str(document["servers"][0]["url"])
    prefix, root = html.escape(url), html.escape(url.rstrip("/"))
    token = (
        "<p id=token>The graph has a token: <code>GYM_TOKEN</code> in the commands. "
        "The forms send the pass that you got for it when you signed in.</p>"
        if secured
        else ""
    )
    return (
        f"<!doctype html><html lang=en>{HEAD}<title>Routes of {prefix}</title>"
        f'<script src="{root}/{SCRIPT}" defer></script>'
        f'<main data-root="{root}"><h1>Routes of {prefix}</h1>'
        "<p>Each route has a form and a command to try it, with an example. <code>URL</code> is the address "
        f"of this page without <code>/docs</code>. As <a href='{root}/openapi.json'>OpenAPI</a>.</p>{token}"
        f"<ul>{servers}</ul>{parts}"
        f"<h2>Schemas</h2><details><summary>What several routes share</summary><pre>{shared}</pre></details>"
        "</main></html>"
    )


def _route(document: Mapping[str, Any], method: str, path: str, operation: Mapping[str, Any]) -> str:
    example = _body(method, operation, document["components"]["schemas"])
    form = {
        "method": method.upper(),
        "path": path,
        "fields": _fields(operation, document["components"].get("parameters", {})),
        "body": None if example is None else _json(example),
        "streams": _EVENTS in operation["responses"]["200"].get("content", {}),
    }
    command = _command(method, path, example, secured="security" in document)
    return (
        f'<details class=route data-form="{html.escape(orjson.dumps(form).decode())}">'
        f"<summary><b>{method.upper()}</b> <code>{html.escape(path)}</code> "
        f"{html.escape(str(operation['summary']))}</summary>"
        f"<pre class=command>{html.escape(command)}</pre>"
        f"<details><summary>Schema</summary><pre>{html.escape(_json(_schemas(operation)))}</pre></details>"
        "</details>"
    )


def _fields(operation: Mapping[str, Any], known: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a person may fill in beside the body."""
    named = [known[reference["$ref"].rpartition("/")[2]] for reference in operation.get("parameters", ())]
    return [
        {key: one.get(key, False) for key in ("name", "in", "description", "required")}
        for one in named
        if one["in"] != "header" or one["name"] in _SHOWN_HEADERS
    ]


def _schemas(operation: Mapping[str, Any]) -> dict[str, Any]:
    sides = {"request": operation.get("requestBody"), "response": operation["responses"]["200"]}
    return {side: next(iter(body["content"].values()))["schema"] for side, body in sides.items() if body}


def _json(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()


_DEEPEST = 6  # levels of an example: schemas may contain themselves
_VALUES: dict[str, Any] = {"string": "Hello", "integer": 1, "number": 0.5, "boolean": True, "null": None}


def _command(method: str, path: str, example: Any, *, secured: bool) -> str:
    """A shell command that calls a route; ``{id}`` of its path and a session are the reader's to fill in."""
    words = ["curl -s"] if method in ("get", "post") else [f"curl -s -X {method.upper()}"]
    words.append(f'"$URL"{shlex.quote(path)}')
    if secured:
        words.append('-H "Authorization: Bearer $GYM_TOKEN"')
    if example is not None:
        words.append(f"-d {shlex.quote(orjson.dumps(example).decode())}")
    return " ".join(words)


def _body(method: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> Any:
    """An example of a body; None for a route that takes none."""
    if body := operation.get("requestBody"):
        return _example(next(iter(body["content"].values()))["schema"], schemas)
    return {} if method == "post" else None


def _example(schema: Any, schemas: Mapping[str, Any], depth: int = 0) -> Any:
    """A value that fits a schema: what it requires, and nothing else."""
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return {}
    if isinstance(reference := schema.get("$ref"), str):
        return _example(schemas.get(reference.rpartition("/")[2]), schemas, depth + 1)
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    for key in ("examples", "enum"):
        if schema.get(key):
            return schema[key][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return _example(schema[key][0], schemas, depth + 1)
    if schema.get("type") == "array":
        return [_example(schema.get("items"), schemas, depth + 1)]
    properties = schema.get("properties") or {}
    if schema.get("type") == "object" or properties:
        required = schema.get("required") or ()
        return {key: _example(properties.get(key), schemas, depth + 1) for key in required}
    return _VALUES.get(str(schema.get("type")), {})


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


def sign_in_form(root: str, page: str, error: GymError | None = None) -> HTMLResponse:
    """The page that asks for the token."""
    title = html.escape(root.strip("/") or "gym_serve")
    page = page if _PAGE.fullmatch(page) else ""
    message = "" if error is None else f"<p role=alert>{html.escape(error.message)}.</p>"
    return response(
        f"<!doctype html><html lang=en>{HEAD}<title>Sign in to {title}</title>"
        f"<main><h1>Sign in to {title}</h1>{message}"
        f'<form method=post action="{html.escape(quote(root))}/{SIGN_IN}">'
        f"<input type=hidden name=next value='{html.escape(page)}'>"
        "<p><label>The graph's token (its auth_token)<br><input type=password name=token required autofocus "
        "autocomplete=current-password></label> <button>Sign in</button></p></form></main></html>",
        Unauthorized.status,
        posts=True,
    )


async def answer_sign_in(request: Request, root: str, access: Access) -> Response:
    """Answer a request for ``/sign-in``. Raises TooLarge, BadRequest: the form is none; Overloaded: the
    client guesses tokens."""
    path = f"{quote(root)}/"
    if request.method == "DELETE":
        response: Response = Response(status_code=204)
        response.delete_cookie(PASS_COOKIE, path, httponly=True, samesite="strict")
        return response
    if request.method == "GET":
        return sign_in_form(root, "")
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
            return sign_in_form(root, page, error)
        secure = "https" in (request.url.scheme, request.headers.get("x-forwarded-proto"))
        response.set_cookie(
            PASS_COOKIE, cookie, PASS_SECONDS, path=path, httponly=True, samesite="strict", secure=secure
        )
    return response


_GROUP = "gym_serve.pages"


@dataclass(frozen=True)
class Page:
    """A page that a package adds to every graph, as ``GET /{name}``: an entry point of ``gym_serve.pages``.
    ``summary``: one line for the API documentation; ``response``: JSON schema of the answer; ``answer``:
    makes the answer, any JSON value, from the request and the outlines of the servers by name."""

    summary: str
    response: Mapping[str, Any]
    answer: Callable[[Request, Mapping[str, Node]], Any]


@dataclass(frozen=True)
class Site:
    """A site that a package adds to every graph, below ``/{name}/``: another entry point of that group.
    ``answer``: makes the answer, from the request, its path below the site, and the graph's episodes. It may
    raise a `GymError`."""

    answer: Callable[[Request, str, LiveEpisodesOfGraph], Awaitable[Response]]


async def added_pages() -> Mapping[str, Page | Site]:
    """All of them, by name."""
    return await asyncio.to_thread(_load_pages)  # imports foreign code


@lru_cache
def _load_pages() -> Mapping[str, Page | Site]:
    return {point.name: point.load() for point in entry_points(group=_GROUP)}

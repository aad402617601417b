"""The pages of a graph: its root, its API documentation, sign-in, and those that packages add.

Names come from the graph file, and types may be import paths: the templates escape everything, and the
content security policy allows the one style sheet, and a script of the graph's own where a page has one.

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
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote

import orjson
from jinja2 import Environment, FileSystemLoader, Template
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from gym_serve.gateway import wire
from gym_serve.gateway.access import PASS_COOKIE, PASS_SECONDS, Access
from gym_serve.gateway.host import LiveEpisodesOfGraph
from gym_serve.graph.spec import Node
from gym_serve.observe.logs import fault
from gym_serve.types.errors import GymError, Overloaded, Unauthorized

_TEMPLATES = Path(__file__).with_name("templates")
_STYLE = (_TEMPLATES / "style.css").read_text("utf-8")
_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
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
    """The response that carries a page. ``posts``: whether it has a form, which is
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


@lru_cache
def _template(name: str) -> Template:
    environment = Environment(autoescape=True, loader=FileSystemLoader(_TEMPLATES), trim_blocks=True)
    return environment.get_template(name, globals={"style": _STYLE})


def home(
    prefix: str, nodes: Mapping[str, Node], default_agent: str | None, sites: Collection[str] = ()
) -> str:
    """The page at the root of a graph: what runs, and where to go on."""
    order = list(KINDS)
    return _template("home.html").render(
        title=prefix.strip("/") or "gym_serve",
        links=[(name, what) for name, what in _LINKS.items() if name != "ui" or name in sites],
        path=lambda name: f"{quote(prefix)}/{quote(name, safe='')}",
        nodes=sorted(nodes.values(), key=lambda node: order.index(node.kind)),
        kinds=KINDS,
        endpoints=_ENDPOINTS,
        default_agent=default_agent,
    )


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
    routes: dict[str, list[dict[str, str]]] = defaultdict(list)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            routes["".join(operation.get("tags", ()))].append(_route(document, method, path, operation))
    url = str(document["servers"][0]["url"])
    return _template("reference.html").render(
        url=url,
        root=url.rstrip("/"),
        script=SCRIPT,
        secured="security" in document,
        tags=document["tags"],
        routes=routes,
        schemas=_json(document["components"]["schemas"]),
    )


def _route(
    document: Mapping[str, Any], method: str, path: str, operation: Mapping[str, Any]
) -> dict[str, str]:
    example = _body(method, operation, document["components"]["schemas"])
    form = {
        "method": method.upper(),
        "path": path,
        "fields": _fields(operation, document["components"].get("parameters", {})),
        "body": None if example is None else _json(example),
        "streams": _EVENTS in operation["responses"]["200"].get("content", {}),
    }
    return {
        "method": method.upper(),
        "path": path,
        "summary": str(operation["summary"]),
        "form": orjson.dumps(form).decode(),
        "command": _command(method, path, example, secured="security" in document),
        "schemas": _json(_schemas(operation)),
    }


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
    content = _template("sign_in.html").render(
        title=root.strip("/") or "gym_serve",
        action=f"{quote(root)}/{SIGN_IN}",
        page=page if _PAGE.fullmatch(page) else "",
        message="" if error is None else error.message,
    )
    return response(content, Unauthorized.status, posts=True)


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

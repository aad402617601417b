"""The page of a graph's API documentation: every route with its schema, a command, and a form to try it.

The page loads nothing from the network, which clusters often lack, and can be read without its script
(``docs_page.js``), which makes the forms. That comes from the graph itself, and nothing else may run: names,
summaries and answers are text everywhere.
"""

from __future__ import annotations

import html
import shlex
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from gym_serve.gateway.html_pages import HEAD

SCRIPT = "docs.js"
"""The route of the script."""

_SHOWN_HEADERS = ("x-session-id", "mcp-session-id", "idempotency-key")
_EVENTS = "text/event-stream"


@lru_cache
def script() -> bytes:
    """The script of the page."""
    return Path(__file__).with_name("docs_page.js").read_bytes()


def page(document: Mapping[str, Any]) -> str:
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

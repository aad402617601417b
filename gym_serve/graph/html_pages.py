"""The page of a graph at its root, and how the gateway sends pages: with nothing loaded and nothing run.

Names come from the graph file, and types may be import paths: everything is escaped, and the content security
policy allows the one style sheet and nothing else, so a page shows text also where an escape is forgotten.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Mapping
from urllib.parse import quote

from starlette.responses import HTMLResponse

from gym_serve.graph.spec import Node

STYLE = (
    "body{font:16px system-ui;max-width:60rem;margin:2rem auto}pre{overflow:auto}"
    "td,th{text-align:left;padding:0 1rem 0 0}"
)
"""The style sheet of every page."""

_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
_HEADERS = {
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_LINKS = {
    "docs": "every route with its schema",
    "openapi.json": "the same, as OpenAPI 3.1",
    "graph": "every server with its settings",
    "health": "state of every server",
    "pressure": "load of every server, and the bottleneck",
    "stats": "metrics: what all replicas have counted",
}
_KINDS = {"agent": "agent", "resources": "environment", "model": "model"}
_ENDPOINTS = ("agent", "model")


def page(content: str, status: int = 200, *, posts: bool = False) -> HTMLResponse:
    """The response that carries a page, whose style is `STYLE`.

    Args:
        content: its HTML.
        status: of the response.
        posts: whether it has a form, which is posted to the graph.
    """
    headers = dict(_HEADERS)
    if posts:
        policy = headers["content-security-policy"]
        headers["content-security-policy"] = policy.replace("form-action 'none'", "form-action 'self'")
        headers["referrer-policy"] = "same-origin"  # else browsers post the form with `Origin: null`
    return HTMLResponse(content, status, headers)


def home(prefix: str, nodes: Mapping[str, Node], default_agent: str | None) -> str:
    """The page at the root of a graph: what runs, and where to go on.

    Args:
        prefix: of the application's routes; empty for the root.
        nodes: the servers.
        default_agent: agent of the rows that name none.
    """
    links = "".join(
        f'<li><a href="{_path(prefix, name)}">/{name}</a>: {what}</li>' for name, what in _LINKS.items()
    )
    order = list(_KINDS)
    rows = sorted(nodes.values(), key=lambda node: order.index(node.kind))
    servers = "".join(_row(prefix, node, is_default=node.name == default_agent) for node in rows)
    title = html.escape(prefix.strip("/") or "gym_serve")
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{STYLE}</style>"
        f"<h1>{title}</h1><p>A graph of gym_serve.</p><ul>{links}</ul>"
        "<table><tr><th>server<th>kind<th>type<th>base URL for OpenAI's clients</tr>"
        f"{servers}</table></html>"
    )


def _row(prefix: str, node: Node, *, is_default: bool) -> str:
    kind = f"default {_KINDS[node.kind]}" if is_default else _KINDS[node.kind]
    endpoint = f"<code>{_path(prefix, node.name)}/v1</code>" if node.kind in _ENDPOINTS else ""
    name, type_ = html.escape(node.name), html.escape(str(node.type))
    return f"<tr><td><code>{name}</code><td>{kind}<td><code>{type_}</code><td>{endpoint}</tr>"


def _path(prefix: str, name: str) -> str:
    return html.escape(f"{quote(prefix)}/{quote(name, safe='')}")

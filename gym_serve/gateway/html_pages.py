"""The page of a graph at its root, and how the gateway sends pages.

Names come from the graph file, and types may be import paths: everything is escaped, and the content security
policy allows the one style sheet, and a script of the graph's own where a page has one. So a page shows text
also where an escape is forgotten.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Collection, Mapping
from urllib.parse import quote

from starlette.responses import HTMLResponse

from gym_serve.graph.spec import Node

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


def page(content: str, status: int = 200, *, posts: bool = False, script: bool = False) -> HTMLResponse:
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

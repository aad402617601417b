"""The API documentation of a graph: one OpenAPI 3.1 document of all servers, and a page to read it.

The page needs nothing from the network: clusters often have none. A server that does not describe
itself (it is down, or has these routes without gym_serve) is listed without its routes.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Any

import orjson

from gym_serve.graph.spec import Node
from gym_serve.graph.wire import SESSION_COOKIE, STREAMED
from gym_serve.servers.capture import CLOSE, OPEN, TRAJECTORIES

__all__ = ["openapi", "page"]

_DEFS = "#/$defs/"
_NO_KEY = re.compile(r"[^A-Za-z0-9._-]")
_OBJECT: dict[str, Any] = {"type": "object"}
_ROW: dict[str, Any] = {
    "type": "object",
    "required": ["responses_create_params"],
    "properties": {
        "responses_create_params": _OBJECT,
        "agent_ref": {"type": "object", "properties": {"name": {"type": "string"}}},
    },
}
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message"],
            "properties": {
                "code": {"type": "string", "description": "stable; names the class of the failure"},
                "message": {"type": "string"},
                "type": {"type": "string", "description": "the class's name"},
                "retryable": {"type": "boolean", "description": "try again, elsewhere or later"},
                "server": {"type": "string", "description": "where it happened"},
                "stage": {"type": "string", "enum": ["seed", "model", "tool", "verify", "close"]},
                "retry_after": {"type": "number", "description": "seconds"},
            },
        }
    },
}
_ROOT: dict[str, dict[str, Any]] = {
    "run": {
        "method": "POST",
        "summary": "One episode, by the agent that the row names in agent_ref.name",
        "request": _ROW,
        "response": _OBJECT,
    },
    "graph": {"summary": "The graph: every server with its settings", "response": _OBJECT},
    "health": {
        "summary": "State of every server; 503 names those that are not ready",
        "response": _OBJECT,
    },
    "pressure": {
        "summary": "How busy every server is, which one limits the graph, and how many rollouts suit it",
        "response": _OBJECT,
    },
    "global_config_dict_yaml": {
        "summary": "NeMo Gym's head server: all servers with their addresses, as YAML in a JSON string",
        "response": {"type": "string"},
    },
    "server_instances": {
        "summary": "NeMo Gym's head server: the running servers",
        "response": {"type": "array", "items": _OBJECT},
    },
}

_MCP: dict[str, Any] = {
    "method": "POST",
    "summary": "The tools, for clients of the Model Context Protocol (streamable HTTP)",
    "request": _OBJECT,
    "response": _OBJECT,
}


def _header(name: str, description: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "header", "description": description, "schema": schema}


_SECONDS = {"type": "number", "exclusiveMinimum": 0}
_PARAMETERS = {
    "request_id": _header("x-request-id", "names the request in logs; echoed", {"type": "string"}),
    "timeout": _header("x-request-timeout", "seconds that the client waits; then 504", _SECONDS),
    "session": _header(
        "x-session-id", f"from /seed_session; or the cookie {SESSION_COOKIE}", {"type": "string"}
    ),
    "rollout": {
        "name": "id",
        "in": "path",
        "required": True,
        "description": f"from /{OPEN}",
        "schema": {"type": "string"},
    },
}


def openapi(
    root: str,
    nodes: Mapping[str, Node],
    described: Mapping[str, Mapping[str, Any] | None],
    *,
    secured: bool = False,
) -> dict[str, Any]:
    """The OpenAPI 3.1 document.

    Args:
        root: route prefix of the application.
        nodes: the servers.
        described: by server, the answer of its `DESCRIBE` operation; None if there was none.
        secured: whether requests need a bearer token.
    """
    schemas: dict[str, Any] = {"Error": _ERROR}
    paths = {f"/{route}": _path_item(None, route, operation, schemas) for route, operation in _ROOT.items()}
    for name, operations in described.items():
        for op, operation in (operations or {}).items():
            item = _path_item(nodes[name], op, operation, schemas)
            paths.setdefault(f"/{name}/{_route(op)}", {}).update(item)
        if operations and nodes[name].kind == "resources":
            paths[f"/{name}/mcp"] = _path_item(nodes[name], "mcp", _MCP, schemas)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "gym_serve", "version": "1"},
        "servers": [{"url": root or "/"}],
        "tags": [_tag(node, described.get(name)) for name, node in nodes.items()],
        "paths": paths,
        "components": {"schemas": schemas, "parameters": _PARAMETERS},
    }
    if secured:
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
    return document


def page(document: Mapping[str, Any]) -> str:
    """The document as one HTML page."""
    schemas = document["components"]["schemas"]
    parts = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            body = orjson.dumps(_shown(operation), option=orjson.OPT_INDENT_2).decode()
            parts.append(
                f"<details><summary><b>{method.upper()}</b> <code>{html.escape(path)}</code> "
                f"{html.escape(str(operation['summary']))}</summary><pre>{html.escape(body)}</pre></details>"
            )
    shared = html.escape(orjson.dumps(schemas, option=orjson.OPT_INDENT_2).decode())
    servers = "".join(
        f"<li><code>{html.escape(tag['name'])}</code>: {html.escape(tag['description'])}</li>"
        for tag in document["tags"]
    )
    prefix = html.escape(str(document["servers"][0]["url"]))
    return (
        "<!doctype html><meta charset=utf-8><title>gym_serve</title>"
        "<style>body{font:16px system-ui;max-width:60rem;margin:2rem auto}pre{overflow:auto}</style>"
        f"<h1>gym_serve</h1><p>All routes stand below <code>{prefix}</code>; "
        f"the same as <a href=openapi.json>OpenAPI</a>.</p><ul>{servers}</ul>{''.join(parts)}"
        f"<details><summary>Schemas</summary><pre>{shared}</pre></details>"
    )


def _shown(operation: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows of an operation: the schemas of its body and its answer."""
    sides = {"request": operation.get("requestBody"), "response": operation["responses"]["200"]}
    return {side: body["content"]["application/json"]["schema"] for side, body in sides.items() if body}


def _tag(node: Node, described: Mapping[str, Any] | None) -> dict[str, str]:
    note = "" if described is not None else "; did not describe its routes"
    return {"name": node.name, "description": f"{node.kind} ({node.type}){note}"}


def _route(op: str) -> str:
    """The path of an operation below its server; see `gym_serve.graph.routes`."""
    if op in (TRAJECTORIES, CLOSE):
        return f"{OPEN}/{{id}}"
    if op.startswith(f"{OPEN}/"):
        return f"{OPEN}/{{id}}/{op.removeprefix(f'{OPEN}/')}"
    return op.removeprefix("tools/")


def _path_item(
    node: Node | None, op: str, operation: Mapping[str, Any], schemas: dict[str, Any]
) -> dict[str, Any]:
    """The one method of one route; ``node`` is None for the graph's own."""
    route = op.removeprefix("tools/")
    key = _key(f"{node.name}.{route}" if node else route)
    request, response = (_hoist(operation.get(side), key, schemas) for side in ("request", "response"))
    parameters = ["request_id", "timeout", *(["session"] if node and node.kind == "resources" else [])]
    if "{id}" in _route(op):
        parameters.append("rollout")
    content = _content(response or {})
    if op.removeprefix(f"{OPEN}/") in STREAMED:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    described: dict[str, Any] = {
        "operationId": key,
        "tags": [node.name] if node else [],
        "summary": str(operation.get("summary", "")),
        "parameters": [{"$ref": f"#/components/parameters/{name}"} for name in parameters],
        "responses": {
            "200": {"description": "OK", "content": content},
            "default": {
                "description": "Failure",
                "content": _content({"$ref": "#/components/schemas/Error"}),
            },
        },
    }
    if request:
        described["requestBody"] = {"required": True, "content": _content(request)}
    return {str(operation.get("method", "GET")).lower(): described}


def _content(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _key(name: str) -> str:
    return _NO_KEY.sub("_", name)


def _hoist(schema: Any, prefix: str, schemas: dict[str, Any]) -> Any:
    """``schema`` with its ``$defs`` moved to the document's components, where references find them."""
    if isinstance(schema, str) and schema.startswith(_DEFS):  # a $ref, or a discriminator's mapping
        return f"#/components/schemas/{prefix}.{_key(schema.removeprefix(_DEFS))}"
    if isinstance(schema, list):
        return [_hoist(value, prefix, schemas) for value in schema]
    if not isinstance(schema, dict):
        return schema
    definitions = schema.get("$defs")
    for name, definition in definitions.items() if isinstance(definitions, dict) else ():
        schemas[f"{prefix}.{_key(name)}"] = _hoist(definition, prefix, schemas)
    return {key: _hoist(value, prefix, schemas) for key, value in schema.items() if key != "$defs"}

"""The API documentation of a graph: one OpenAPI 3.1 document of all servers.

`gym_serve.gateway.pages` shows it. A server that does not describe itself
(it is down, or does not run gym_serve) is listed without its routes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from gym_serve.gateway.batch import NDJSON, ROLLOUTS, BatchBody
from gym_serve.gateway.host import EPISODES, LIST, LOOK, STOP
from gym_serve.gateway.pages import KINDS, Page
from gym_serve.gateway.policy_routes import BODIES
from gym_serve.gateway.wire import SESSION_COOKIE
from gym_serve.graph.spec import SECTIONS, Node
from gym_serve.servers.captures import CLOSE, OPEN, TRAJECTORIES
from gym_serve.servers.protocols import PROTOCOLS
from gym_serve.types import errors
from gym_serve.types.rows import ROLLOUT, ROW

_DEFS = "#/$defs/"
_NO_KEY = re.compile(r"[^A-Za-z0-9._-]")
_OBJECT: dict[str, Any] = {"type": "object"}
_TEXT: dict[str, Any] = {"type": "string"}


def _named(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Schema of an object that has these properties."""
    return {"type": "object", "required": [*properties], "properties": properties}


def _by_name(values: Mapping[str, Any]) -> dict[str, Any]:
    """Schema of an object with any names."""
    return {"type": "object", "additionalProperties": values}


_FAILURE = {
    "code": {"type": "string", "description": "stable; names the class of the failure"},
    "message": _TEXT,
    "type": {"type": "string", "description": "the class's name"},
    "retryable": {"type": "boolean", "description": "try again, elsewhere or later"},
    "server": {"type": "string", "description": "where it happened"},
    "stage": {"type": "string", "enum": [*errors.STAGES]},
    "retry_after": {"type": "number", "description": "seconds"},
}
_ERROR = _named({"error": {**_named(_FAILURE), "required": ["code", "message"]}})
_RUN = {
    "method": "POST",
    "summary": "One episode, by the agent that the row names in agent_ref.name",
    "response": ROLLOUT,
}
_PRESSURE: dict[str, Any] = {
    "bottleneck": {"type": ["string", "null"]},
    "reason": {"type": ["string", "null"]},
    "load": {"type": ["number", "null"], "minimum": 0},
    "rollouts": {"type": "integer", "minimum": 0},
    "concurrency": {"type": ["integer", "null"], "minimum": 1},
    "servers": _by_name(_OBJECT),
}
_POINT = _named({"labels": _by_name(_TEXT), "value": {"type": "number"}})
_ROOT: dict[str, dict[str, Any]] = {
    "graph": {
        "summary": "The graph: every server with its settings",
        "response": _named({section: _by_name(_named({"type": _TEXT})) for section in SECTIONS}),
    },
    "health": {
        "summary": "State of every server; 503 names those that are not ready",
        "response": _named(
            {"status": {"const": "ok"}, "servers": _by_name(_named({"state": {"const": "ready"}}))}
        ),
    },
    "pressure": {
        "summary": "Load of every server, the bottleneck, and how many rollouts suit the graph",
        "response": _named(_PRESSURE),
    },
    "stats": {
        "summary": "The same, and what all replicas have counted",
        "response": _named({**_PRESSURE, "metrics": _by_name({"type": "array", "items": _POINT})}),
    },
}

_LINE: dict[str, Any] = {
    "type": "object",
    "description": "each line of the stream",
    "properties": {
        "row": {"type": "integer", "minimum": 0, "description": "position of the row, from 0"},
        "rollout": ROLLOUT,
        "error": {"type": "object", "description": "why the row has no rollout"},
        "status": {"type": "integer", "description": "HTTP status of the error"},
        "running": {"type": "integer", "description": "a sign of life: how many rollouts still run"},
        "end": {"type": "object", "description": "of the last line: the counts of rollouts"},
    },
}


def _with_rows(body: type[BaseModel]) -> dict[str, Any]:
    schema = body.model_json_schema()
    rows = {"type": "array", "items": ROW, "minItems": 1}
    return {**schema, "required": ["rows"], "properties": {**schema["properties"], "rows": rows}}


_BATCH: dict[str, dict[str, Any]] = {
    ROLLOUTS: {
        "method": "POST",
        "summary": "Rollouts of many rows, as lines of JSON",
        "request": _with_rows(BatchBody),
        "response": _LINE,
    }
}

_EPISODE = _named(
    {"id": _TEXT, "agent": _TEXT, "state": _TEXT, "turns": {"type": "integer"}, "prompt": _TEXT}
)
_LIVE: dict[str, dict[str, Any]] = {
    LIST: {
        "summary": "The episodes that run or wait, and those that have ended lately",
        "response": _named(
            {
                "running": {"type": "integer", "minimum": 0},
                "queued": {"type": "integer", "minimum": 0},
                "episodes": {"type": "array", "items": _EPISODE},
                "ended": {"type": "array", "items": _EPISODE},
                "silent": {"type": "array", "items": _TEXT, "description": "replicas that do not answer"},
            }
        ),
    },
    LOOK: {
        "summary": "One episode, with its rollout so far",
        "response": {**_EPISODE, "properties": {**_EPISODE["properties"], "rollout": _OBJECT}},
    },
    STOP: {
        "method": "DELETE",
        "summary": "Stop an episode: its rollout is the failure `stopped`",
        "response": _named({"id": _TEXT, "stopped": {"const": True}}),
    },
}
"""What the gateway answers below ``/episodes``, by operation."""

_EVENT = {
    **_named({"data": _TEXT, "event": _TEXT}),
    "required": ["data"],
    "description": "each event of the stream",
}
_RPC_ID = {"type": ["string", "integer"]}
_RPC_FAILURE = _named({"code": {"type": "integer"}, "message": _TEXT})
_RPC_ERROR = _named({"jsonrpc": {"const": "2.0"}, "error": _RPC_FAILURE})
_MCP: dict[str, dict[str, Any]] = {
    "mcp": {
        "method": "POST",
        "summary": "The tools, for clients of the Model Context Protocol (streamable HTTP)",
        "request": {
            **_named({"jsonrpc": {"const": "2.0"}, "method": _TEXT, "id": _RPC_ID, "params": _OBJECT}),
            "required": ["jsonrpc", "method"],
        },
        "response": {
            "anyOf": [_named({"jsonrpc": {"const": "2.0"}, "id": _RPC_ID, "result": _OBJECT}), _RPC_ERROR]
        },
    },
    "mcp/close": {"method": "DELETE", "summary": "Close the session of an MCP client", "response": _OBJECT},
}
"""What the gateway itself answers for an environment, by operation."""

_POLICY: dict[str, dict[str, Any]] = {
    "policy/version/read": {
        "summary": "Version of the weights, whether calls are held, and how often the weights were replaced",
        "response": _named(
            {
                "weight_version": {"type": ["string", "null"]},
                "paused": {"type": "boolean"},
                "updates": {"type": "integer", "minimum": 0},
            }
        ),
    },
    **{
        op: {
            "method": "POST",
            "summary": str(body.__doc__).partition("\n")[0],
            "request": body.model_json_schema(),
            "response": _OBJECT,
        }
        for op, body in BODIES.items()
    },
}
"""What the gateway itself answers for a model, by operation."""

_FAILED = {
    "Error": "a failure, whose `code` and status are those of docs/errors.md",
    "McpError": "refused, by the graph or by the protocol",
}
"""The answers of all operations that are no answers of 200, by their schemas."""


def _parameter(
    name: str, place: str, description: str, schema: Mapping[str, Any] = _TEXT, *, required: bool = False
) -> dict[str, Any]:
    return {"name": name, "in": place, "description": description, "schema": schema, "required": required}


_SECONDS = {"type": "number", "exclusiveMinimum": 0}
_KNOWN = "the `version` that the client has; `rollout` is left out if that is the newest one"
_PARAMETERS = {
    "request_id": _parameter("x-request-id", "header", "names the request in logs; echoed"),
    "timeout": _parameter("x-request-timeout", "header", "seconds that the client waits; then 504", _SECONDS),
    "session": _parameter("x-session-id", "header", f"from /seed_session; or the cookie {SESSION_COOKIE}"),
    "mcp_session": _parameter(
        *("mcp-session-id", "header", "the session that the handshake opened"),
        {**_TEXT, "minLength": 1},
        required=True,
    ),
    "rollout": _parameter("id", "path", f"from /{OPEN}", required=True),
    "episode": _parameter("id", "path", f"from /{EPISODES}", required=True),
    "known": _parameter("known", "query", _KNOWN),
}
_HEADERS: dict[str, Any] = {
    "request_id": {"description": "names the request in logs", "required": True, "schema": _TEXT},
    "session": {"description": "for the further calls of the session", "required": True, "schema": _TEXT},
}
_SESSION_OPENS = ("seed_session", "reset")


def openapi(
    prefix: str,
    nodes: Mapping[str, Node],
    described: Mapping[str, Mapping[str, Any] | None],
    *,
    pages: Mapping[str, Page] | None = None,
    default_agent: str | None = None,
    secured: bool = False,
) -> dict[str, Any]:
    """The OpenAPI 3.1 document. ``described``: by server, the answer of its `DESCRIBE` operation; None if
    there was none; ``secured``: whether requests need a bearer token."""
    schemas: dict[str, Any] = {"Error": _ERROR, "McpError": {"anyOf": [_ERROR, _RPC_ERROR]}}
    agents = [name for name, node in nodes.items() if node.kind == "agent"]
    routes = _ROOT | {n: {"summary": p.summary, "response": p.response} for n, p in (pages or {}).items()}
    if agents:
        routes["run"] = {**_RUN, "request": _row(agents, default_agent)}
        routes |= _BATCH
    routes |= _LIVE
    paths: dict[str, dict[str, Any]] = {}
    for op, operation in routes.items():
        item = _path_item(None, op, operation, schemas)
        paths.setdefault(f"/{_route(op) if op in _LIVE else op}", {}).update(item)
    for name, operations in described.items():
        faced = _faced(nodes[name]) if operations else {}
        for op, operation in {**(operations or {}), **faced}.items():
            item = _path_item(nodes[name], op, operation, schemas)
            paths.setdefault(f"/{name}/{_route(op)}", {}).update(item)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "gym_serve", "version": "1"},
        "servers": [{"url": prefix or "/"}],
        "tags": [_tag(node, described.get(name)) for name, node in nodes.items()],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "parameters": _PARAMETERS,
            "headers": _HEADERS,
            "responses": {
                name: _answer(description, {"$ref": f"#/components/schemas/{name}"})
                for name, description in _FAILED.items()
            },
        },
    }
    if secured:
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
    return document


def _faced(node: Node) -> Mapping[str, dict[str, Any]]:
    """What the gateway itself answers for a server."""
    if node.kind == "resources":
        return _MCP
    return _POLICY if node.kind == "model" and node.url is None else {}


def _row(agents: Sequence[str], default_agent: str | None) -> dict[str, Any]:
    agent = {"type": "object", "properties": {"name": {"enum": [*agents]}}}
    if default_agent is not None:
        return {**ROW, "properties": {**ROW["properties"], "agent_ref": agent}}
    agent["required"] = ["name"]
    properties = {**ROW["properties"], "agent_ref": agent}
    return {**ROW, "required": [*ROW["required"], "agent_ref"], "properties": properties}


def _tag(node: Node, described: Mapping[str, Any] | None) -> dict[str, str]:
    note = "" if described is not None else "; did not describe its routes"
    return {"name": node.name, "description": f"{KINDS[node.kind]} ({node.type}){note}"}


def _route(op: str) -> str:
    """The path of an operation below its server; see `gym_serve.gateway.wire`."""
    if op in (TRAJECTORIES, CLOSE):
        return f"{OPEN}/{{id}}"
    if op in _LIVE:
        return EPISODES if op == LIST else f"{EPISODES}/{{id}}"
    if op == "policy/version/read":
        return "policy/version"
    if op in _MCP:
        return "mcp"
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
        parameters.append("episode" if op in _LIVE else "rollout")
    if op == LOOK:
        parameters.append("known")
    if op == "mcp/close":
        parameters.append("mcp_session")
    done = _answer("OK", response or {})
    if op.removeprefix(f"{OPEN}/") in PROTOCOLS:
        done["content"]["text/event-stream"] = {"schema": _EVENT}
    if node is None and op == ROLLOUTS:
        done["content"] = {NDJSON: {"schema": _LINE}}
    if node and op in _SESSION_OPENS:
        done["headers"]["X-Session-Id"] = {"$ref": "#/components/headers/session"}
    described: dict[str, Any] = {
        "operationId": key,
        "tags": [node.name] if node else [],
        "summary": str(operation.get("summary", "")),
        "parameters": [{"$ref": f"#/components/parameters/{name}"} for name in parameters],
        "responses": {"200": done, **_failures(node, op)},
    }
    if request:
        described["requestBody"] = {"required": True, "content": _content(request)}
    return {str(operation.get("method", "GET")).lower(): described}


def _failures(node: Node | None, op: str) -> dict[str, Any]:
    """What else an operation answers."""
    if node is not None and node.url is not None and op not in _MCP:
        return {"default": _answer("a failure, or the answer of the remote server", {})}
    if op != "mcp":
        return {"default": {"$ref": "#/components/responses/Error"}}
    accepted = {"description": "a notification", "headers": _answer("", {})["headers"]}
    return {"202": accepted, "default": {"$ref": "#/components/responses/McpError"}}


def _answer(description: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    headers = {"X-Request-Id": {"$ref": "#/components/headers/request_id"}}
    return {"description": description, "headers": headers, "content": _content(schema)}


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

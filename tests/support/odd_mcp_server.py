"""An MCP server over stdio whose list of tools has entries that the protocol does not allow."""

from __future__ import annotations

import json
import sys
from typing import Any

TOOLS: list[dict[str, Any]] = [
    {"name": "structure", "description": "Answer with a structure.", "inputSchema": {"type": "object"}},
    {"name": "untyped", "inputSchema": {"properties": {}}},
    {"name": "schemaless"},
    {"name": "textual", "inputSchema": "object"},
    {"name": "listed", "inputSchema": {"type": "object", "properties": []}},
    {"name": "bad name!", "inputSchema": {"type": "object"}},
    {"name": "", "inputSchema": {"type": "object"}},
    {"name": "bare", "inputSchema": {"type": "object", "properties": None}},
    {"name": "blank", "inputSchema": {"type": "object"}},
    {"name": 5, "inputSchema": {"type": "object"}},
    {
        "name": "plain",
        "description": None,
        "inputSchema": {"type": "object", "properties": {"a": {"type": "string"}}},
        "outputSchema": {"description": "without a type"},
    },
]
ANSWERS: dict[str, Any] = {
    "structure": {"content": [], "structuredContent": {"größe": 5, "of": ["a"]}},
    "bare": {"structuredContent": {"a": 1}},
    "blank": {"content": [{"type": "text", "text": ""}], "structuredContent": {"a": 1}},
    "plain": {"content": [{"type": "text", "text": "words"}], "structuredContent": {"a": 1}},
}


def answer(request: dict[str, Any]) -> Any:
    """The result of a request."""
    match request["method"]:
        case "initialize":
            version = request["params"]["protocolVersion"]
            info = {"name": "odd", "version": "1"}
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
        case "tools/list":
            return {"tools": TOOLS}
        case "tools/call":
            return ANSWERS[request["params"]["name"]]
    return {}


if __name__ == "__main__":
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        reply: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
        if message["method"] in ("initialize", "tools/list", "tools/call", "ping"):
            reply["result"] = answer(message)
        else:
            reply["error"] = {"code": -32601, "message": "no such method"}
        print(json.dumps(reply), flush=True)

"""Rows of Salesforce/xlam-function-calling-60k, whose functions are described in words of Python."""

from __future__ import annotations

import json
from typing import Any

_TYPES = {
    **{"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object"},
    **{"list": "array", "set": "array", "tuple": "array", "List": "array", "Dict": "object"},
}


def xlam(row: dict[str, Any]) -> dict[str, Any]:
    """The row with ``functions``, as the Responses API has them, and ``expected_answers``."""
    return {
        "id": row["id"],
        "query": row["query"],
        "functions": [_function(tool) for tool in json.loads(row["tools"])],
        "expected_answers": json.loads(row["answers"]),
    }


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    parameters = tool.get("parameters") or {}
    required = [
        name
        for name, one in parameters.items()
        if "default" not in one and "optional" not in str(one["type"])
    ]
    schema = {
        "type": "object",
        "properties": {name: _schema(one) for name, one in parameters.items()},
        "required": required,
    }
    return {
        "type": "function",
        "name": tool["name"],
        "description": tool.get("description", ""),
        "parameters": schema,
        "strict": False,
    }


def _schema(parameter: dict[str, Any]) -> dict[str, Any]:
    written = str(parameter.get("type", "str")).partition(",")[0].strip()
    outer, _, inner = written.partition("[")
    kind = _TYPES.get(outer, "string")
    schema: dict[str, Any] = {"type": kind, "description": parameter.get("description", "")}
    if kind == "array":
        schema["items"] = {"type": _TYPES.get(inner.rstrip("]"), "string")} if inner else {}
    return schema

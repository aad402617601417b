"""JSON schemas of what a model takes and answers, by protocol, for the API documentation of a graph.

What fits is accepted. More is: a model server hands further keys and kinds of content on to what it
stands for, which judges them.
"""

from __future__ import annotations

from typing import Any

__all__ = ["CHAT", "COMPLETION", "MESSAGE", "MESSAGES", "MODELS", "PARAMS", "RESPONSE", "TOKEN_COUNT"]

JSON = dict[str, Any]


def _object(required: str, **properties: Any) -> JSON:
    """An object with these properties; ``required`` are the names of those that it must have."""
    return {"type": "object", "required": required.split(), "properties": properties}


def _maybe(schema: JSON) -> JSON:
    """It may be null, which is the same as to leave it out."""
    return {"anyOf": [schema, {"type": "null"}]}


def _of(kind: str) -> JSON:
    return {"const": kind}


_TEXT: JSON = {"type": "string"}
_BOOLEAN: JSON = {"type": "boolean"}
_COUNT: JSON = {"type": "integer", "minimum": 1}
_SAMPLING = {
    "model": _maybe(_TEXT),
    "temperature": _maybe({"type": "number", "minimum": 0, "maximum": 2}),
    "top_p": _maybe({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
    "stream": _maybe(_BOOLEAN),
}
_FUNCTION = {"name": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}, "description": _maybe(_TEXT)}
_PARAMETERS: JSON = {"type": "object", "additionalProperties": False, "properties": {"type": _of("object")}}


def _content(*parts: JSON) -> JSON:
    """A text, or a list of parts."""
    return {"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": list(parts)}}]}


_ITEM: JSON = {
    "anyOf": [
        _object(
            "role content",
            type=_of("message"),
            role={"enum": ["user", "system", "developer"]},
            content=_content(_object("type text", type=_of("input_text"), text=_TEXT)),
        ),
        _object(
            "role content",
            type=_of("message"),
            role=_of("assistant"),
            content=_content(_object("type text", type=_of("output_text"), text=_TEXT)),
        ),
        _object(
            "type call_id name arguments",
            type=_of("function_call"),
            call_id=_TEXT,
            name=_FUNCTION["name"],
            arguments=_TEXT,
        ),
        _object(
            "type call_id output",
            type=_of("function_call_output"),
            call_id=_TEXT,
            output=_TEXT,
        ),
        _object(
            "type summary",
            type=_of("reasoning"),
            summary={"type": "array", "items": _object("type text", type=_of("summary_text"), text=_TEXT)},
        ),
    ]
}

PARAMS: JSON = _object(
    "input",
    input={"anyOf": [_TEXT, {"type": "array", "items": _ITEM}]},
    instructions=_maybe(_TEXT),
    tools=_maybe(
        {
            "type": "array",
            "items": _object("type name", type=_of("function"), parameters=_maybe(_PARAMETERS), **_FUNCTION),
        }
    ),
    max_output_tokens=_maybe(_COUNT),
    metadata=_maybe({"type": "object", "additionalProperties": _TEXT}),
    **_SAMPLING,
)
"""The body of OpenAI's ``POST /v1/responses``."""

CHAT: JSON = _object(
    "messages",
    messages={
        "type": "array",
        "items": {
            "anyOf": [
                _object(
                    "role content",
                    role={"enum": ["user", "system", "developer"]},
                    content=_content(_object("type text", type=_of("text"), text=_TEXT)),
                ),
                _object(
                    "role content",
                    role=_of("assistant"),
                    content=_maybe(_TEXT),
                    tool_calls={
                        "type": "array",
                        "items": _object(
                            "id type function",
                            id=_TEXT,
                            type=_of("function"),
                            function=_object("name arguments", name=_FUNCTION["name"], arguments=_TEXT),
                        ),
                    },
                ),
                _object("role tool_call_id content", role=_of("tool"), tool_call_id=_TEXT, content=_TEXT),
            ]
        },
    },
    tools=_maybe(
        {
            "type": "array",
            "items": _object(
                "type function",
                type=_of("function"),
                function=_object("name", parameters=_maybe(_PARAMETERS), **_FUNCTION),
            ),
        }
    ),
    max_completion_tokens=_maybe(_COUNT),
    **_SAMPLING,
)
"""The body of OpenAI's ``POST /v1/chat/completions``."""

_BLOCK = _object("type text", type=_of("text"), text=_TEXT)

MESSAGES: JSON = _object(
    "messages",
    messages={
        "type": "array",
        "items": {
            "anyOf": [
                _object(
                    "role content",
                    role=_of("user"),
                    content=_content(
                        _BLOCK,
                        _object(
                            "type tool_use_id",
                            type=_of("tool_result"),
                            tool_use_id=_TEXT,
                            content=_content(_BLOCK),
                            is_error=_BOOLEAN,
                        ),
                    ),
                ),
                _object(
                    "role content",
                    role=_of("assistant"),
                    content=_content(
                        _BLOCK,
                        _object("type thinking", type=_of("thinking"), thinking=_TEXT, signature=_TEXT),
                        _object(
                            "type id name input",
                            type=_of("tool_use"),
                            id=_TEXT,
                            name=_FUNCTION["name"],
                            input={"type": "object"},
                        ),
                    ),
                ),
            ]
        },
    },
    system=_maybe(_content(_BLOCK)),
    tools=_maybe(
        {"type": "array", "items": _object("name input_schema", input_schema=_PARAMETERS, **_FUNCTION)}
    ),
    max_tokens=_maybe(_COUNT),
    stop_sequences=_maybe({"type": "array", "items": _TEXT}),
    **_SAMPLING,
)
"""The body of Anthropic's ``POST /v1/messages``."""

RESPONSE: JSON = _object(
    "object output",
    id=_TEXT,
    object=_of("response"),
    status={"enum": ["completed", "incomplete", "failed", "in_progress", "queued", "cancelled"]},
    output={"type": "array", "items": _object("type", type=_TEXT)},
    usage=_maybe(
        _object(
            "input_tokens output_tokens total_tokens",
            input_tokens={"type": "integer"},
            output_tokens={"type": "integer"},
            total_tokens={"type": "integer"},
        )
    ),
)
"""OpenAI's Response."""

COMPLETION: JSON = _object(
    "object choices",
    id=_TEXT,
    object=_of("chat.completion"),
    choices={
        "type": "array",
        "items": _object(
            "index message finish_reason",
            index={"type": "integer"},
            message=_object("role content", role=_of("assistant"), content=_maybe(_TEXT)),
            finish_reason=_maybe(_TEXT),
        ),
    },
)
"""OpenAI's ChatCompletion."""

MESSAGE: JSON = _object(
    "type role content",
    id=_TEXT,
    type=_of("message"),
    role=_of("assistant"),
    content={"type": "array", "items": _object("type", type=_TEXT)},
    stop_reason=_maybe(_TEXT),
)
"""Anthropic's Message."""

MODELS: JSON = _object(
    "object data",
    object=_of("list"),
    data={
        "type": "array",
        "items": _object(
            "id object created owned_by",
            id=_TEXT,
            object=_of("model"),
            created={"type": "integer"},
            owned_by=_TEXT,
        ),
    },
)
"""The answer of OpenAI's ``GET /v1/models``."""

TOKEN_COUNT: JSON = _object("input_tokens", input_tokens={"type": "integer", "minimum": 0})
"""The answer of Anthropic's ``POST /v1/messages/count_tokens``."""

"""JSON schemas of what a model takes and answers, by protocol, for the API documentation of a graph.

What fits is accepted. More is: a model server hands further keys and kinds of content on to what it
stands for, which judges them.
"""

from __future__ import annotations

from typing import Any

JSON = dict[str, Any]


def _object(required: str, **properties: Any) -> JSON:
    """An object with these properties; ``required`` are the names of those that it must have."""
    return {"type": "object", "required": required.split(), "properties": properties}


def _maybe(schema: JSON) -> JSON:
    return {"anyOf": [schema, {"type": "null"}]}


def _of(kind: str) -> JSON:
    return {"const": kind}


def _list(items: JSON, least: int = 0) -> JSON:
    return {"type": "array", "items": items, **({"minItems": least} if least else {})}


def _any(*schemas: JSON) -> JSON:
    return {"anyOf": list(schemas)}


_TEXT: JSON = {"type": "string"}
_BOOLEAN: JSON = {"type": "boolean"}
_INTEGER: JSON = {"type": "integer"}
_COUNT: JSON = {"type": "integer", "minimum": 1}
_TOKENS = ("input_tokens", "output_tokens", "total_tokens")
_SAMPLING = {
    "model": _maybe(_TEXT),
    "temperature": _maybe({"type": "number", "minimum": 0, "maximum": 2}),
    "top_p": _maybe({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
    "stream": _maybe(_BOOLEAN),
}
_FUNCTION = {"name": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}, "description": _maybe(_TEXT)}
_PARAMETERS: JSON = {"type": "object", "additionalProperties": False, "properties": {"type": _of("object")}}
_CALLED = {"name": _FUNCTION["name"], "arguments": _TEXT}
_TOOL = {**_FUNCTION, "parameters": _maybe(_PARAMETERS)}
_NOT_THE_MODEL: JSON = {"enum": ["user", "system", "developer"]}


def _part(kind: str) -> JSON:
    return _object("type text", type=_of(kind), text=_TEXT)


def _message(role: JSON, *parts: JSON, **properties: JSON) -> JSON:
    return _object("role content", **properties, role=role, content=_any(_TEXT, _list(_any(*parts))))


_ITEM = _any(
    _message(_NOT_THE_MODEL, _part("input_text"), type=_of("message")),
    _message(_of("assistant"), _part("output_text"), type=_of("message")),
    _object("type call_id name arguments", type=_of("function_call"), call_id=_TEXT, **_CALLED),
    _object("type call_id output", type=_of("function_call_output"), call_id=_TEXT, output=_TEXT),
    _object("type summary", type=_of("reasoning"), summary=_list(_part("summary_text"))),
)

PARAMS: JSON = _object(
    "input",
    input=_any(_TEXT, _list(_ITEM)),
    instructions=_maybe(_TEXT),
    tools=_maybe(_list(_object("type name", type=_of("function"), **_TOOL))),
    max_output_tokens=_maybe(_COUNT),
    metadata=_maybe({"type": "object", "additionalProperties": _TEXT}),
    **_SAMPLING,
)
"""The body of OpenAI's ``POST /v1/responses``."""

_CHAT_FUNCTION = _object("name arguments", **_CALLED)
_CHAT_CALL = _object("id type function", id=_TEXT, type=_of("function"), function=_CHAT_FUNCTION)
_CHAT_TOOL = _object("type function", type=_of("function"), function=_object("name", **_TOOL))
_ASSISTANT = {"role": _of("assistant"), "content": _maybe(_TEXT)}
CHAT: JSON = _object(
    "messages",
    messages=_list(
        _any(
            _message(_NOT_THE_MODEL, _part("text")),
            _object("role content", tool_calls=_list(_CHAT_CALL), **_ASSISTANT),
            _object("role tool_call_id content", role=_of("tool"), tool_call_id=_TEXT, content=_TEXT),
        ),
        least=1,
    ),
    tools=_maybe(_list(_CHAT_TOOL)),
    max_completion_tokens=_maybe(_COUNT),
    **_SAMPLING,
)
"""The body of OpenAI's ``POST /v1/chat/completions``."""

_BLOCKS = _any(_TEXT, _list(_any(_part("text"))))
_TOOL_RESULT = _object(
    "type tool_use_id", type=_of("tool_result"), tool_use_id=_TEXT, content=_BLOCKS, is_error=_BOOLEAN
)
_TOOL_USE = _object(
    "type id name input", type=_of("tool_use"), id=_TEXT, name=_FUNCTION["name"], input={"type": "object"}
)
_THINKING = _object("type thinking", type=_of("thinking"), thinking=_TEXT, signature=_TEXT)

MESSAGES: JSON = _object(
    "messages",
    messages=_list(
        _any(
            _message(_of("user"), _part("text"), _TOOL_RESULT),
            _message(_of("assistant"), _part("text"), _THINKING, _TOOL_USE),
        ),
        least=1,
    ),
    system=_maybe(_BLOCKS),
    tools=_maybe(_list(_object("name input_schema", input_schema=_PARAMETERS, **_FUNCTION))),
    max_tokens=_maybe(_COUNT),
    stop_sequences=_maybe(_list(_TEXT)),
    **_SAMPLING,
)
"""The body of Anthropic's ``POST /v1/messages``."""

RESPONSE: JSON = _object(
    "object output",
    id=_TEXT,
    object=_of("response"),
    status={"enum": ["completed", "incomplete", "failed", "in_progress", "queued", "cancelled"]},
    output=_list(_object("type", type=_TEXT)),
    usage=_maybe(_object(" ".join(_TOKENS), **dict.fromkeys(_TOKENS, _INTEGER))),
)
"""OpenAI's Response."""

COMPLETION: JSON = _object(
    "object choices",
    id=_TEXT,
    object=_of("chat.completion"),
    choices=_list(
        _object(
            "index message finish_reason",
            index=_INTEGER,
            message=_object("role content", **_ASSISTANT),
            finish_reason=_maybe(_TEXT),
        )
    ),
)
"""OpenAI's ChatCompletion."""

MESSAGE: JSON = _object(
    "type role content",
    id=_TEXT,
    type=_of("message"),
    role=_of("assistant"),
    content=_list(_object("type", type=_TEXT)),
    stop_reason=_maybe(_TEXT),
)
"""Anthropic's Message."""

_MODEL = _object(
    "id object created owned_by", id=_TEXT, object=_of("model"), created=_INTEGER, owned_by=_TEXT
)
MODELS: JSON = _object("object data", object=_of("list"), data=_list(_MODEL))
"""The answer of OpenAI's ``GET /v1/models``."""

TOKEN_COUNT: JSON = _object("input_tokens", input_tokens={"type": "integer", "minimum": 0})
"""The answer of Anthropic's ``POST /v1/messages/count_tokens``."""

"""OpenEnv's observations and actions as a model reads and writes them."""

from __future__ import annotations

from typing import Any

import orjson

from gym_serve.servers.transport import encode
from gym_serve.types.errors import InvalidRequest
from gym_serve.types.requests import JSON

__all__ = ["action_in", "how_to_act", "observation_text", "text_field", "tool_result"]

_MAX_ACTION = 1 << 20
_FENCE = "```"


def text_field(schema: JSON) -> str | None:
    """The field that a model's text is, if an action needs that one text and nothing else."""
    required = schema.get("required")
    if not isinstance(required, list) or len(required) != 1:
        return None
    field = (schema.get("properties") or {}).get(required[0])
    return required[0] if isinstance(field, dict) and field.get("type") == "string" else None


def action_in(text: str, field: str | None) -> JSON:
    """The action in a model's text.

    Args:
        text: all of it is ``field``; without a field it is, or ends with, a JSON object in a code block.
        field: of the action.

    Raises:
        InvalidRequest: there is no action in it.
    """
    if len(text) > _MAX_ACTION:
        raise InvalidRequest(f"longer than {_MAX_ACTION} characters")
    if field is not None:
        return {field: text}
    blocks = text.split(_FENCE)
    inner = blocks[-2].removeprefix("json") if len(blocks) >= 3 else text
    try:
        action = orjson.loads(inner.strip())
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"no JSON: {error}") from None
    if not isinstance(action, dict):
        raise InvalidRequest("JSON, but no object")
    return action


def how_to_act(schema: JSON, field: str | None) -> str:
    """What the model is told of the actions."""
    if field is not None:
        return "Answer with the action alone."
    fields = {name: value for name, value in (schema.get("properties") or {}).items() if name != "metadata"}
    shown = encode({"properties": fields, "required": schema.get("required", [])}).decode()
    return f"Answer with your action, a JSON object of this schema: {shown}"


def observation_text(observation: JSON, field: str | None) -> str:
    """An observation for the model: a field of it, or its only text, or all that is in it as JSON.

    Args:
        observation: the observation's fields.
        field: the one to show; None for all.
    """
    if field is not None:
        value = observation.get(field, "")
        return value if isinstance(value, str) else encode(value).decode()
    told = {name: value for name, value in observation.items() if value not in (None, {}, [])}
    rest = {name: value for name, value in told.items() if name != "metadata"} or told
    values = list(rest.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else encode(rest).decode()


def tool_result(observation: JSON) -> tuple[Any, str | None]:
    """The result of a tool, and the error if it failed."""
    error, result = observation.get("error"), observation.get("result")
    if isinstance(error, dict):
        return None, str(error.get("message") or error)
    if not isinstance(result, dict) or "content" not in result:
        return result, None
    content = result["content"] if isinstance(result["content"], list) else []
    text = "\n".join(str(block.get("text", "")) for block in content if isinstance(block, dict))
    if result.get("is_error"):
        return None, text
    return text if result.get("data") is None else result["data"], None

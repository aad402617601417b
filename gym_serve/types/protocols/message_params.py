"""Anthropic Messages -> Responses: the body of ``POST /v1/messages`` as that of ``POST /v1/responses``.

(https://docs.anthropic.com/en/api/messages.) What Responses cannot say (documents, hosted tools) is an error
that names its place. Here are the settings; `message_items` has the messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gym_serve.types.errors import BadRequest
from gym_serve.types.protocols.fields import json_text, shown
from gym_serve.types.protocols.message_items import blocks_of, list_of, message_items, text_of
from gym_serve.types.requests import JSON

__all__ = ["message_to_params"]

_EFFORT_BUDGETS = ((4096, "low"), (16384, "medium"))  # tokens of thinking; more is "high"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_FURTHER = ("top_k", "seed", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


def message_to_params(body: Mapping[str, Any]) -> JSON:
    """The Responses body for a Messages body.

    ``stop_sequences``, ``top_k`` and sampling that Anthropic's API lacks and engines have (``seed``, ...)
    travel in ``metadata.extra_body``, as a row writes them.

    Raises:
        BadRequest: something that Responses has no form for, with its place in the body.
    """
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise BadRequest("messages: a list of messages is missing")
    items: list[JSON] = []
    for i, message in enumerate(messages):
        items += message_items(message, f"messages[{i}]")
    params: JSON = {"input": items}
    for key, name in (("model", "model"), ("max_tokens", "max_output_tokens")):
        if body.get(key) is not None:
            params[name] = body[key]
    params |= {key: body[key] for key in ("temperature", "top_p") if body.get(key) is not None}
    if system := _system(body.get("system")):
        params["instructions"] = system
    _set_tools(params, body)
    if effort := _effort(body.get("thinking")):
        params["reasoning"] = {"effort": effort}
    if text := _format(body):
        params["text"] = {"format": text}
    further = {"stop": body.get("stop_sequences"), **{key: body.get(key) for key in _FURTHER}}
    further = {key: value for key, value in further.items() if value is not None}
    if further:
        params["metadata"] = {"extra_body": json_text(further, "stop_sequences")}
    return params


def _system(system: Any) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    blocks = blocks_of(system, "system")
    return "\n\n".join(text_of(block, "text", f"system[{i}]") for i, block in enumerate(blocks))


def _set_tools(params: JSON, body: Mapping[str, Any]) -> None:
    tools = []
    for i, tool in enumerate(list_of(body.get("tools") or [], "tools")):
        if not isinstance(tool, dict) or tool.get("type", "custom") != "custom" or "name" not in tool:
            kind = tool.get("type") if isinstance(tool, dict) else tool
            raise BadRequest(f"tools[{i}]: only tools of the client's own are known, not {shown(kind)}")
        made = {"type": "function", "name": tool["name"], "parameters": tool.get("input_schema")}
        tools.append({**made, "description": tool.get("description"), "strict": tool.get("strict")})
    if not tools:
        return
    params["tools"] = tools
    choice = body.get("tool_choice")
    if choice is None:
        return
    if not isinstance(choice, dict):
        raise BadRequest("tool_choice: an object is expected")
    if choice.get("disable_parallel_tool_use"):
        params["parallel_tool_calls"] = False
    if choice.get("type") == "tool":
        params["tool_choice"] = {"type": "function", "name": choice.get("name")}
    elif (known := _CHOICES.get(str(choice.get("type")))) is not None:
        params["tool_choice"] = known
    else:
        raise BadRequest(f"tool_choice: {shown(choice.get('type'))} is none of auto, any, none and tool")


def _effort(thinking: Any) -> str | None:
    if not isinstance(thinking, dict) or thinking.get("type") not in ("enabled", "adaptive"):
        return None
    budget = thinking.get("budget_tokens")
    if type(budget) is not int:
        return "medium"
    return next((effort for limit, effort in _EFFORT_BUDGETS if budget <= limit), "high")


def _format(body: Mapping[str, Any]) -> JSON | None:
    """The format of the answer: ``output_config.format``, or ``output_format`` as it was called before."""
    config = body.get("output_config")
    wanted = config.get("format") if isinstance(config, dict) else body.get("output_format")
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        return None
    return {"type": "json_schema", "name": "answer", "schema": wanted.get("schema"), "strict": True}

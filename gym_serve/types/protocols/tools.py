"""Tools, the choice among them, and the format of the answer, in both directions.

Responses writes a function flat (``{"type", "name", "parameters"}``), chat one level down
(``{"type", "function": {...}}``). ``strict`` stays behind on the way to chat, as in NeMo Gym: some
engines constrain the decoding with it, and so sample from another distribution than the policy's.
"""

from __future__ import annotations

from typing import Any

from gym_serve.types.errors import BadRequest
from gym_serve.types.protocols.fields import shown
from gym_serve.types.requests import JSON

__all__ = [
    "chat_response_format",
    "chat_tool_choice",
    "chat_tools",
    "responses_text_format",
    "responses_tool_choice",
    "responses_tools",
]

_FUNCTION_KEYS = ("name", "description", "parameters")


def chat_tools(tools: Any) -> list[JSON]:
    """Function tools in chat form.

    Raises:
        BadRequest: a hosted tool (web_search, ...), which no chat backend runs; or no name.
    """
    converted = []
    for i, tool in enumerate(_listed(tools, "tools")):
        if not isinstance(tool, dict) or tool.get("type", "function") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else tool
            raise BadRequest(f"tools[{i}]: a chat backend takes function tools only, not {shown(kind)}")
        if not isinstance(tool.get("name"), str):
            raise BadRequest(f"tools[{i}]: a function without a name")
        function = {key: tool[key] for key in _FUNCTION_KEYS if tool.get(key) is not None}
        converted.append({"type": "function", "function": function})
    return converted


def responses_tools(tools: Any) -> list[JSON]:
    """Chat tools in Responses form.

    Raises:
        BadRequest: a tool that is no function.
    """
    converted = []
    for i, tool in enumerate(_listed(tools or [], "tools")):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            raise BadRequest(f"tools[{i}]: a function tool is expected")
        converted.append({**function, "type": "function"})
    return converted


def chat_tool_choice(choice: Any) -> Any:
    """``tool_choice`` in chat form.

    Raises:
        BadRequest: the choice of a hosted tool.
    """
    if not isinstance(choice, dict) or "function" in choice:
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        tools = [chat_tool_choice(tool) for tool in _listed(choice.get("tools"), "tool_choice.tools")]
        return {
            "type": "allowed_tools",
            "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": tools},
        }
    raise BadRequest(f"tool_choice: {shown(choice.get('type'))} has no chat form")


def responses_tool_choice(choice: Any) -> Any:
    """``tool_choice`` in Responses form; null is ``"auto"``."""
    if not isinstance(choice, dict):
        return "auto" if choice is None else choice
    if isinstance(choice.get("function"), dict):
        return {"type": "function", "name": choice["function"].get("name")}
    if isinstance(choice.get("allowed_tools"), dict):
        allowed = choice["allowed_tools"]
        tools = [responses_tool_choice(tool) for tool in _listed(allowed.get("tools"), "tool_choice.tools")]
        return {"type": "allowed_tools", "mode": allowed.get("mode", "auto"), "tools": tools}
    return dict(choice)


def chat_response_format(text: Any) -> JSON | None:
    """``response_format`` for ``text.format``; None for plain text, chat's default.

    Raises:
        BadRequest: a format that chat cannot say.
    """
    wanted = text.get("format") if isinstance(text, dict) else None
    if not isinstance(wanted, dict) or wanted.get("type") == "text":
        return None
    if wanted.get("type") == "json_object":
        return {"type": "json_object"}
    if wanted.get("type") == "json_schema":
        schema = {k: v for k, v in wanted.items() if k != "type" and v is not None}
        return {"type": "json_schema", "json_schema": schema}
    raise BadRequest(f"text.format: {shown(wanted.get('type'))} has no chat form")


def responses_text_format(response_format: Any) -> JSON | None:
    """``text.format`` for ``response_format``; None without one."""
    if not isinstance(response_format, dict):
        return None
    schema = response_format.get("json_schema")
    return {**(schema if isinstance(schema, dict) else {}), "type": response_format.get("type", "text")}


def _listed(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise BadRequest(f"{where}: a list is expected, not {type(value).__name__}")
    return value

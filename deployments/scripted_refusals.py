"""What `scripted_model` refuses: the bodies that a real endpoint answers with a 400.

So what works with the scripted model is not refused by its first real one. Only what OpenAI's
API and vLLM both refuse is refused. A model's name may be missing, as the models of a graph set their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from gym_serve.types.errors import BadRequest
from gym_serve.types.requests import JSON

_ROLES = ("user", "assistant", "system", "developer")
_CHOICES = ("auto", "none", "required")
_CHAT_KEYS = ("tool_calls", "reasoning_content", "reasoning")  # of a chat message that needs no content
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_LONGEST_ID = 64
_MOST_CALLS = 128
_RANGES = {"temperature": (0.0, 2.0), "top_p": (0.0, 1.0)}
_TYPES: Mapping[str, tuple[type, str]] = {
    "model": (str, "a string"),
    "instructions": (str, "a string"),
    "parallel_tool_calls": (bool, "a boolean"),
    "metadata": (dict, "an object"),
    "tools": (list, "a list of tools"),
}


def check_body(body: JSON) -> None:
    """Check a body of ``POST /v1/responses``. Raises BadRequest: a real endpoint would refuse it; names the
    place, and what must be there.
    """
    for key, (kind, wanted) in _TYPES.items():
        _require(isinstance(body.get(key), kind | None), key, wanted, body.get(key))
    for key, (low, high) in _RANGES.items():
        value = body.get(key)
        fits = value is None or (_is_number(value) and low <= value <= high)
        _require(fits, key, f"a number from {low:g} to {high:g}", value)
    limit = body.get("max_output_tokens")
    fits = limit is None or (_is_number(limit) and limit >= 1 and float(limit).is_integer())
    _require(fits, "max_output_tokens", "an integer of at least 1", limit)
    choice = body.get("tool_choice")
    fits = choice is None or isinstance(choice, dict) or choice in _CHOICES
    _require(fits, "tool_choice", f"one of {', '.join(_CHOICES)}, or an object", choice)
    for index, tool in enumerate(body.get("tools") or ()):
        _check_tool(tool, f"tools[{index}]")
    items = body["input"] if isinstance(body.get("input"), list) else []
    for index, item in enumerate(items):
        _check_item(item, f"input[{index}]")
    _check_calls(items)


def _check_tool(tool: Any, where: str) -> None:
    _require(isinstance(tool, dict), where, "an object", tool)
    if tool.get("type", "function") == "function":  # else one that an API itself runs
        name, parameters = tool.get("name"), tool.get("parameters")
        _require(isinstance(name, str) and name != "", f"{where}.name", "a string", name)
        _require(isinstance(parameters, dict | None), f"{where}.parameters", "a JSON schema", parameters)


def _check_item(item: Any, where: str) -> None:
    _require(isinstance(item, dict), where, "an object", item)
    match item.get("type") or "message":
        case "message":
            _check_message(item, where)
        case "function_call":
            for key in ("call_id", "name", "arguments"):
                _require(isinstance(item.get(key), str), f"{where}.{key}", "a string", item.get(key))
        case "function_call_output":
            call_id, output = item.get("call_id"), item.get("output")
            _require(isinstance(call_id, str), f"{where}.call_id", "a string", call_id)
            _require(isinstance(output, str | list), f"{where}.output", "a string or a list of parts", output)


def _check_calls(items: list[Any]) -> None:
    """Earlier calls: what the chat templates of vLLM, SGLang and llama.cpp, and OpenAI's API, refuse."""
    ids: set[str] = set()
    in_a_row = 0
    for index, item in enumerate(items):
        in_a_row = in_a_row + 1 if item.get("type") == "function_call" else 0
        if not in_a_row:
            continue
        name, call_id, arguments = item["name"], item["call_id"], item["arguments"]
        where = f"input[{index}]"
        characters = "1 to 64 of the characters a-z, A-Z, 0-9, _, - and ."
        _require(_NAME.fullmatch(name) is not None, f"{where}.name", characters, name)
        fits = 1 <= len(call_id) <= _LONGEST_ID
        _require(fits, f"{where}.call_id", f"1 to {_LONGEST_ID} characters", call_id)
        _require(call_id not in ids, f"{where}.call_id", "an id of its own", call_id)
        ids.add(call_id)
        try:
            fits = isinstance(json.loads(arguments), dict)
        except (ValueError, RecursionError):
            fits = False
        _require(fits, f"{where}.arguments", "a JSON object", arguments)
        if in_a_row > _MOST_CALLS:
            raise BadRequest(f"`input` must have at most {_MOST_CALLS} calls in a turn")


def _check_message(item: JSON, where: str) -> None:
    role, content = item.get("role"), item.get("content")
    if role == "tool" and item.get("tool_call_id"):
        return  # a chat message, as rows may have
    _require(role in _ROLES, f"{where}.role", f"one of {', '.join(_ROLES)}", role)
    if isinstance(content, str) or (role == "assistant" and any(item.get(key) for key in _CHAT_KEYS)):
        return
    _require(isinstance(content, list), f"{where}.content", "a string or a list of parts", content)
    for index, part in enumerate(content or ()):
        at = f"{where}.content[{index}]"
        _require(isinstance(part, dict), at, "an object", part)
        kind, text = part.get("type"), part.get("text")
        _require(isinstance(kind, str), f"{at}.type", "a string", kind)
        if kind in ("input_text", "output_text", "text"):
            _require(isinstance(text, str), f"{at}.text", "a string", text)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require(fits: bool, place: str, wanted: str, value: Any) -> None:
    if not fits:
        shown = "null" if value is None else repr(value)[:60]
        raise BadRequest(f"`{place}` must be {wanted}, got {shown}")

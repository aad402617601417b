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
        if body.get(key) is not None and not isinstance(body[key], kind):
            raise _wrong(key, wanted, body[key])
    for key, (low, high) in _RANGES.items():
        if (given := body.get(key)) is not None and not (_is_number(given) and low <= given <= high):
            raise _wrong(key, f"a number from {low:g} to {high:g}", given)
    limit = body.get("max_output_tokens")
    if limit is not None and not (_is_number(limit) and limit >= 1 and float(limit).is_integer()):
        raise _wrong("max_output_tokens", "an integer of at least 1", limit)
    choice = body.get("tool_choice")
    if not (choice is None or isinstance(choice, dict) or choice in _CHOICES):
        raise _wrong("tool_choice", f"one of {', '.join(_CHOICES)}, or an object", choice)
    for index, tool in enumerate(body.get("tools") or ()):
        _check_tool(tool, f"tools[{index}]")
    given = body.get("input")
    items = given if isinstance(given, list) else []
    for index, item in enumerate(items):
        _check_item(item, f"input[{index}]")
    _check_calls(items)


def _check_tool(tool: Any, where: str) -> None:
    if not isinstance(tool, dict):
        raise _wrong(where, "an object", tool)
    if tool.get("type", "function") != "function":
        return  # one that an API itself runs
    if not (isinstance(tool.get("name"), str) and tool["name"]):
        raise _wrong(f"{where}.name", "a string", tool.get("name"))
    if not isinstance(tool.get("parameters"), dict | None):
        raise _wrong(f"{where}.parameters", "a JSON schema", tool["parameters"])


def _check_item(item: Any, where: str) -> None:
    if not isinstance(item, dict):
        raise _wrong(where, "an object", item)
    kind = item.get("type") or "message"
    if kind == "message":
        _check_message(item, where)
    elif kind == "function_call":
        for key in ("call_id", "name", "arguments"):
            if not isinstance(item.get(key), str):
                raise _wrong(f"{where}.{key}", "a string", item.get(key))
    elif kind == "function_call_output":
        if not isinstance(item.get("call_id"), str):
            raise _wrong(f"{where}.call_id", "a string", item.get("call_id"))
        if not isinstance(item.get("output"), str | list):
            raise _wrong(f"{where}.output", "a string or a list of parts", item.get("output"))


def _check_calls(items: list[Any]) -> None:
    """Earlier calls: what the chat templates of vLLM, SGLang and llama.cpp, and OpenAI's API, refuse."""
    ids: set[str] = set()
    in_a_row = 0
    for index, item in enumerate(items):
        is_call = item.get("type") == "function_call"
        in_a_row = in_a_row + 1 if is_call else 0
        if not is_call:
            continue
        where = f"input[{index}]"
        if not _NAME.fullmatch(item["name"]):
            raise _wrong(f"{where}.name", "1 to 64 of the characters a-z, A-Z, 0-9, _, - and .", item["name"])
        if not 1 <= len(item["call_id"]) <= _LONGEST_ID:
            raise _wrong(f"{where}.call_id", f"1 to {_LONGEST_ID} characters", item["call_id"])
        if item["call_id"] in ids:
            raise _wrong(f"{where}.call_id", "an id of its own", item["call_id"])
        ids.add(item["call_id"])
        try:
            arguments = json.loads(item["arguments"])
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise _wrong(f"{where}.arguments", "a JSON object", item["arguments"])
        if in_a_row > _MOST_CALLS:
            raise BadRequest(f"`input` must have at most {_MOST_CALLS} calls in a turn")


def _check_message(item: JSON, where: str) -> None:
    role, content = item.get("role"), item.get("content")
    if role == "tool" and item.get("tool_call_id"):
        return  # a chat message, as rows may have
    if role not in _ROLES:
        raise _wrong(f"{where}.role", f"one of {', '.join(_ROLES)}", role)
    if isinstance(content, str) or (role == "assistant" and any(item.get(key) for key in _CHAT_KEYS)):
        return
    if not isinstance(content, list):
        raise _wrong(f"{where}.content", "a string or a list of parts", content)
    for index, part in enumerate(content):
        at = f"{where}.content[{index}]"
        if not isinstance(part, dict):
            raise _wrong(at, "an object", part)
        if not isinstance(part.get("type"), str):
            raise _wrong(f"{at}.type", "a string", part.get("type"))
        if part["type"] in ("input_text", "output_text", "text") and not isinstance(part.get("text"), str):
            raise _wrong(f"{at}.text", "a string", part.get("text"))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _wrong(place: str, wanted: str, given: Any) -> BadRequest:
    shown = "null" if given is None else repr(given)[:60]
    return BadRequest(f"`{place}` must be {wanted}, got {shown}")

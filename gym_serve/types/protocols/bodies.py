"""What endpoints refuse in a body of ``POST /v1/responses``: for rows before a run, and for `scripted_model`.

OpenAI's API and vLLM both answer such a body with a 400. Types of items, parts and tools that are not named
here pass: the API has more of them, and gets new ones. So do messages of Chat Completions, as rows have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from gym_serve.types.requests import JSON

_ROLES = ("user", "assistant", "system", "developer")
_CHOICES = ("auto", "none", "required")
_CHAT_KEYS = ("tool_calls", "reasoning_content", "reasoning")  # of a chat message that needs no content
_RANGES = {"temperature": (0.0, 2.0), "top_p": (0.0, 1.0)}
_NAMES: Mapping[type | tuple[type, ...], str] = {
    str: "a string",
    bool: "a boolean",
    dict: "an object",
    list: "a list",
    (str, list): "a string or a list of parts",
}
_TYPES = {"model": str, "instructions": str, "parallel_tool_calls": bool, "metadata": dict, "tools": list}
_ITEMS: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "function_call": {"call_id": str, "name": str, "arguments": str},
    "function_call_output": {"call_id": str, "output": (str, list)},
    "reasoning": {"summary": list},
}
_TEXTS = ("input_text", "output_text", "text")


class Misfit(NamedTuple):
    """What is wrong, and where: ``place`` leads from the body, as in ``input[0].role``."""

    place: str
    wanted: str
    value: Any

    def __str__(self) -> str:
        shown = "null" if self.value is None else repr(self.value)[:60]
        return f"must be {self.wanted}, got {shown}"


def misfits(body: JSON) -> Iterator[Misfit]:
    """What is wrong with a body whose ``input`` is a text or a list."""
    for key, kind in _TYPES.items():
        if not isinstance(value := body.get(key), kind | None):
            yield Misfit(key, _NAMES[kind], value)
    for key, (low, high) in _RANGES.items():
        if (value := body.get(key)) is not None and not (_is_number(value) and low <= value <= high):
            yield Misfit(key, f"a number from {low:g} to {high:g}", value)
    limit = body.get("max_output_tokens")
    if limit is not None and not (_is_number(limit) and limit >= 1 and float(limit).is_integer()):
        yield Misfit("max_output_tokens", "an integer of at least 1", limit)
    choice = body.get("tool_choice")
    if not (isinstance(choice, dict | None) or choice in _CHOICES):
        yield Misfit("tool_choice", f"one of {', '.join(_CHOICES)}, or an object", choice)
    tools, items = body.get("tools"), body.get("input")
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        yield from _under(f"tools[{index}]", _tool(tool))
    for index, item in enumerate(items if isinstance(items, list) else ()):
        yield from _under(f"input[{index}]", _item(item))


def _under(place: str, inner: Iterator[Misfit]) -> Iterator[Misfit]:
    return (misfit._replace(place=f"{place}{misfit.place}") for misfit in inner)


def _tool(tool: Any) -> Iterator[Misfit]:
    if not isinstance(tool, dict):
        yield Misfit("", "an object", tool)
    elif not isinstance(kind := tool.get("type"), str):
        yield Misfit(".type", "a string, 'function' for a tool of the environment", kind)
    elif kind == "function":  # else one that an API itself runs
        if not isinstance(name := tool.get("name"), str) or not name:
            in_chat = isinstance(tool.get("function"), dict)
            yield Misfit(".name", "a string" + (" (beside type, not in 'function')" if in_chat else ""), name)
        if not isinstance(parameters := tool.get("parameters"), dict | None):
            yield Misfit(".parameters", "a JSON schema", parameters)


def _item(item: Any) -> Iterator[Misfit]:
    if not isinstance(item, dict):
        yield Misfit("", "an object", item)
    elif (kind := item.get("type") or "message") == "message":
        yield from _message(item)
    else:
        for key, wanted in _ITEMS.get(str(kind), {}).items():
            if not isinstance(value := item.get(key), wanted):
                yield Misfit(f".{key}", _NAMES[wanted], value)


def _message(item: JSON) -> Iterator[Misfit]:
    role, content = item.get("role"), item.get("content")
    if role == "tool" and item.get("tool_call_id"):
        return
    if role not in _ROLES:
        yield Misfit(".role", f"one of {', '.join(_ROLES)}", role)
    if isinstance(content, str) or (role == "assistant" and any(item.get(key) for key in _CHAT_KEYS)):
        return
    if not isinstance(content, list):
        yield Misfit(".content", _NAMES[str, list], content)
        return
    for index, part in enumerate(content):
        place = f".content[{index}]"
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
        if not isinstance(kind, str):
            yield Misfit(place, "an object with a type, e.g. input_text", part)
        elif kind in _TEXTS and not isinstance(text, str):
            yield Misfit(f"{place}.text", "a string", text)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

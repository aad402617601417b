"""Tool calls in a text, in the style of Hermes and Qwen: ``<tool_call>{"name", "arguments"}</tool_call>``.

What does not fit this form stays in the text: it is the policy's own mistake, for the verifier to see.
"""

from __future__ import annotations

from gym_serve.servers.transport import encode
from gym_serve.types.exact import exact_json
from gym_serve.types.protocols import new_id
from gym_serve.types.requests import JSON

CALL_OPENING = "<tool_call>"
CALL_CLOSE = "</tool_call>"


def split_calls(text: str) -> tuple[str, list[JSON]]:
    """The text without its calls, and the calls as chat messages have them. Linear in the text's length."""
    rest: list[str] = []
    calls: list[JSON] = []
    at = 0
    while (start := text.find(CALL_OPENING, at)) >= 0:
        end = text.find(CALL_CLOSE, start)
        if end < 0:
            break
        call = _call(text[start + len(CALL_OPENING) : end])
        if call is None:
            rest.append(text[at : end + len(CALL_CLOSE)])
        else:
            rest.append(text[at:start])
            calls.append(call)
        at = end + len(CALL_CLOSE)
    rest.append(text[at:])
    left = "".join(rest)
    return (left.rstrip() if calls else left), calls


def _call(text: str) -> JSON | None:
    try:
        call = exact_json(text.encode("utf-8", "replace"))
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = encode(arguments).decode()
    return {
        "id": new_id("call"),
        "type": "function",
        "function": {"name": call["name"], "arguments": arguments},
    }

"""Responses -> Anthropic Messages: a Response and its failures as ``POST /v1/messages`` has them.

As in `to_completion`, what a client may act on is the end of an episode: the items after the last tool
output. The calls before that were already run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gym_serve.types.errors import Unavailable
from gym_serve.types.exact import exact_json
from gym_serve.types.protocols.fields import shown
from gym_serve.types.protocols.items import new_id
from gym_serve.types.protocols.parts import content_refusal, content_text
from gym_serve.types.requests import JSON

__all__ = ["INVALID_JSON", "error_message", "response_to_message", "tool_input"]

INVALID_JSON = "INVALID_JSON"
"""Key under which the arguments of a call stand that are no JSON object, as a block must have one; it is the
one in Anthropic's documentation of fine-grained tool streaming."""

_STOPS = {"max_output_tokens": "max_tokens", "content_filter": "refusal"}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def response_to_message(response: Mapping[str, Any], body: Mapping[str, Any]) -> JSON:
    """The Message for a Response.

    Args:
        response: OpenAI's Response.
        body: the Messages body that it answers; names the model where the response does not.

    Raises:
        Unavailable: the response is a failed one, or none at all.
    """
    output = response.get("output")
    if not isinstance(output, list) or response.get("error"):
        raise Unavailable(f"the response failed: {shown(response.get('error') or response)}")
    content = [block for item in _answer_of(output) for block in blocks_of(item)]
    return {
        "id": new_id("msg"),
        "type": "message",
        "role": "assistant",
        "model": response.get("model") or body.get("model") or "",
        "content": content,
        **stop_of(response, content),
        "usage": message_usage(response.get("usage")),
    }


def error_message(status: int, error: Mapping[str, Any]) -> JSON:
    """The body of a failure in Anthropic's form.

    Args:
        status: its HTTP status.
        error: what is under ``error`` in `GymError.to_body`; it is kept, but for the ``type``.
    """
    kind = _ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {**error, "type": kind}}


def _answer_of(output: list[Any]) -> list[Any]:
    """What the model said last: the items after the last tool output."""
    start = len(output)
    while start > 0 and _is_answer(output[start - 1]):
        start -= 1
    return output[start:]


def _is_answer(item: Any) -> bool:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    return kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant")


def blocks_of(item: Mapping[str, Any]) -> list[JSON]:
    """The content blocks of an assistant's item."""
    kind = item.get("type", "message")
    if kind == "message":
        content = item.get("content")
        texts = map(_said, content) if isinstance(content, list) else [content_text(content)]
        return [{"type": "text", "text": text, "citations": None} for text in texts if text]
    if kind == "reasoning":
        return _thinking(item)
    call_id = str(item.get("call_id") or item.get("id") or new_id("toolu"))
    return [
        {
            "type": "tool_use",
            "id": call_id,
            "name": str(item.get("name") or ""),
            "input": tool_input(item.get("arguments")),
        }
    ]


def _said(part: Any) -> str:
    return content_text([part]) + content_refusal([part])


def _thinking(item: Mapping[str, Any]) -> list[JSON]:
    signature = item.get("encrypted_content")
    signature = signature if isinstance(signature, str) else ""
    for key in ("summary", "content"):
        parts = item.get(key)
        texts = [content_text([part]) for part in parts] if isinstance(parts, list) else []
        if any(texts):
            return [{"type": "thinking", "thinking": text, "signature": signature} for text in texts if text]
    return [{"type": "redacted_thinking", "data": signature}] if signature else []


def tool_input(arguments: Any) -> JSON:
    """The arguments of a call as an object; what is none stands under `INVALID_JSON`."""
    text = arguments if isinstance(arguments, str) else ""
    try:
        decoded = exact_json(text) if text else {}
        json.dumps(decoded)
    except (ValueError, RecursionError):  # the latter for what is nested too deeply to be sent on
        return {INVALID_JSON: text}
    # So does an object of just this form, or it could not be told from one that is none.
    return decoded if isinstance(decoded, dict) and decoded.keys() != {INVALID_JSON} else {INVALID_JSON: text}


def stop_of(response: Mapping[str, Any], content: list[JSON]) -> JSON:
    """Why it ended: ``stop_reason`` and ``stop_sequence``."""
    details = response.get("incomplete_details")
    reason = _STOPS.get(str(details.get("reason"))) if isinstance(details, dict) else None
    sequence = None
    if reason is None:
        if any(block["type"] == "tool_use" for block in content):
            reason = "tool_use"
        elif _refuses(response.get("output")):
            reason = "refusal"
        elif isinstance(sequence := response.get("stop_sequence"), str):
            reason = "stop_sequence"
        else:
            reason, sequence = "end_turn", None
    return {"stop_reason": reason, "stop_sequence": sequence}


def _refuses(output: Any) -> bool:
    answer = _answer_of(output) if isinstance(output, list) else []
    return any(content_refusal(item.get("content")) for item in answer)


def message_usage(usage: Any) -> JSON:
    """The usage in Anthropic's form: there, ``input_tokens`` are those that no cache answered."""
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("input_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else 0
    given = _count(usage.get("input_tokens"))
    return {
        "input_tokens": max(0, given - cached),
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": _count(usage.get("output_tokens")),
    }


def _count(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 0

"""Responses -> Chat Completions: a finished Response as a chat completion.

An agent's Response holds a whole episode. What a chat client may act on is the end of it: the items
after the last tool output. Calls before that were already run, and must not be run again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gym_serve.types.errors import BadRequest, Unavailable
from gym_serve.types.protocols.fields import seconds, shown
from gym_serve.types.protocols.items import new_id
from gym_serve.types.protocols.logprobs import answer_logprobs
from gym_serve.types.protocols.parts import content_refusal, content_text
from gym_serve.types.protocols.to_chat import responses_to_chat
from gym_serve.types.protocols.usage import chat_usage
from gym_serve.types.requests import JSON

__all__ = ["response_to_chat"]

_FINISH = {"max_output_tokens": "length", "content_filter": "content_filter"}


def response_to_chat(response: Mapping[str, Any], chat: Mapping[str, Any] | None = None) -> JSON:
    """The chat completion for a Response.

    Args:
        response: OpenAI's Response, of one model call or of a whole episode.
        chat: the chat body that it answers; names the model where the response does not.

    Raises:
        Unavailable: the response is a failed one, or none at all.
    """
    output = response.get("output")
    if not isinstance(output, list) or response.get("error"):
        raise Unavailable(f"the response failed: {shown(response.get('error') or response)}")
    start = len(output)
    while start > 0 and _is_answer(output[start - 1]):
        start -= 1
    message = _final_message(output[start:])
    details = response.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, dict) else None
    finish = _FINISH.get(str(reason)) or ("tool_calls" if message.get("tool_calls") else "stop")
    logprobs = answer_logprobs(output[start:])
    return {
        "id": new_id("chatcmpl"),
        "object": "chat.completion",
        "created": int(seconds(response.get("created_at")) or 0),
        "model": response.get("model") or (chat or {}).get("model") or "",
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": logprobs}],
        "usage": chat_usage(response.get("usage")),
    }


def _final_message(answer: list[Any]) -> JSON:
    # The assistant items of an input fold in the same way.
    try:
        messages = responses_to_chat({"input": answer}, reasoning="field", token_ids=True)["messages"]
    except BadRequest as error:
        raise Unavailable(f"the response is malformed: {error.message}") from None
    message: JSON = messages[0] if messages else {"role": "assistant", "content": None}
    refusal = content_refusal(message["content"]) or None
    if refusal:
        message["content"] = content_text(message["content"]) or None
    elif message["content"] is None and "tool_calls" not in message:
        message["content"] = ""
    return {**message, "refusal": refusal}


def _is_answer(item: Any) -> bool:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    return kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant")

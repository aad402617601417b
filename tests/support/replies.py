"""What models answer, complete as OpenAI's types want it: for doubles of models and of endpoints."""

from __future__ import annotations

from typing import Any

__all__ = ["call", "completion", "message", "response", "thought", "usage"]

JSON = dict[str, Any]


def usage(*, cached: int = 0, output: int = 2, reasoning: int = 0) -> JSON:
    """Of a call with three input tokens."""
    return {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": 3 + output,
    }


def message(*content: str | JSON, id: str = "msg_1") -> JSON:
    """An output message, of texts or of parts that are given as they are."""
    parts = [
        {"type": "output_text", "text": part, "annotations": []} if isinstance(part, str) else part
        for part in content
    ]
    return {"id": id, "type": "message", "role": "assistant", "status": "completed", "content": parts}


def thought(text: str) -> JSON:
    """A reasoning item."""
    return {"id": "rs_1", "type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}


def call(name: str, arguments: str = "{}", call_id: str = "c") -> JSON:
    """A call of a tool."""
    made = {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}
    return {"id": "fc_1", "status": "completed", **made}


def response(*output: JSON, **fields: Any) -> JSON:
    """A Response with these items; ``fields`` replace what it has besides."""
    settings = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "usage": usage()}
    state = {"status": "completed", "incomplete_details": None, "error": None, "output": list(output)}
    head = {"id": "resp_1", "object": "response", "created_at": 1.0, "model": "m"}
    return {**head, **state, **settings, **fields}


def completion(text: str | None, finish: str = "stop", **said: Any) -> JSON:
    """A chat completion; ``said`` are further keys of its message."""
    choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": text, **said}}
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m"}
    counts = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    return {**head, "choices": [choice], "usage": counts}

"""What the spans of calls say: names and attributes after OpenTelemetry's conventions for generative AI.

These conventions (https://github.com/open-telemetry/semantic-conventions-genai) are still in development; all
of their names that gym_serve uses are in this file, except that of an episode (`AgentServer.run`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from gym_serve.observe.tracing import Span
from gym_serve.servers.transport import Reply
from gym_serve.types.errors import GymError

PROVIDER = "gym_serve"  # what a caller knows about a model server of its graph: behind it may be any

_CHATS = frozenset({"v1/responses", "v1/chat/completions"})
_REQUEST = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "max_output_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "max_tokens": "gen_ai.request.max_tokens",
}


def describe_call(seen: Span, server: str, op: str, body: Any, reply: Reply) -> None:
    """Describe a call, seen by its caller."""
    if op in _CHATS:
        _describe_chat(seen, server, body if isinstance(body, dict) else {}, reply)
    elif op.startswith("tools/"):
        tool = op.removeprefix("tools/")
        seen.name(f"execute_tool {tool}")
        operation = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.type": "function"}
        seen.set({**operation, "gen_ai.tool.name": tool})
    describe_reply(seen, server, reply)


def describe_reply(seen: Span, server: str, reply: Reply) -> None:
    """Say which server a call went to, and how it ended."""
    seen.set(
        {"gym_serve.server": server, "gym_serve.status": reply.status, "gym_serve.session": reply.session}
    )
    if reply.status >= 400:
        try:
            reply.json()
        except GymError as error:
            seen.fail(error.code, error.message)


def _describe_chat(seen: Span, server: str, body: Mapping[str, Any], reply: Reply) -> None:
    model = str(body.get("model") or server)
    seen.name(f"chat {model}")
    seen.set(
        {"gen_ai.operation.name": "chat", "gen_ai.provider.name": PROVIDER, "gen_ai.request.model": model}
    )
    seen.set({name: _number(body.get(key)) for key, name in _REQUEST.items() if key in body})
    try:
        answer = orjson.loads(reply.body) if reply.status < 400 else None
    except orjson.JSONDecodeError:
        return
    if not isinstance(answer, dict):
        return
    usage = answer.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("input_tokens_details") or usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    seen.set(
        {
            "gen_ai.response.id": _text(answer.get("id")),
            "gen_ai.response.model": _text(answer.get("model")),
            "gen_ai.response.finish_reasons": _finish_reasons(answer),
            "gen_ai.usage.input_tokens": _number(usage.get("input_tokens", usage.get("prompt_tokens"))),
            "gen_ai.usage.output_tokens": _number(usage.get("output_tokens", usage.get("completion_tokens"))),
            "gen_ai.usage.cache_read.input_tokens": _number(cached),
        }
    )


def _finish_reasons(answer: Mapping[str, Any]) -> list[str]:
    if isinstance(choices := answer.get("choices"), list):
        return [str(choice.get("finish_reason")) for choice in choices if isinstance(choice, dict)]
    if isinstance(cut := answer.get("incomplete_details"), dict):
        reason = str(cut.get("reason"))
        return ["length" if reason == "max_output_tokens" else reason]
    items = output if isinstance(output := answer.get("output"), list) else []
    calls = any(isinstance(item, dict) and item.get("type") == "function_call" for item in items)
    return ["tool_calls" if calls else "stop"]


def _number(value: Any) -> int | float | None:
    return value if isinstance(value, int | float) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None

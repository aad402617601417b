"""Chat Completions -> Responses: a model's answer as OpenAI's Response object."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from gym_serve.types.errors import BadRequest, Unavailable
from gym_serve.types.protocols.answers import check_completion
from gym_serve.types.protocols.fields import seconds
from gym_serve.types.protocols.items import assistant_items, message_item, new_id
from gym_serve.types.protocols.logprobs import add_logprobs, asks_for_logprobs
from gym_serve.types.protocols.tokens import completion_tokens
from gym_serve.types.protocols.usage import responses_usage
from gym_serve.types.requests import JSON

__all__ = ["chat_to_response", "context_overflow_response"]

# Parameters of the request that OpenAI's Response repeats.
_ECHOED = (
    "background",
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "previous_response_id",
    "prompt",
    "reasoning",
    "service_tier",
    "temperature",
    "text",
    "top_logprobs",
    "top_p",
    "truncation",
    "user",
)

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


def chat_to_response(
    completion: Mapping[str, Any], params: Mapping[str, Any], *, parse_think: bool, token_ids: bool = True
) -> JSON:
    """The Response for a chat completion.

    Where the backend says which of the request's stop sequences ended the generation, that is its
    ``stop_sequence``: no field of OpenAI's, but Anthropic's clients ask for it.

    Args:
        completion: answer of ``POST /v1/chat/completions``; its first choice counts.
        params: the Responses body that it answers; the Response repeats its settings, and has log
            probabilities where it asks for them.
        parse_think: take ``<think>`` tags in the text as reasoning.
        token_ids: put the token bundle on the last output item, where the backend sent all of it.

    Raises:
        Unavailable: the backend's answer is malformed, or it gave the generation up.
    """
    choice = check_completion(completion)
    try:
        output = assistant_items(choice["message"], parse_think=parse_think)
    except BadRequest as error:
        raise Unavailable(f"the backend's answer cannot be read: {error.message}") from None
    if asks_for_logprobs(params):
        add_logprobs(output, choice.get("logprobs"))
    if token_ids:
        output[-1].update(completion_tokens(completion) or {})
    created = seconds(completion.get("created"))
    response = _response(
        params,
        output,
        reason=_INCOMPLETE.get(str(choice.get("finish_reason"))),
        model=params.get("model") or completion.get("model"),
        created_at=time.time() if created is None else created,
        usage=responses_usage(completion.get("usage")),
    )
    stop = choice.get("stop_reason", choice.get("matched_stop"))  # of vLLM and of SGLang
    return {**response, "stop_sequence": stop} if isinstance(stop, str) else response


def context_overflow_response(params: Mapping[str, Any]) -> JSON:
    """The Response of a model whose context the prompt does not fit: empty and incomplete."""
    return _response(
        params,
        [message_item("")],
        reason="max_output_tokens",
        model=params.get("model"),
        created_at=time.time(),
        usage=None,
    )


def _response(
    params: Mapping[str, Any],
    output: list[JSON],
    *,
    reason: str | None,
    model: Any,
    created_at: float,
    usage: JSON | None,
) -> JSON:
    parallel = params.get("parallel_tool_calls")
    return {
        **{key: params.get(key) for key in _ECHOED},
        "id": new_id("resp"),
        "object": "response",
        "created_at": created_at,
        "model": str(model or ""),
        "status": "incomplete" if reason else "completed",
        "incomplete_details": {"reason": reason} if reason else None,
        "error": None,
        "output": output,
        "usage": usage,
        "tools": params.get("tools") or [],
        "tool_choice": params.get("tool_choice") or "auto",
        "parallel_tool_calls": True if parallel is None else parallel,
    }

"""Chat Completions -> Responses: the body for a server that speaks only Responses, as an agent does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gym_serve.types.errors import BadRequest
from gym_serve.types.protocols.fields import json_text
from gym_serve.types.protocols.items import messages_to_items
from gym_serve.types.protocols.logprobs import LOGPROBS
from gym_serve.types.protocols.sampling import metadata_object
from gym_serve.types.protocols.tools import responses_text_format, responses_tool_choice, responses_tools
from gym_serve.types.requests import JSON

__all__ = ["chat_to_params"]

_SAME = ("model", "service_tier", "store", "temperature", "top_logprobs", "top_p", "user", "stream")
_CONVERTED = frozenset(
    {
        "chat_template_kwargs",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "metadata",
        "n",
        "parallel_tool_calls",
        "reasoning_effort",
        "response_format",
        "stream_options",
        "tool_choice",
        "tools",
        "verbosity",
        *_SAME,
    }
)


def chat_to_params(chat: Mapping[str, Any], *, parse_think: bool = True, token_ids: bool = False) -> JSON:
    """The body of ``POST /v1/responses`` for a body of ``POST /v1/chat/completions``.

    Sampling that Responses lacks (seed, stop, penalties, top_k, ...) travels in
    ``metadata.extra_body``, as a row writes it.

    Args:
        chat: the chat body; it is not changed.
        parse_think: take ``<think>`` tags in the assistant's texts as reasoning.
        token_ids: keep the token bundles of assistant messages.

    Raises:
        BadRequest: something that Responses has no form for, or ``n`` over 1.
    """
    if chat.get("n") not in (None, 1):
        raise BadRequest("n: this server gives one choice for a call")
    messages = chat.get("messages")
    if not isinstance(messages, list):
        raise BadRequest("messages: a list of messages is missing")
    parallel = chat.get("parallel_tool_calls")
    params: JSON = {key: chat[key] for key in _SAME if chat.get(key) is not None}
    params["input"] = messages_to_items(messages, parse_think=parse_think, token_ids=token_ids)
    params["tools"] = responses_tools(chat.get("tools"))
    params["tool_choice"] = responses_tool_choice(chat.get("tool_choice"))
    params["parallel_tool_calls"] = True if parallel is None else parallel
    limit = chat.get("max_completion_tokens") or chat.get("max_tokens")
    if limit is not None:
        params["max_output_tokens"] = limit
    if chat.get("logprobs"):
        params["include"] = [LOGPROBS]
    if chat.get("reasoning_effort") is not None:
        params["reasoning"] = {"effort": chat["reasoning_effort"]}
    text = {"format": responses_text_format(chat.get("response_format")), "verbosity": chat.get("verbosity")}
    text = {key: value for key, value in text.items() if value is not None}
    if text:
        params["text"] = text
    metadata = _metadata(chat)
    if metadata:
        params["metadata"] = metadata
    return params


def _metadata(chat: Mapping[str, Any]) -> JSON:
    given = chat.get("metadata")
    metadata = dict(given) if isinstance(given, dict) else {}
    further = {k: v for k, v in chat.items() if k not in _CONVERTED and v is not None}
    template = chat.get("chat_template_kwargs")
    if template and not isinstance(template, dict):
        raise BadRequest(f"chat_template_kwargs is an object, not {type(template).__name__}")
    for key, explicit in (("extra_body", further), ("chat_template_kwargs", template)):
        if explicit:
            metadata[key] = json_text({**metadata_object(given, key), **explicit}, key)
    return metadata

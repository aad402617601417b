"""Answers: checked, and converted between Chat Completions and Responses.

Every field that is read must have its protocol's type, else the answer is `Unavailable`: a broken endpoint
must not score the policy zero. What the *model* wrote is never judged: it could turn its own zeros into
failures. A prompt that does not fit the model's context is the policy's own result as well: the answer is an
empty response, incomplete for ``max_output_tokens``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Optional

import msgspec

from gym_serve.types.errors import BadRequest, EndpointMisconfigured, Unavailable
from gym_serve.types.protocols.content import content_refusal, content_text, seconds, shown
from gym_serve.types.protocols.items import assistant_items, final_answer, message_item, new_id
from gym_serve.types.protocols.requests import responses_to_chat
from gym_serve.types.protocols.tokens import (
    TOKEN_KEYS,
    add_logprobs,
    answer_logprobs,
    asks_for_logprobs,
    chat_usage,
    completion_tokens,
    responses_usage,
    tokens_problem,
)
from gym_serve.types.requests import JSON

_MESSAGE_KEYS = frozenset(
    ("role", "content", "tool_calls", "function_call", "audio", "refusal", "reasoning_content", "reasoning")
)
_COMPLETE = (None, "completed", "incomplete")


def check_completion(completion: Any) -> JSON:
    """The first choice of a chat completion. Raises `Unavailable`: the answer is none, or its generation was
    aborted, as engines do when their weights are replaced: a part is not the model's answer;
    EndpointMisconfigured: it is of another protocol."""
    choices = completion.get("choices") if isinstance(completion, dict) else None
    if not isinstance(choices, list) or not choices:
        _check_protocol(completion, "output", "Chat Completions")
        raise Unavailable(f"the backend's answer is not a chat completion: {shown(completion)}")
    for index, choice in enumerate(choices):
        if problem := _choice_problem(choice):
            raise Unavailable(f"the backend's answer is not a chat completion: choices[{index}]: {problem}")
        _check_ended(choice)
    first: JSON = choices[0]
    return first


def check_delta(choice: Any) -> None:
    """Raise `Unavailable` if a chunk's choice is malformed, or its generation was aborted."""
    if problem := _chunk_problem(choice):
        raise Unavailable(f"the backend's stream has a malformed choice: {problem}")
    _check_ended(choice)


def check_response(response: Any, who: str = "the model") -> JSON:
    """``response``, if it is a finished Response, by a model or by an agent for a whole episode; or raises
    `Unavailable`, or `EndpointMisconfigured` if it is of another protocol."""
    output = response.get("output") if isinstance(response, dict) else None
    if not isinstance(output, list):
        _check_protocol(response, "choices", "Responses")
        raise Unavailable(f"{who} did not answer a Response object: {shown(response)}")
    if response.get("error") is not None or response.get("status") not in _COMPLETE:
        failed = response.get("error") or response.get("status")
        raise Unavailable(f"{who} answered a response that failed: {shown(failed)}")
    details = response.get("incomplete_details")
    if details is not None and not isinstance(details, dict):
        raise Unavailable(f"{who}'s `incomplete_details` must be an object, got {shown(details)}")
    for index, item in enumerate(output):
        if problem := _item_problem(item):
            raise Unavailable(f"{who} did not answer a Response object: output[{index}]: {problem}")
    whole: JSON = response
    return whole


def _check_protocol(answer: Any, other: str, protocol: str) -> None:
    if isinstance(answer, dict) and isinstance(answer.get(other), list):
        raise EndpointMisconfigured(f"the endpoint does not speak {protocol}, it answers `{other}`")


def _check_ended(choice: JSON) -> None:
    if _reason(choice) in _GIVEN_UP:
        raise Unavailable(f"the backend gave the generation up (finish_reason {choice['finish_reason']!r})")


# Why a generation ended, as all backends say it, and Cohere (error_*), DeepSeek, Mistral (model_*) and Zhipu.
# The rest are ends of a whole answer.
_GIVEN_UP = frozenset({"abort", "error", "network_error", "insufficient_system_resource"})
_INCOMPLETE = {
    **dict.fromkeys(("length", "max_tokens", "model_length", "error_limit"), "max_output_tokens"),
    "model_context_window_exceeded": "max_output_tokens",
    **dict.fromkeys(("content_filter", "sensitive", "error_toxic"), "content_filter"),
}


def _reason(choice: JSON) -> str:
    """Why a choice ended, without what Gemini adds: ``content_filter: PROHIBITED_CONTENT``."""
    return str(choice.get("finish_reason")).partition(":")[0].lower()


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Message(msgspec.Struct):
    content: str | list[_Part] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Logprobs(msgspec.Struct):
    content: list[Any] | None = None
    refusal: list[Any] | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _ChunkChoice(msgspec.Struct):
    delta: _Message | None = None
    index: int | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Call(msgspec.Struct):
    id: str | None = None
    index: int | None = None


class _PartOfFunction(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _MessageItem(msgspec.Struct):
    role: str
    content: str | list[_Part]


class _CallItem(msgspec.Struct):  # a name is any JSON: see `_calls_problem`
    call_id: str
    arguments: str


class _ReasoningItem(msgspec.Struct):
    summary: list[_Part] | None = None
    content: list[_Part] | None = None
    encrypted_content: str | None = None


_ITEMS = {"message": _MessageItem, "function_call": _CallItem, "reasoning": _ReasoningItem}


# Each function below returns what is wrong, with its place, or None.


def _mismatch(value: Any, form: Any) -> str | None:
    try:
        msgspec.convert(value, form)
    except msgspec.ValidationError as error:
        return f"{error}, in {shown(value)}"
    return None


def _choice_problem(choice: Any) -> str | None:
    if problem := _mismatch(choice, _Choice):
        return problem
    message = choice["message"]
    if not message.keys() & _MESSAGE_KEYS:
        return f"its message is empty: {shown(message)}"
    return _calls_problem(message, whole=True) or _logprobs_problem(choice)


def _chunk_problem(choice: Any) -> str | None:
    if problem := _mismatch(choice, _ChunkChoice):
        return problem
    return _calls_problem(choice.get("delta") or {}, whole=False) or _logprobs_problem(choice)


def _logprobs_problem(choice: JSON) -> str | None:
    logprobs = choice.get("logprobs") or {}
    for entries in (logprobs.get(key) or () for key in ("content", "refusal")):
        if not set(map(type, entries)) <= {dict}:
            return f"its logprobs must be lists of objects, got {shown(entries)}"
    return None


def _calls_problem(message: JSON, *, whole: bool) -> str | None:
    for index, call in enumerate(message.get("tool_calls") or ()):
        problem = _mismatch(call, _Call)
        if problem is None:
            # Of any other type than `function`, the object has the name of the type. Name and arguments of a
            # whole call are the model's: a backend may decode what it wrote, to any JSON.
            function = call.get("function", call.get(str(call.get("type"))))
            problem = _mismatch(function, dict if whole else Optional[_PartOfFunction])  # noqa: UP045
        if problem:
            return f"tool_calls[{index}]: {problem}"
    return None


def _item_problem(item: Any) -> str | None:
    if problem := _mismatch(item, dict):
        return problem
    kind = item.get("type", "message")
    if not isinstance(kind, str):
        return f"type must be a string, got {shown(kind)}"
    if kind in _ITEMS and (problem := _mismatch(item, _ITEMS[kind])):
        return problem
    return tokens_problem(item) if any(item.get(key) is not None for key in TOKEN_KEYS) else None


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


def chat_to_response(
    completion: Mapping[str, Any], params: Mapping[str, Any], *, parse_think: bool, token_ids: bool = True
) -> JSON:
    """The Response for a chat completion, of which the first choice counts; it repeats the settings of
    ``params``.

    Where the backend says which of the request's stop sequences ended the generation, that is its
    ``stop_sequence``: no field of OpenAI's, but Anthropic's clients ask for it. ``token_ids`` puts the token
    bundle on the last output item, where the backend sent all of it. Raises `Unavailable`.
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
        reason=_INCOMPLETE.get(_reason(choice)),
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


def is_overflow_answer(answer: Any) -> bool:
    """Whether an answer says, in either protocol, that its prompt does not fit: it is cut off, and empty."""
    if not isinstance(answer, dict) or answer.get("usage"):
        return False
    if answer.get("choices"):
        choice = answer["choices"][0]
        return choice.get("finish_reason") == "length" and not content_text(choice["message"].get("content"))
    items = answer.get("output")
    texts = [content_text(item.get("content")) for item in items or () if isinstance(item, dict)]
    return bool(answer.get("incomplete_details") and isinstance(items, list) and not any(texts))


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


_FINISH = {"max_output_tokens": "length", "content_filter": "content_filter"}


def response_to_chat(response: Mapping[str, Any], chat: Mapping[str, Any] | None = None) -> JSON:
    """The chat completion for a Response; ``chat`` is the body that it answers. Raises `Unavailable` if the
    response is a failed one, or none at all."""
    answer = final_answer(response)
    message = _final_message(answer)
    details = response.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, dict) else None
    finish = _FINISH.get(str(reason)) or ("tool_calls" if message.get("tool_calls") else "stop")
    logprobs = answer_logprobs(answer)
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

"""Answers: checked, and converted between Chat Completions and Responses.

**Checks** run before an answer is scored or stored. Every field that is read must have its protocol's type,
else the answer is `Unavailable`: a broken endpoint must not score the policy zero. What the *model* wrote
is never judged: a model that could make its answer invalid could turn its own zeros into failures.

**Context overflow** (the prompt does not fit the model's context) is the policy's own result, not a
failure: the answer is an empty response, incomplete for ``max_output_tokens``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from gym_serve.types.errors import BadRequest, Unavailable
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

_TEXTS = ("refusal", "reasoning_content", "reasoning")
_MESSAGE_KEYS = frozenset({"role", "content", "tool_calls", "function_call", "audio", *_TEXTS})
_COMPLETE = (None, "completed", "incomplete")


def check_completion(completion: Any) -> JSON:
    """The first choice of a chat completion. Raises `Unavailable`: the answer is none, or its generation was
    aborted, as engines do when their weights are replaced: a part is not the model's answer.
    """
    choices = completion.get("choices") if isinstance(completion, dict) else None
    if not isinstance(choices, list) or not choices:
        raise Unavailable(f"the backend's answer is not a chat completion: {shown(completion)}")
    for index, choice in enumerate(choices):
        if problem := _choice_problem(choice):
            raise Unavailable(f"the backend's answer is not a chat completion: choices[{index}]{problem}")
        _check_ended(choice)
    first: JSON = choices[0]
    return first


def check_delta(choice: Any) -> None:
    """Raise `Unavailable` if a choice of a chat stream's chunk is malformed, or its generation was
    aborted.
    """
    problem = _mismatch(choice, dict, "")
    if problem is None:
        problem = _mismatch(choice.get("index"), int, ".index", optional=True)
        if problem is None and (delta := choice.get("delta")) is not None:
            problem = _message_problem(delta, ".delta", partial=True)
        problem = problem or _rest_problem(choice)
    if problem:
        raise Unavailable(f"the backend's stream has a malformed choice: choices[]{problem}")
    _check_ended(choice)


def check_response(response: Any, who: str = "the model") -> JSON:
    """``response``, if it is a finished Response, by a model or by an agent for a whole episode; or raises
    `Unavailable`.
    """
    output = response.get("output") if isinstance(response, dict) else None
    if not isinstance(output, list):
        raise Unavailable(f"{who} did not answer a Response object: {shown(response)}")
    if response.get("error") is not None or response.get("status") not in _COMPLETE:
        failed = response.get("error") or response.get("status")
        raise Unavailable(f"{who} answered a response that failed: {shown(failed)}")
    details = response.get("incomplete_details")
    if details is not None and not isinstance(details, dict):
        raise Unavailable(f"{who}'s `incomplete_details` must be an object, got {shown(details)}")
    for index, item in enumerate(output):
        if problem := _item_problem(item):
            raise Unavailable(f"{who} did not answer a Response object: output[{index}]{problem}")
    whole: JSON = response
    return whole


def _check_ended(choice: JSON) -> None:
    if choice.get("finish_reason") in ("abort", "error"):
        raise Unavailable(f"the backend gave the generation up (finish_reason {choice['finish_reason']!r})")


# Each function below returns the place of the first problem and what is wrong there, or None.


def _choice_problem(choice: Any) -> str | None:
    if problem := _mismatch(choice, dict, ""):
        return problem
    message = choice.get("message")
    if isinstance(message, dict) and not message.keys() & _MESSAGE_KEYS:
        return f".message is empty: {shown(message)}"
    return _message_problem(message, ".message") or _rest_problem(choice)


def _rest_problem(choice: JSON) -> str | None:
    logprobs = choice.get("logprobs")
    if problem := _mismatch(choice.get("finish_reason"), str, ".finish_reason", optional=True):
        return problem
    if logprobs is None:
        return None
    if problem := _mismatch(logprobs, dict, ".logprobs"):
        return problem
    for key in ("content", "refusal"):
        entries = logprobs.get(key)
        if entries is not None and not (isinstance(entries, list) and set(map(type, entries)) <= {dict}):
            return f".logprobs.{key} must be a list of objects, got {shown(entries)}"
    return None


def _message_problem(message: Any, where: str, *, partial: bool = False) -> str | None:
    """``partial``: it is a part of a message, whose calls need not be whole."""
    if problem := _mismatch(message, dict, where):
        return problem
    content = message.get("content")
    if content is not None and not isinstance(content, str) and (problem := _parts_problem(content)):
        return f"{where}.content{problem}"
    for key in _TEXTS:
        if problem := _mismatch(message.get(key), str, f"{where}.{key}", optional=True):
            return problem
    calls = message.get("tool_calls")
    if problem := _mismatch(calls, list, f"{where}.tool_calls", optional=True):
        return problem
    for index, call in enumerate(calls or ()):
        if problem := _call_problem(call, partial=partial):
            return f"{where}.tool_calls[{index}]{problem}"
    return None


def _call_problem(call: Any, *, partial: bool) -> str | None:
    if problem := _mismatch(call, dict, ""):
        return problem
    for key, kind in (("id", str), ("index", int)):
        if problem := _mismatch(call.get(key), kind, f".{key}", optional=True):
            return problem
    # Of any other type than `function`, the object has the name of the type.
    function = call.get("function", call.get(str(call.get("type"))))
    if function is None and partial:
        return None
    if problem := _mismatch(function, dict, ".function"):
        return problem
    # Name and arguments of a whole call are the model's: a backend may decode what it wrote, to any JSON.
    for key in ("name", "arguments") if partial else ():
        if problem := _mismatch(function.get(key), str, f".function.{key}", optional=True):
            return problem
    return None


def _item_problem(item: Any) -> str | None:
    if problem := _mismatch(item, dict, ""):
        return problem
    kind = item.get("type", "message")
    if problem := _mismatch(kind, str, ".type"):
        return problem
    problem_of = _ITEMS.get(kind)
    if problem_of is not None and (problem := problem_of(item)):
        return problem
    for key in TOKEN_KEYS:
        if item.get(key) is not None:
            problem = tokens_problem(item)
            return problem and f": {problem}"
    return None


def _message_item_problem(item: JSON) -> str | None:
    if problem := _mismatch(item.get("role"), str, ".role"):
        return problem
    content = item.get("content")
    if not isinstance(content, str) and (problem := _parts_problem(content)):
        return f".content{problem}"
    return None


def _call_item_problem(item: JSON) -> str | None:
    for key in ("call_id", "arguments"):  # a name is any JSON: see `_call_problem`
        if problem := _mismatch(item.get(key), str, f".{key}"):
            return problem
    return None


def _reasoning_item_problem(item: JSON) -> str | None:
    for key in ("summary", "content"):
        parts = item.get(key)
        if parts is not None and (problem := _parts_problem(parts)):
            return f".{key}{problem}"
    return _mismatch(item.get("encrypted_content"), str, ".encrypted_content", optional=True)


def _parts_problem(parts: Any) -> str | None:
    if not isinstance(parts, list):
        return f" must be a string or a list of parts, got {shown(parts)}"
    for index, part in enumerate(parts):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            return f"[{index}] must be a part, an object with a type, got {shown(part)}"
        for key in ("text", "refusal"):
            if problem := _mismatch(part.get(key), str, f"[{index}].{key}", optional=True):
                return problem
    return None


_NAMES: dict[type, str] = {dict: "an object", list: "a list", str: "a string", int: "an integer"}


def _mismatch(value: Any, kind: type, place: str, *, optional: bool = False) -> str | None:
    if (optional and value is None) or (isinstance(value, kind) and not isinstance(value, bool)):
        return None
    return f"{place} must be {_NAMES[kind]}, got {shown(value)}"


_ITEMS: dict[str, Callable[[JSON], str | None]] = {
    "message": _message_item_problem,
    "function_call": _call_item_problem,
    "reasoning": _reasoning_item_problem,
}


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
    """The chat completion for a Response.

    Args:
        chat: the chat body that it answers; names the model where the response does not.

    Raises:
        Unavailable: the response is a failed one, or none at all.
    """
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

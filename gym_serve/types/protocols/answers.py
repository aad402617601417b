"""Answers of models and agents, checked before anybody is scored by them or they are stored.

A field that is read has the type that its protocol gives it, or the answer is `Unavailable`: a sick endpoint
is nobody's zero. What the model *wrote* is never judged here: any text, any name of a tool and any arguments
are an answer, as a model that could make its answer invalid could turn its own zeros into failures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gym_serve.types.errors import Unavailable
from gym_serve.types.protocols.fields import shown
from gym_serve.types.protocols.tokens import TOKEN_KEYS, tokens_problem
from gym_serve.types.requests import JSON

__all__ = ["check_completion", "check_delta", "check_response"]

_TEXTS = ("refusal", "reasoning_content", "reasoning")
_MESSAGE_KEYS = frozenset({"role", "content", "tool_calls", "function_call", "audio", *_TEXTS})
_COMPLETE = (None, "completed", "incomplete")


def check_completion(completion: Any) -> JSON:
    """The first choice of a chat completion.

    Raises:
        Unavailable: the answer is no chat completion, or its generation was aborted (as engines do
            to running requests when their weights are replaced): a part is not the model's answer.
    """
    choices = completion.get("choices") if isinstance(completion, dict) else None
    if not isinstance(choices, list) or not choices:
        raise Unavailable(f"the backend's answer is no chat completion: {shown(completion)}")
    for index, choice in enumerate(choices):
        if problem := _choice_problem(choice):
            raise Unavailable(f"the backend's answer is no chat completion: choices[{index}]{problem}")
        _check_ended(choice)
    first: JSON = choices[0]
    return first


def check_delta(choice: Any) -> None:
    """Check a choice of a chat stream's chunk.

    Raises:
        Unavailable: it is none, or its generation was aborted.
    """
    problem = _dict_problem(choice)
    if problem is None:
        delta, index = choice.get("delta"), choice.get("index")
        if index is not None and type(index) is not int:
            problem = f".index is no integer: {shown(index)}"
        elif delta is not None:
            problem = _message_problem(delta, ".delta", partial=True)
        problem = problem or _rest_problem(choice)
    if problem:
        raise Unavailable(f"the backend's stream has a choice that is none: choices[]{problem}")
    _check_ended(choice)


def check_response(response: Any, who: str = "the model") -> JSON:
    """``response``, if it is a finished Response.

    Args:
        response: an answer of ``POST /v1/responses``, by a model or by an agent for a whole episode.
        who: answered it, for the error.

    Raises:
        Unavailable: it is none, or it failed.
    """
    output = response.get("output") if isinstance(response, dict) else None
    if not isinstance(output, list):
        raise Unavailable(f"{who} answered no Response object: {shown(response)}")
    if response.get("error") is not None or response.get("status") not in _COMPLETE:
        failed = response.get("error") or response.get("status")
        raise Unavailable(f"{who} answered a response that failed: {shown(failed)}")
    details = response.get("incomplete_details")
    if details is not None and not isinstance(details, dict):
        raise Unavailable(f"{who} answered incomplete_details that are no object: {shown(details)}")
    for index, item in enumerate(output):
        if problem := _item_problem(item):
            raise Unavailable(f"{who} answered no Response object: output[{index}]{problem}")
    whole: JSON = response
    return whole


def _check_ended(choice: JSON) -> None:
    if choice.get("finish_reason") in ("abort", "error"):
        raise Unavailable(f"the backend gave the generation up (finish_reason {choice['finish_reason']!r})")


# Each function below gives the place of the first problem and says what it is; None for none.


def _choice_problem(choice: Any) -> str | None:
    if problem := _dict_problem(choice):
        return problem
    message = choice.get("message")
    if isinstance(message, dict) and not message.keys() & _MESSAGE_KEYS:
        return f".message is empty: {shown(message)}"
    return _message_problem(message, ".message") or _rest_problem(choice)


def _rest_problem(choice: JSON) -> str | None:
    """Of what a choice has beside its message."""
    reason, logprobs = choice.get("finish_reason"), choice.get("logprobs")
    if reason is not None and not isinstance(reason, str):
        return f".finish_reason is no text: {shown(reason)}"
    if logprobs is None:
        return None
    if not isinstance(logprobs, dict):
        return f".logprobs is no object: {shown(logprobs)}"
    for key in ("content", "refusal"):
        entries = logprobs.get(key)
        if entries is not None and not _are_objects(entries):
            return f".logprobs.{key} is no list of objects: {shown(entries)}"
    return None


def _message_problem(message: Any, where: str, *, partial: bool = False) -> str | None:
    """
    Args:
        partial: whether it is a part of a message, whose calls need not be whole.
    """
    if not isinstance(message, dict):
        return f"{where} is no object: {shown(message)}"
    content = message.get("content")
    if content is not None and not isinstance(content, str) and (problem := _parts_problem(content)):
        return f"{where}.content{problem}"
    for key in _TEXTS:
        text = message.get(key)
        if text is not None and not isinstance(text, str):
            return f"{where}.{key} is no text: {shown(text)}"
    calls = message.get("tool_calls")
    if calls is None:
        return None
    if not isinstance(calls, list):
        return f"{where}.tool_calls is no list: {shown(calls)}"
    for index, call in enumerate(calls):
        if problem := _call_problem(call, partial=partial):
            return f"{where}.tool_calls[{index}]{problem}"
    return None


def _call_problem(call: Any, *, partial: bool) -> str | None:
    if not isinstance(call, dict):
        return f" is no object: {shown(call)}"
    if not isinstance(call.get("id"), str | None):
        return f".id is no text: {shown(call['id'])}"
    index = call.get("index")
    if index is not None and type(index) is not int:
        return f".index is no integer: {shown(index)}"
    # Of any other type than `function`, the object has the name of the type.
    function = call.get("function", call.get(str(call.get("type"))))
    if function is None and partial:
        return None
    if not isinstance(function, dict):
        return f".function is no object: {shown(function)}"
    # Name and arguments of a whole call are the model's: a backend may decode what it wrote, to any JSON.
    for key in ("name", "arguments") if partial else ():
        if not isinstance(function.get(key), str | None):
            return f".function.{key} is no text: {shown(function[key])}"
    return None


def _item_problem(item: Any) -> str | None:
    if not isinstance(item, dict):
        return f" is no object: {shown(item)}"
    kind = item.get("type", "message")
    if not isinstance(kind, str):
        return f".type is no text: {shown(kind)}"
    problem_of = _ITEMS.get(kind)
    if problem_of is not None and (problem := problem_of(item)):
        return problem
    for key in TOKEN_KEYS:
        if item.get(key) is not None:
            problem = tokens_problem(item)
            return problem and f": {problem}"
    return None


def _message_item_problem(item: JSON) -> str | None:
    if not isinstance(item.get("role"), str):
        return f".role is no text: {shown(item.get('role'))}"
    content = item.get("content")
    if not isinstance(content, str) and (problem := _parts_problem(content)):
        return f".content{problem}"
    return None


def _call_item_problem(item: JSON) -> str | None:
    for key in ("call_id", "arguments"):  # a name is any JSON: see `_call_problem`
        if not isinstance(item.get(key), str):
            return f".{key} is no text: {shown(item.get(key))}"
    return None


def _reasoning_item_problem(item: JSON) -> str | None:
    for key in ("summary", "content"):
        parts = item.get(key)
        if parts is not None and (problem := _parts_problem(parts)):
            return f".{key}{problem}"
    signature = item.get("encrypted_content")
    if signature is not None and not isinstance(signature, str):
        return f".encrypted_content is no text: {shown(signature)}"
    return None


def _parts_problem(parts: Any) -> str | None:
    if not isinstance(parts, list):
        return f" is neither a text nor a list of parts: {shown(parts)}"
    for index, part in enumerate(parts):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            return f"[{index}] is no part: {shown(part)}"
        for key in ("text", "refusal"):
            text = part.get(key)
            if text is not None and not isinstance(text, str):
                return f"[{index}].{key} is no text: {shown(text)}"
    return None


def _dict_problem(value: Any) -> str | None:
    return None if isinstance(value, dict) else f" is no object: {shown(value)}"


def _are_objects(values: Any) -> bool:
    return isinstance(values, list) and set(map(type, values)) <= {dict}


_ITEMS: dict[str, Callable[[JSON], str | None]] = {
    "message": _message_item_problem,
    "function_call": _call_item_problem,
    "reasoning": _reasoning_item_problem,
}

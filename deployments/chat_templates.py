"""Conversations as tokens, by the chat template of a tokenizer of ``transformers``; answers from tokens."""

from __future__ import annotations

from inspect import signature
from typing import Any

from gym_serve.types.errors import BadRequest
from gym_serve.types.exact import exact_json
from gym_serve.types.requests import JSON

_OF_THE_ROW = frozenset({"add_generation_prompt", "continue_final_message", "documents"})
"""Arguments of `apply_chat_template` that a request may set."""
_TEXTS = ("text", "refusal", "input_text", "output_text", None)


def render(tokenizer: Any, chat: JSON, messages: list[JSON]) -> list[int]:
    """Tokens of a conversation by the model's template, with the opening of the next turn. Raises BadRequest:
    the template refuses it, there is none, or a message has media.
    """
    arguments = chat.get("chat_template_kwargs") or {}
    # What is no variable of a template, but decides what its rendering does; another template among them.
    taken = (signature(tokenizer.apply_chat_template).parameters.keys() - _OF_THE_ROW) & arguments.keys()
    if taken:
        raise BadRequest(f"chat_template_kwargs: {', '.join(sorted(taken))} cannot be set by a request")
    plain = [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]
    try:
        text = tokenizer.apply_chat_template(
            plain, tools=chat.get("tools"), tokenize=False, **{"add_generation_prompt": True, **arguments}
        )
    except Exception as error:  # a template is code of the model's author, and may raise anything
        raise BadRequest(f"the chat template refuses this: {type(error).__name__}: {error}") from None
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def may_call(chat: JSON) -> bool:
    """Whether the answer to this body may call tools."""
    return bool(chat.get("tools")) and chat.get("tool_choice") != "none"


def entries(tokenizer: Any, tokens: list[int], log_probs: list[float]) -> list[JSON]:
    """The ``logprobs.content`` of a choice."""
    names = tokenizer.convert_ids_to_tokens(tokens)
    return [
        {"token": name, "logprob": log_prob, "bytes": None, "top_logprobs": []}
        for name, log_prob in zip(names, log_probs, strict=True)
    ]


def completion(
    head: JSON, prompt: list[int], said: tuple[str, list[JSON]], finish: str, scores: JSON
) -> JSON:
    """A chat completion of one choice: ``said`` is a text and calls; ``scores`` are fields of the choice,
    ``token_ids`` among them.
    """
    text, calls = said
    message: JSON = {"role": "assistant", "content": text or (None if calls else "")}
    choice = {
        "index": 0,
        "message": {**message, "tool_calls": calls} if calls else message,
        "finish_reason": "tool_calls" if calls and finish == "stop" else finish,
        **scores,
    }
    read, written = len(prompt), len(scores["token_ids"])
    usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    return {
        **head,
        "object": "chat.completion",
        "choices": [choice],
        "prompt_token_ids": prompt,
        "usage": usage,
    }


def _plain(message: JSON, where: str) -> JSON:
    """A message as templates want it: text as a string, arguments of calls as objects."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]
        if media := next((p.get("type") for p in parts if p.get("type") not in _TEXTS), None):
            raise BadRequest(f"{where}: this model reads text only, got a part of type {str(media)[:40]!r}")
        content = "".join(str(part.get("text") or part.get("refusal") or "") for part in parts)
    plain = {**message, "content": content}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [{**c, "function": _decoded(c["function"])} for c in calls]
    return plain


def _decoded(function: JSON) -> JSON:
    try:
        arguments = exact_json(function.get("arguments") or "{}")
    except ValueError:
        return function
    return {**function, "arguments": arguments} if isinstance(arguments, dict) else function

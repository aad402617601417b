"""Log probabilities of an answer's tokens: of a chat choice, and of the text of a Responses message.

Chat has one list for all tokens of a choice. In Responses it stands on the text; the backends whose list
also covers reasoning and tool calls are not second-guessed: the whole list stands on the first text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gym_serve.types.errors import Unavailable
from gym_serve.types.protocols.fields import shown
from gym_serve.types.requests import JSON

__all__ = [
    "LOGPROBS",
    "add_logprobs",
    "answer_logprobs",
    "asks_for_logprobs",
    "choice_logprobs",
    "includes_logprobs",
]

_NUMBERS = {float, int, type(None)}

LOGPROBS = "message.output_text.logprobs"
"""What ``include`` of a Responses body has to hold."""


def asks_for_logprobs(params: Mapping[str, Any]) -> bool:
    """Whether a Responses body asks for log probabilities."""
    return bool(params.get("top_logprobs")) or includes_logprobs(params)


def includes_logprobs(params: Mapping[str, Any]) -> bool:
    """Whether it asks for them by ``include``."""
    include = params.get("include")
    return isinstance(include, list) and LOGPROBS in include


def choice_logprobs(logprobs: Any) -> list[JSON]:
    """The entries of a chat choice's ``logprobs``; empty without any.

    Raises:
        Unavailable: one has a log probability that is no number.
    """
    entries = logprobs.get("content") if isinstance(logprobs, dict) else None
    found = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    if not {type(entry.get("logprob")) for entry in found} <= _NUMBERS:
        raise Unavailable(f"the backend's answer has log probabilities that are no numbers: {shown(found)}")
    return found


def add_logprobs(output: list[JSON], logprobs: Any) -> None:
    """Put a chat choice's ``logprobs`` on the first text of the output items made of it."""
    entries = choice_logprobs(logprobs)
    texts = (part for item in output if item["type"] == "message" for part in item["content"])
    text = next((part for part in texts if part["type"] == "output_text"), None)
    if entries and text is not None:
        text["logprobs"] = [*text.get("logprobs", ()), *entries]


def answer_logprobs(answer: list[Any]) -> JSON | None:
    """A chat choice's ``logprobs`` for the items of an answer; None where they have none."""
    found: list[JSON] = []
    for item in answer:
        content = item.get("content") if isinstance(item, dict) else None
        for part in content if isinstance(content, list) else ():
            entries = part.get("logprobs") if isinstance(part, dict) else None
            found += choice_logprobs({"content": entries})
    return {"content": found, "refusal": None} if found else None

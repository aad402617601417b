"""Asking a pooling model for one number, and reading it: bodies and answers of vLLM's two routes.

Source: https://docs.vllm.ai/en/latest/models/pooling_models/ (0.11 to 0.33).
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from gym_serve.types.errors import VerifierFailed
from gym_serve.types.protocols import responses_to_chat
from gym_serve.types.requests import JSON, Response, input_items

__all__ = ["Conversation", "Head", "Score", "conversation_of", "read_score", "scoring_request"]

Head = Literal["scalar", "classes"]
"""What the model has at its end: one number, or the probabilities of classes."""

Conversation = Literal["answer", "episode"]
"""What the model is shown after the prompt: the last message, or everything with calls and their outputs."""


class Score(NamedTuple):
    """What a model says of a conversation.

    Attributes:
        value: the number that counts: the raw score, or the probability of the class that is meant.
        label: the most probable class; None for a scalar head.
    """

    value: float
    label: str | None


def conversation_of(params: JSON, output: list[JSON], conversation: Conversation) -> list[JSON]:
    """The chat messages to score. Reasoning is left out: reward models have not learned from it.

    Args:
        params: Responses body of the row.
        output: items of the response.
        conversation: how much of them is shown.

    Raises:
        BadRequest: they hold something that a chat cannot.
    """
    items = input_items(params.get("input") or [])
    body = {
        "input": items if conversation == "answer" else [*items, *output],
        "instructions": params.get("instructions"),
    }
    chat: list[JSON] = responses_to_chat(body, reasoning="drop")["messages"]
    if conversation == "answer":
        chat.append({"role": "assistant", "content": Response(output=output).last_text})
    return chat


def scoring_request(messages: list[JSON], head: Head, *, sigmoid: bool) -> JSON:
    """The body for ``/pooling`` (scalar) or ``/classify`` (classes)."""
    body: JSON = {"messages": messages, "add_generation_prompt": False}
    return {**body, "task": "classify", "use_activation": sigmoid} if head == "scalar" else body


def read_score(answer: JSON, head: Head, class_index: int) -> Score:
    """The score in an answer.

    Args:
        answer: of the route that `scoring_request` is for.
        head: what the model has.
        class_index: the class that is meant, from 0.

    Raises:
        VerifierFailed: there is none: another head, another class count, or no finite number.
    """
    data = answer.get("data") if isinstance(answer, dict) else None
    entry = data[0] if isinstance(data, list) and data and isinstance(data[0], dict) else {}
    values = entry.get("data" if head == "scalar" else "probs")
    if not isinstance(values, list):
        raise VerifierFailed(f"the reward model gave no scores: {str(answer)[:200]}")
    if head == "scalar" and len(values) != 1:
        raise VerifierFailed(f"the reward model has {len(values)} outputs, where a scalar head has one")
    if head == "classes" and class_index >= len(values):
        raise VerifierFailed(f"the reward model has {len(values)} classes, so none of index {class_index}")
    value = values[0 if head == "scalar" else class_index]
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise VerifierFailed(f"the reward model's score is no finite number: {str(value)[:50]}")
    label = entry.get("label") if head == "classes" else None
    return Score(float(value), label if isinstance(label, str) else None)

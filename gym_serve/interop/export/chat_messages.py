"""A rollout as chat messages: each text, reasoning block, call and tool output keeps its place.

Two things at the end of an episode cannot teach anything and are cut for trainers: tool outputs that no model
turn has seen, and empty assistant turns.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import orjson

from gym_serve.training.rollout import Bundle, NotExportable, Rollout, read_bundle
from gym_serve.types import timeline
from gym_serve.types.errors import BadRequest
from gym_serve.types.protocols import ReasoningForm, responses_to_chat
from gym_serve.types.protocols.items import chat_tools
from gym_serve.types.requests import JSON

ArgumentsForm = Literal["string", "object"]
"""Arguments of tool calls as OpenAI writes them, or decoded, as chat templates want them."""


@dataclass(frozen=True)
class Conversation:
    """A rollout for a trainer that renders chat templates."""

    prompt: list[JSON]
    completion: list[JSON]  # everything after the prompt; it ends with an assistant message
    tools: list[JSON]

    @property
    def messages(self) -> list[JSON]:
        return self.prompt + self.completion


@dataclass(frozen=True)
class Step:
    """One message of the episode; an assistant's is one model call."""

    message: JSON
    tokens: Bundle | None = None
    call: timeline.Step | None = None  # when and where the model call ran, if the rollout tells


def conversation(
    rollout: Rollout, *, reasoning: ReasoningForm = "field", arguments: ArgumentsForm = "string"
) -> Conversation:
    """A rollout as prompt and completion; ``reasoning`` and ``arguments`` as in ``chat_data``. Raises
    NotExportable: it has an item that chat has no form for, or no answer.
    """
    completion = _chat({"input": rollout.output[rollout.context :]}, "response.output", reasoning)
    while completion and _teaches_nothing(completion[-1]):
        completion.pop()
    if not completion:
        raise NotExportable("no_answer", "the model's answer is empty")
    chat = Conversation(prompt_messages(rollout, reasoning=reasoning), completion, tools_of(rollout))
    if arguments == "object":
        for message in chat.messages:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = decoded_arguments(call["function"]["arguments"])
    return chat


def prompt_messages(rollout: Rollout, *, reasoning: ReasoningForm = "field") -> list[JSON]:
    """The instructions and input, and what else was there before the model's first own turn. Raises
    NotExportable: an item that chat has no form for, or no message at all.
    """
    params = {key: rollout.params.get(key) for key in ("input", "instructions")}
    messages = _chat(params, "responses_create_params", reasoning)
    if not messages:
        raise NotExportable("no_prompt", "the input is empty")
    context = {"input": rollout.output[: rollout.context]}
    return messages + (_chat(context, "response.output", reasoning) if rollout.context else [])


def steps(rollout: Rollout) -> list[Step]:
    """The episode, message by message, all of it that is not in `prompt_messages`. An assistant message ends
    where its model call did. Raises NotExportable: an item that chat has no form for, or malformed tokens.
    """
    all_steps: list[Step] = []
    turn: list[JSON] = []

    def close(bundle: Bundle | None = None) -> None:
        messages = _chat({"input": turn}, "response.output", "field")
        all_steps.extend(Step(message, bundle) for message in messages)
        turn.clear()

    for i, item in enumerate(rollout.output[rollout.context :], rollout.context):
        if not _is_assistants(item):
            close()
            all_steps.extend(map(Step, _chat({"input": [item]}, f"response.output from item {i}", "field")))
            continue
        turn.append(item)
        if (bundle := read_bundle(item, f"response.output[{i}]")) is not None:
            close(bundle)
    close()
    return _with_calls(all_steps, rollout)


def _with_calls(all_steps: list[Step], rollout: Rollout) -> list[Step]:
    """The steps with their calls of the timeline, if these can only belong to them."""
    turns = [i for i, step in enumerate(all_steps) if step.message["role"] == "assistant"]
    calls = model_calls(rollout)
    if len(calls) == len(turns) and not (rollout.branch or rollout.raw.get("branches")):
        for i, call in zip(turns, calls, strict=True):
            all_steps[i] = replace(all_steps[i], call=call)
    return all_steps


def model_calls(rollout: Rollout) -> list[timeline.Step]:
    """The calls of the policy that were answered, in their order."""
    made = [] if rollout.timeline is None else rollout.timeline.steps
    return [step for step in made if step.kind == "model" and step.stage is None and step.status < 400]


def tools_of(rollout: Rollout) -> list[JSON]:
    """The row's tools as chat has them. Raises NotExportable: a tool is not a function."""
    try:
        return chat_tools(rollout.params.get("tools") or [])
    except BadRequest as error:
        raise NotExportable("unsupported_tool", error.message) from None


def answer_of(rollout: Rollout, key: str) -> str | None:
    """The right answer, under a key of the row; JSON unless it is a text."""
    answer = rollout.raw.get(key)
    return answer if answer is None or isinstance(answer, str) else orjson.dumps(answer).decode()


def decoded_arguments(arguments: str) -> Any:
    """The JSON object in the text of a call's arguments, or the text where that would lose something."""
    try:
        value = json.loads(
            arguments, parse_float=_finite, parse_constant=_finite, object_pairs_hook=_without_duplicates
        )
        orjson.dumps(value)  # no lone surrogate, no integer beyond 64 bits
    except (ValueError, TypeError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("not a finite number")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> JSON:
    if len(mapping := dict(pairs)) < len(pairs):
        raise ValueError("a key is repeated")
    return mapping


def _chat(params: JSON, what: str, reasoning: ReasoningForm) -> list[JSON]:
    try:
        messages: list[JSON] = responses_to_chat(params, reasoning=reasoning)["messages"]
    except BadRequest as error:
        raise NotExportable("unsupported_item", f"{what}: {error.message}") from None
    for message in messages:
        message.pop("reasoning", None)  # the same text as reasoning_content
        message["content"] = _plain(message["content"], what)
        if message["content"] is None and not message.get("tool_calls"):
            message["content"] = ""
    return messages


def _plain(content: Any, what: str) -> Any:
    """Content as a string where it is all text, refusals included: many chat templates take nothing else."""
    if not isinstance(content, list):
        return content
    texts = [part[part["type"]] for part in content if part["type"] in ("text", "refusal")]
    if not all(isinstance(text, str) for text in texts):
        raise NotExportable("unsupported_item", f"{what}: the text of a text part must be a string")
    return "".join(texts) if len(texts) == len(content) else content


def _is_assistants(item: JSON) -> bool:
    kind = item.get("type") or "message"
    return kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant")


def _teaches_nothing(message: JSON) -> bool:
    keys = ("content", "tool_calls", "reasoning_content")
    return message["role"] != "assistant" or not any(message.get(key) for key in keys)


_PLACEHOLDERS = ("<image>", "<video>", "<audio>")


def with_placeholders(messages: list[JSON], *, strict: bool = False) -> tuple[list[JSON], list[str]]:
    """The messages with text content only, and the URLs of their images in order, as verl and OpenRLHF take
    them. Raises NotExportable: other media, or a text that spells a placeholder (also without images if
    ``strict``).
    """
    images: list[str] = []
    texts: list[JSON] = []
    sayings: list[str] = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, list):
            sayings.append(content or "")
            texts.append(message)
            continue
        pieces: list[str] = []
        for part in content:
            if part["type"] == "image_url":
                images.append(part["image_url"]["url"])
                pieces.append("<image>")
            elif part["type"] == "text":
                pieces.append(part["text"])
                sayings.append(part["text"])
            else:
                raise NotExportable("media", f"this format has no form for a part of type {part['type']!r}")
        texts.append({**message, "content": "".join(pieces) if content else content})
    if (images or strict) and any(mark in text for text in sayings for mark in _PLACEHOLDERS):
        raise NotExportable("placeholder", f"a text spells {' or '.join(_PLACEHOLDERS)}: images would shift")
    return texts, images


def require_text(messages: list[JSON]) -> None:
    """Refuse media, for formats that hold none. Raises NotExportable: a part is not text."""
    if any(isinstance(message["content"], list) for message in messages):
        raise NotExportable("media", "this format has no form for images and other media")

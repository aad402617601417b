"""A rollout as chat messages: each text, reasoning block, call and tool output keeps its place.

Two things at the end of an episode cannot teach anything and are cut for trainers: tool outputs that no model
turn has seen, and empty assistant turns.

Chat messages for fine-tuning: SFT, OpenRLHF and TRL. Failed and masked rollouts are left out.

**sft**: OpenAI's fine-tuning format, a line ``{"messages", "tools", "reward"}`` for each conversation of a
rollout, as OpenAI, Axolotl, LLaMA-Factory and NeMo RL read it. Arguments of tool calls are strings: loaders
that give a file one schema would fill decoded ones with nulls.

**openrlhf**: Parquet for its `PromptDataset` (RL) and `SFTDataset`; both need ``--data.apply_chat_template``.
Not JSON Lines, whose loader guesses the types of columns from the first lines.

**trl**: Parquet whose messages and tools are columns of Arrow's JSON type (`Json` of datasets >= 4.7): no
message gets null keys. A completion of several turns holds tool outputs: train with
``assistant_only_loss=True``.

Options: ``reasoning`` of the model is written as ``reasoning_content`` (``field``), as ``<think>`` tags in
the content (``think_tags``), or not at all (``drop``). ``arguments`` of calls are a ``string``, or the
``object`` that many chat templates want. ``label`` is the key of the row that holds the answer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import orjson

from gym_serve.interop.export.files import ExportReport, Seen, each, message_list, pyarrow
from gym_serve.training.rollout import Bundle, NotExportable, Rollout, read_bundle
from gym_serve.training.samples import sample_of
from gym_serve.types import timeline
from gym_serve.types.errors import BadRequest
from gym_serve.types.exact import exact_bytes
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
    return answer if answer is None or isinstance(answer, str) else exact_bytes(answer).decode()


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


def sft_record(
    rollout: Rollout, *, reasoning: ReasoningForm = "field", arguments: ArgumentsForm = "string"
) -> JSON:
    """A rollout as one training conversation; it ends with an assistant message.

    NeMo RL reads ``arguments="object"`` with ``use_preserving_dataset: true``.
    """
    rollout.require_trainable()
    chat = conversation(rollout, reasoning=reasoning, arguments=arguments)
    record: JSON = {"messages": chat.messages}
    if chat.tools:
        record["tools"] = chat.tools
    return {**record, "reward": rollout.reward}


_MESSAGES = ("prompt", "messages")


def openrlhf_rollout(
    rollout: Rollout, *, reasoning: ReasoningForm = "field", label: str = "expected_answer"
) -> JSON:
    """A rollout as a row."""
    rollout.require_trainable()
    chat = conversation(rollout, reasoning=reasoning)
    # OpenRLHF takes every "<image>" of a prompt for an image.
    prompt, images = with_placeholders(chat.prompt, strict=True)
    messages, all_images = with_placeholders(chat.messages)
    if images != all_images:
        raise NotExportable("media", "OpenRLHF has images in prompts only")
    return {
        "prompt": prompt,
        "messages": messages,
        "label": answer_of(rollout, label) or "",
        "datasource": rollout.agent,
        "images": images,
        "reward": rollout.reward,
        "tools": chat.tools,
    }


def openrlhf_schema(contents: Seen, report: ExportReport) -> Any:
    """The Arrow schema for the columns that the records have."""
    pa = pyarrow()
    if "tools" in contents.filled:
        report.notes.append(
            "the tools are not in the file: OpenRLHF renders its chat templates without tools; "
            "describe them in the row's instructions"
        )
    types = {name: message_list(contents.keys[name]) for name in _MESSAGES}
    types |= {"reward": pa.float64(), "images": pa.list_(pa.string())}
    absent = {"tools"} if "images" in contents.filled else {"tools", "images"}
    return pa.schema({name: types.get(name, pa.string()) for name in contents.columns if name not in absent})


_JSON_LISTS = ("prompt", "completion", "tools")
_COMPLETION = (*_JSON_LISTS, "reward")


def trl_completion(rollout: Rollout, *, reasoning: ReasoningForm = "field") -> JSON:
    """A rollout as a conversational prompt-completion example."""
    rollout.require_trainable()
    chat = conversation(rollout, reasoning=reasoning, arguments="object")
    require_text(chat.messages)
    example = {"prompt": chat.prompt, "completion": chat.completion, "tools": chat.tools or None}
    return {**example, "reward": rollout.reward}


def trl_tokens(rollout: Rollout) -> JSON:
    """A rollout as a tokenized example; ``assistant_masks`` is 1 on what the model produced."""
    rollout.require_trainable()
    sample = sample_of(rollout)
    start = len(sample.prompt_ids)
    return {
        "input_ids": sample.input_ids,
        "assistant_masks": [0] * start + sample.loss_mask,
        "logprobs": [0.0] * start + sample.logprobs,
        "reward": sample.reward,
    }


def trl_records(
    rollouts: Iterable[Rollout],
    report: ExportReport,
    *,
    kind: Literal["completion", "tokens"] = "completion",
    reasoning: ReasoningForm = "field",
) -> Iterator[JSON]:
    """The examples of a data set for TRL."""
    if kind == "tokens":
        yield from each(trl_tokens)(rollouts, report)
    else:
        yield from map(_encoded, each(trl_completion)(rollouts, report, reasoning=reasoning))


def trl_schema(contents: Seen, report: ExportReport) -> Any:
    """The Arrow schema for the columns that the records have."""
    pa = pyarrow()
    types = {name: pa.list_(pa.json_()) for name in _JSON_LISTS}
    types |= {"input_ids": pa.list_(pa.int32()), "assistant_masks": pa.list_(pa.int8())}
    types |= {"logprobs": pa.list_(pa.float64()), "reward": pa.float64()}
    return pa.schema({name: types.get(name, pa.string()) for name in contents.columns or _COMPLETION})


def _encoded(record: JSON) -> JSON:
    lists = {name: record[name] for name in _JSON_LISTS if record.get(name)}
    return {**record, **{name: [exact_bytes(v).decode() for v in values] for name, values in lists.items()}}

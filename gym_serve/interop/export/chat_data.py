"""Chat messages for fine-tuning: SFT, OpenRLHF and TRL. Failed and masked rollouts are left out.

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

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import orjson

from gym_serve.interop.export.accounting import ExportReport, each
from gym_serve.interop.export.chat_messages import (
    ArgumentsForm,
    answer_of,
    conversation,
    require_text,
    with_placeholders,
)
from gym_serve.interop.export.files import Seen, message_list, pyarrow
from gym_serve.training.rollout import NotExportable, Rollout
from gym_serve.training.samples import sample_of
from gym_serve.types.protocols import ReasoningForm
from gym_serve.types.requests import JSON


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
    return {**record, **{name: [orjson.dumps(v).decode() for v in values] for name, values in lists.items()}}

"""Chat messages for fine-tuning: SFT, DPO, OpenRLHF and TRL.

Failed and masked rollouts are left out, because these formats have no mask for a sample. Each conversation of
a harness's rollout is an example of its own, with the reward of the whole. Pairs are made of the
conversations that were verified: a reward of the whole does not compare its branches.

**sft**: OpenAI's fine-tuning format, one conversation a line, ``{"messages", "tools", "reward"}``, as OpenAI,
Axolotl, LLaMA-Factory and NeMo RL (``dataset_name: openai_format``) read it. Arguments of tool calls are
strings, as OpenAI has them: loaders that give a file one schema would fill decoded ones with nulls for the
keys of other tools.

**dpo**: ``{"prompt", "chosen", "rejected", "tools"?, ...}`` with lists of messages, one pair a line: the
conversational preference format of TRL, Axolotl and others.

**openrlhf**: Parquet for its `PromptDataset` (RL), `SFTDataset` and `RewardDataset` (DPO, reward models).
``kind="rollouts"`` has a row a rollout. RL: ``--data.input_key prompt --data.label_key label``; the reward
function gets ``datasource`` and ``label``. SFT: ``--data.input_key messages --data.multiturn``, which puts
the loss on the assistant's turns alone. ``kind="preference"`` has a row a task: ``--data.prompt_key prompt
--data.chosen_key chosen --data.rejected_key rejected``. All need ``--data.apply_chat_template``. Parquet
instead of JSON Lines, because a loader of JSON guesses the types of columns from the first lines, which may
have no tool calls.

**trl**: Parquet that `datasets` loads with exactly the messages that were written. Messages and tools are
columns of Arrow's JSON type, the `Json` feature of datasets >= 4.7 (which TRL needs as well): no message gets
null keys, and arguments of calls are objects, as chat templates expect them. `load_dataset("parquet",
data_files=...)` of three kinds:

    completion   prompt, completion, tools, reward              SFTTrainer
    preference   prompt, chosen, rejected, tools, rewards       DPOTrainer
    tokens       input_ids, assistant_masks, logprobs, reward   SFTTrainer, on the model's own tokens

A completion of several turns holds tool outputs: train on it with ``assistant_only_loss=True``, because the
default loss is on the whole completion.

Options of several formats: ``reasoning`` of the model is written as ``reasoning_content`` (``field``), as
``<think>`` tags in the content (``think_tags``), or not at all (``drop``). ``arguments`` of tool calls are
OpenAI's ``string``, or the ``object`` that many chat templates want. The rewards of a pair differ by more
than ``margin``. ``label`` is the key of the row that holds the answer.

A function of one rollout raises `NotExportable` if it failed, is masked, or has no form in the format.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Literal

import orjson

from gym_serve.interop.export.conversation import (
    ArgumentsForm,
    answer_of,
    conversation,
    require_text,
    with_placeholders,
)
from gym_serve.interop.export.files import Seen, message_list, pyarrow
from gym_serve.interop.export.report import ExportReport, each, preference_pairs
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


def dpo_records(
    rollouts: Iterable[Rollout],
    report: ExportReport,
    *,
    margin: float = 0.0,
    reasoning: ReasoningForm = "field",
    arguments: ArgumentsForm = "string",
) -> Iterator[JSON]:
    """Each task's best rollout against its worst."""
    candidate = partial(_example, reasoning=reasoning, arguments=arguments)
    return preference_pairs(rollouts, report, candidate, margin=margin)


_MESSAGES = ("prompt", "messages", "chosen", "rejected")
_REWARDS = ("reward", "chosen_reward", "rejected_reward")


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


def openrlhf_records(
    rollouts: Iterable[Rollout],
    report: ExportReport,
    *,
    kind: Literal["rollouts", "preference"] = "rollouts",
    reasoning: ReasoningForm = "field",
    label: str = "expected_answer",
    margin: float = 0.0,
) -> Iterator[JSON]:
    """The rows of a data set for OpenRLHF; ``label`` is for ``rollouts``, ``margin`` for ``preference``."""
    if kind == "rollouts":
        yield from each(openrlhf_rollout)(rollouts, report, reasoning=reasoning, label=label)
    else:
        candidate = partial(_example, reasoning=reasoning, is_text=True)
        yield from preference_pairs(rollouts, report, candidate, margin=margin)


def openrlhf_schema(seen: Seen, report: ExportReport) -> Any:
    """The Arrow schema for the columns that the records have."""
    pa = pyarrow()
    if "tools" in seen.filled:
        report.notes.append(
            "the tools are not in the file: OpenRLHF renders its chat templates without tools; "
            "describe them in the row's instructions"
        )
    types = {name: message_list(seen.keys[name]) for name in _MESSAGES}
    types |= {name: pa.float64() for name in _REWARDS}
    types["images"] = pa.list_(pa.string())
    absent = {"tools"} if "images" in seen.filled else {"tools", "images"}
    return pa.schema({name: types.get(name, pa.string()) for name in seen.columns if name not in absent})


def _example(
    rollout: Rollout, reasoning: ReasoningForm, arguments: ArgumentsForm = "string", *, is_text: bool = False
) -> JSON:
    """``{"prompt", "completion", "tools", "reward"}``; with ``is_text``, media are refused."""
    rollout.require_trainable()
    chat = conversation(rollout, reasoning=reasoning, arguments=arguments)
    if is_text:
        require_text(chat.messages)
    made = {"prompt": chat.prompt, "completion": chat.completion, "tools": chat.tools}
    return {**made, "reward": rollout.reward}


_JSON_LISTS = ("prompt", "completion", "chosen", "rejected", "tools")
_COMPLETION = ("prompt", "completion", "tools", "reward")


def trl_completion(rollout: Rollout, *, reasoning: ReasoningForm = "field") -> JSON:
    """A rollout as a conversational prompt-completion example."""
    example = _example(rollout, reasoning, "object", is_text=True)
    return {**example, "tools": example["tools"] or None}


def trl_tokens(rollout: Rollout) -> JSON:
    """A rollout as a tokenized example; ``assistant_masks`` is 1 on what the model produced."""
    rollout.require_trainable()
    sample = sample_of(rollout)
    given = len(sample.prompt_ids)
    return {
        "input_ids": sample.input_ids,
        "assistant_masks": [0] * given + sample.loss_mask,
        "logprobs": [0.0] * given + sample.logprobs,
        "reward": sample.reward,
    }


def trl_records(
    rollouts: Iterable[Rollout],
    report: ExportReport,
    *,
    kind: Literal["completion", "preference", "tokens"] = "completion",
    reasoning: ReasoningForm = "field",
    margin: float = 0.0,
) -> Iterator[JSON]:
    """The examples of a data set for TRL; ``margin`` is for ``preference``."""
    if kind == "tokens":
        yield from each(trl_tokens)(rollouts, report)
    elif kind == "completion":
        yield from map(_encoded, each(trl_completion)(rollouts, report, reasoning=reasoning))
    else:
        candidate = partial(trl_completion, reasoning=reasoning)
        yield from map(_encoded, preference_pairs(rollouts, report, candidate, margin=margin))


def trl_schema(seen: Seen, report: ExportReport) -> Any:
    """The Arrow schema for the columns that the records have."""
    pa = pyarrow()
    types = {name: pa.list_(pa.json_()) for name in _JSON_LISTS}
    types |= {"input_ids": pa.list_(pa.int32()), "assistant_masks": pa.list_(pa.int8())}
    types |= {"logprobs": pa.list_(pa.float64())}
    types |= {name: pa.float64() for name in _REWARDS}
    return pa.schema({name: types.get(name, pa.string()) for name in seen.columns or _COMPLETION})


def _encoded(record: JSON) -> JSON:
    lists = {name: record[name] for name in _JSON_LISTS if record.get(name)}
    return {**record, **{name: [orjson.dumps(v).decode() for v in values] for name, values in lists.items()}}

"""Training tokens with their log-probabilities, for verl and NeMo RL. Each conversation is a record.

**nemo_rl**: the result of NeMo RL's NeMo Gym environment (docs/formats.md, What trainers read) as JSON Lines,
with lists instead of tensors, beside the further keys of its GRPO batch. ``branch`` is 0 for the conversation
that was verified. A masked rollout stays, with ``loss_multiplier`` 0: NeMo RL keeps it out of the loss, but
counts its reward in the group's baseline.

**verl**: Parquet that its `RLHFDataset` and `MultiTurnSFTDataset` read. ``rollout`` holds the fields of its
`AgentLoopOutput` if there are training tokens. Failed and masked rollouts are left out, because neither
reader has a mask. ``tools`` is a column only if Arrow can hold it without adding a null to a schema.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from gym_serve.interop.export.chat_messages import answer_of, conversation, prompt_messages, with_placeholders
from gym_serve.interop.export.files import ExportReport, Seen, each, exact_type, message_list, pyarrow, whole
from gym_serve.training.rollout import NotExportable, Rollout, token_turns
from gym_serve.training.samples import sample_of
from gym_serve.types.exact import exact_bytes
from gym_serve.types.protocols import TOKEN_KEYS, ReasoningForm
from gym_serve.types.requests import JSON


def nemo_rl_record(rollout: Rollout) -> JSON:
    """A rollout, or a branch of one, as NeMo RL's result. Raises NotExportable: it has no usable tokens, or
    no reward.
    """
    try:
        turns = token_turns(rollout)
    except NotExportable as error:
        if error.reason == "no_tokens":
            rollout.require_trainable()  # why it has none
        raise
    log: list[JSON] = []
    for turn in turns:
        log.append({"role": "user", "content": "", "token_ids": turn.prompt})
        generated = {"token_ids": turn.generation, "generation_logprobs": turn.logprobs}
        log.append({"role": "assistant", "content": "", **generated})
    output = [_without_logged_tokens(item) for item in rollout.output]
    raw = {key: value for key, value in rollout.raw.items() if key != "branches"}  # lines of their own
    record: JSON = {
        "message_log": log,
        "input_message_log": log[:1],
        "full_result": {**raw, "response": {**rollout.response, "output": output}},
        "agent_ref": rollout.raw.get("agent_ref") or {"type": "responses_api_agents", "name": rollout.agent},
        "length": len(log[0]["token_ids"]),
        "total_reward": rollout.reward,
        "loss_multiplier": 0.0 if rollout.masked else 1.0,
        "mask_sample": rollout.masked,
    }
    if rollout.branch or rollout.raw.get("branches"):
        record["branch"] = rollout.branch
    if "_rowidx" in rollout.raw:
        record["_rowidx"] = rollout.raw["_rowidx"]
    return record


def _without_logged_tokens(item: JSON) -> JSON:
    # An empty generation is in no message of the log, so its tokens stay where they are.
    if not item.get("generation_token_ids"):
        return item
    return {key: value for key, value in item.items() if key not in TOKEN_KEYS}


_NOT_OF_THE_ROW = frozenset(
    {
        *("response", "reward", "mask_sample", "failure"),
        *("branch", "branches", "captured_input", "captured_context"),
    }
)


def verl_task(
    rollout: Rollout,
    *,
    data_source: str | None = None,
    ground_truth: str = "expected_answer",
    split: str = "train",
) -> JSON:
    """The task of a rollout, as a row for RL. ``data_source`` is verl's name of the data set, by default the
    agent's. Raises NotExportable: the prompt has no form in verl.
    """
    prompt, images = with_placeholders(prompt_messages(rollout))
    source = data_source or rollout.agent
    row = {k: v for k, v in rollout.raw.items() if k not in _NOT_OF_THE_ROW and not k.startswith("_ng_")}
    return {
        "data_source": source,
        "prompt": prompt,
        "images": images,
        "ability": source,
        "reward_model": {"style": "rule", "ground_truth": answer_of(rollout, ground_truth)},
        "extra_info": {
            "split": split,
            "index": rollout.task_index,
            "branch": rollout.branch,
            "row": exact_bytes(row).decode(),
        },
    }


def verl_rollout(rollout: Rollout, *, reasoning: ReasoningForm = "field", **task_options: Any) -> JSON:
    """A rollout, or a branch of one, as a row for SFT, for RL, and with its tokens. Raises NotExportable: it
    failed, is masked, or has no form in verl.
    """
    rollout.require_trainable()
    row = verl_task(rollout, **task_options)
    chat = conversation(rollout, reasoning=reasoning)
    messages, images = with_placeholders(chat.messages)
    if images != row["images"]:
        raise NotExportable("media", "verl has one list of images for the prompt and the whole conversation")
    tokens: JSON | None = None
    try:
        sample = sample_of(rollout)
    except NotExportable as error:
        if error.reason != "no_tokens":
            raise
    else:
        tokens = {
            "prompt_ids": sample.prompt_ids,
            "response_ids": sample.response_ids,
            "response_mask": sample.loss_mask,
            "response_logprobs": sample.logprobs,
            "reward_score": sample.reward,
            "num_turns": len(messages),
            "metrics": _metrics(rollout),
        }
    return {**row, "messages": messages, "tools": chat.tools, "reward": rollout.reward, "rollout": tokens}


def _metrics(rollout: Rollout) -> JSON:
    """verl's `AgentLoopMetrics`: seconds that an episode spent in its stages; zeros without a timeline."""
    spent = dict.fromkeys(_STAGES.values(), 0.0)
    recorded = rollout.timeline
    for step in [] if recorded is None else recorded.steps:
        if step.stage is None and (name := _STAGES.get(step.kind)):
            spent[name] += step.duration
    return spent


_STAGES = {"model": "generate_sequences", "tool": "tool_calls", "verify": "compute_score"}


def verl_records(
    rollouts: Iterable[Rollout],
    report: ExportReport,
    *,
    per: Literal["rollout", "task"] = "rollout",
    reasoning: ReasoningForm = "field",
    data_source: str | None = None,
    ground_truth: str = "expected_answer",
    split: str = "train",
) -> Iterator[JSON]:
    """The rows of all rollouts, or (``per="task"``, as verl repeats a prompt itself) one with the RL columns
    for each task.
    """
    options: dict[str, Any] = {"data_source": data_source, "ground_truth": ground_truth, "split": split}
    tasks: set[str] = set()

    def new_task(rollout: Rollout) -> JSON:
        if rollout.task in tasks:
            raise NotExportable("same_task", "an earlier rollout of the task is there")
        row = verl_task(rollout, **options)
        tasks.add(rollout.task)
        return row

    if per == "task":
        return whole(new_task)(rollouts, report)
    return each(verl_rollout)(rollouts, report, reasoning=reasoning, **options)


def verl_schema(contents: Seen, report: ExportReport) -> Any:
    """The Arrow schema for the columns that the records have."""
    pa = pyarrow()
    columns: dict[str, Any] = {
        "data_source": pa.string(),
        "prompt": message_list(contents.keys["prompt"]),
        "ability": pa.string(),
        "reward_model": pa.struct({"style": pa.string(), "ground_truth": pa.string()}),
        "extra_info": pa.struct(
            {"split": pa.string(), "index": pa.int64(), "branch": pa.int64(), "row": pa.string()}
        ),
    }
    if "images" in contents.filled:
        columns["images"] = pa.list_(pa.string())
    if "messages" in contents.filled:
        columns["messages"] = message_list(contents.keys["messages"])
        columns["reward"] = pa.float64()
    if "rollout" in contents.filled:
        ids, logprobs = pa.list_(pa.int32()), pa.list_(pa.float64())
        tokens = {"prompt_ids": ids, "response_ids": ids, "response_mask": ids, "response_logprobs": logprobs}
        seconds = pa.struct(dict.fromkeys(_STAGES.values(), pa.float64()))
        further = {"reward_score": pa.float64(), "num_turns": pa.int32(), "metrics": seconds}
        columns["rollout"] = pa.struct({**tokens, **further})
    if "tools" in contents.filled:
        tools = exact_type(contents.tools) if contents.tools is not None else None
        if tools is None:
            report.notes.append(
                "the column tools is left out: the tools' schemas differ, and Parquet would fill each with "
                "nulls for the keys of the others; for SFT with tools use the sft or trl format"
            )
        else:
            columns["tools"] = tools
    return pa.schema(columns)

"""OpenRLHF: Parquet for its `PromptDataset` (RL), `SFTDataset` and `RewardDataset` (DPO, reward models).

``kind="rollouts"``, a row a rollout. RL: ``--data.input_key prompt --data.label_key label``; the reward
function is shown ``datasource`` and ``label``. SFT: ``--data.input_key messages --data.multiturn``, which
puts the loss on the assistant's turns alone. ``kind="preference"``, a row a task: ``--data.prompt_key
prompt --data.chosen_key chosen --data.rejected_key rejected``. All with ``--data.apply_chat_template``.

Parquet instead of JSON Lines, because a loader of JSON guesses the types of columns from the first
lines, where perhaps no tool was called yet. Of ``rollouts``, each conversation of a harness's rollout is a
row, with the reward of the whole; pairs are made of those that were verified. Failed and masked rollouts are
left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Literal

import orjson

from gym_serve.interop.export.conversation import conversation
from gym_serve.interop.export.media import require_text, with_placeholders
from gym_serve.interop.export.pairs import preference_pairs
from gym_serve.interop.export.parquet import Seen, message_list, pyarrow
from gym_serve.interop.export.report import Tally, each
from gym_serve.interop.export.rollout import NotExportable, Rollout
from gym_serve.types.errors import InvalidRequest
from gym_serve.types.protocols import ReasoningForm
from gym_serve.types.requests import JSON

__all__ = ["openrlhf_records", "openrlhf_rollout", "openrlhf_schema"]

_MESSAGES = ("prompt", "messages", "chosen", "rejected")


def openrlhf_rollout(
    rollout: Rollout, *, reasoning: ReasoningForm = "field", label: str = "expected_answer"
) -> JSON:
    """A rollout as a row.

    Args:
        rollout: the rollout.
        reasoning: as ``reasoning_content``, as ``<think>`` tags in the content, or left out.
        label: key of the row that holds the answer.

    Raises:
        NotExportable: it failed, is masked, or has no form in OpenRLHF.
    """
    rollout.require_trainable()
    chat = conversation(rollout, reasoning=reasoning)
    # OpenRLHF takes every "<image>" of a prompt for an image.
    prompt, images = with_placeholders(chat.prompt, strict=True)
    messages, all_images = with_placeholders(chat.messages)
    if images != all_images:
        raise NotExportable("media", "OpenRLHF has images in prompts only")
    answer = rollout.raw.get(label)
    if answer is not None and not isinstance(answer, str):
        answer = orjson.dumps(answer).decode()
    return {
        "prompt": prompt,
        "messages": messages,
        "label": answer or "",
        "datasource": rollout.agent,
        "images": images,
        "reward": rollout.reward,
        "tools": chat.tools,
    }


def openrlhf_records(
    rollouts: Iterable[Rollout],
    tally: Tally,
    *,
    kind: Literal["rollouts", "preference"] = "rollouts",
    reasoning: ReasoningForm = "field",
    label: str = "expected_answer",
    margin: float = 0.0,
) -> Iterator[JSON]:
    """The rows of a data set for OpenRLHF.

    Args:
        rollouts: the rollouts.
        tally: the account.
        kind: the kind of data set.
        reasoning: as ``reasoning_content``, as ``<think>`` tags in the content, or left out.
        label: of ``rollouts``: key of the row that holds the answer.
        margin: of ``preference``: the two rewards must differ by more.

    Raises:
        InvalidRequest: there is no such kind.
    """
    if kind == "rollouts":
        yield from each(openrlhf_rollout)(rollouts, tally, reasoning=reasoning, label=label)
    elif kind == "preference":
        candidate = partial(_candidate, reasoning=reasoning)
        yield from preference_pairs(rollouts, tally, candidate, margin=margin)
    else:
        raise InvalidRequest(f"option kind: {kind!r} is none of rollouts, preference")


def openrlhf_schema(seen: Seen, tally: Tally) -> Any:
    """The Arrow schema for the columns that the records have."""
    pa = pyarrow()
    if "tools" in seen.filled:
        tally.notes.append(
            "the tools are not in the file: OpenRLHF renders its chat templates without tools; "
            "describe them in the row's instructions"
        )
    types = {name: message_list(seen.keys[name]) for name in _MESSAGES}
    types |= {name: pa.float64() for name in ("reward", "chosen_reward", "rejected_reward")}
    types["images"] = pa.list_(pa.string())
    absent = {"tools"} if "images" in seen.filled else {"tools", "images"}
    return pa.schema({name: types.get(name, pa.string()) for name in seen.columns if name not in absent})


def _candidate(rollout: Rollout, *, reasoning: ReasoningForm) -> JSON:
    rollout.require_trainable()
    chat = conversation(rollout, reasoning=reasoning)
    require_text(chat.messages)
    made = {"prompt": chat.prompt, "completion": chat.completion, "tools": chat.tools}
    return {**made, "reward": rollout.reward}

"""TRL: Parquet that `datasets` loads with the very messages that were written.

Messages and tools are columns of Arrow's JSON type, the `Json` feature of datasets >= 4.7 (which TRL
needs as well): no message gets null keys, and arguments of calls are objects, as chat templates want
them. `load_dataset("parquet", data_files=...)` of three kinds:

    completion   prompt, completion, tools, reward              SFTTrainer
    preference   prompt, chosen, rejected, tools, rewards       DPOTrainer
    tokens       input_ids, assistant_masks, logprobs, reward   SFTTrainer, on the model's own tokens

A completion of several turns holds tool outputs: train on it with ``assistant_only_loss=True``, as its
default loss is on all of the completion.
Each conversation of a harness's rollout is an example, with the reward of the whole; pairs are made of those
that were verified. Failed and masked rollouts are left out: no dataset of TRL has a mask for a sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Literal

import orjson

from gym_serve.interop.export.conversation import conversation
from gym_serve.interop.export.media import require_text
from gym_serve.interop.export.pairs import preference_pairs
from gym_serve.interop.export.parquet import Seen, pyarrow
from gym_serve.interop.export.report import Tally, each
from gym_serve.interop.export.rollout import Rollout
from gym_serve.interop.export.tokens import token_sequence, token_turns
from gym_serve.types.errors import InvalidRequest
from gym_serve.types.protocols import ReasoningForm
from gym_serve.types.requests import JSON

__all__ = ["trl_completion", "trl_records", "trl_schema", "trl_tokens"]

_JSON_LISTS = ("prompt", "completion", "chosen", "rejected", "tools")
_COMPLETION = ("prompt", "completion", "tools", "reward")


def trl_completion(rollout: Rollout, *, reasoning: ReasoningForm = "field") -> JSON:
    """A rollout as a conversational prompt-completion example.

    Raises:
        NotExportable: it failed, is masked, has no answer, or holds media.
    """
    rollout.require_trainable()
    chat = conversation(rollout, reasoning=reasoning, arguments="object")
    require_text(chat.messages)
    example = {"prompt": chat.prompt, "completion": chat.completion, "tools": chat.tools or None}
    return {**example, "reward": rollout.reward}


def trl_tokens(rollout: Rollout) -> JSON:
    """A rollout as a tokenized example; ``assistant_masks`` is 1 on what the model produced.

    Raises:
        NotExportable: it failed, is masked, or has no usable tokens.
    """
    rollout.require_trainable()
    sequence = token_sequence(token_turns(rollout))
    given = len(sequence.prompt)
    return {
        "input_ids": sequence.prompt + sequence.response,
        "assistant_masks": [0] * given + sequence.mask,
        "logprobs": [0.0] * given + sequence.logprobs,
        "reward": rollout.reward,
    }


def trl_records(
    rollouts: Iterable[Rollout],
    tally: Tally,
    *,
    kind: Literal["completion", "preference", "tokens"] = "completion",
    reasoning: ReasoningForm = "field",
    margin: float = 0.0,
) -> Iterator[JSON]:
    """The examples of a data set for TRL.

    Args:
        rollouts: the rollouts.
        tally: the account.
        kind: the kind of data set.
        reasoning: as ``reasoning_content``, as ``<think>`` tags in the content, or left out.
        margin: of ``preference``: the two rewards must differ by more.

    Raises:
        InvalidRequest: there is no such kind.
    """
    if kind == "tokens":
        yield from each(trl_tokens)(rollouts, tally)
    elif kind == "completion":
        yield from map(_encoded, each(trl_completion)(rollouts, tally, reasoning=reasoning))
    elif kind == "preference":
        candidate = partial(trl_completion, reasoning=reasoning)
        yield from map(_encoded, preference_pairs(rollouts, tally, candidate, margin=margin))
    else:
        raise InvalidRequest(f"option kind: {kind!r} is none of completion, preference, tokens")


def trl_schema(seen: Seen, tally: Tally) -> Any:
    """The Arrow schema for the columns that the records have."""
    pa = pyarrow()
    types = {name: pa.list_(pa.json_()) for name in _JSON_LISTS}
    types |= {"input_ids": pa.list_(pa.int32()), "assistant_masks": pa.list_(pa.int8())}
    types |= {"logprobs": pa.list_(pa.float64())}
    types |= {name: pa.float64() for name in ("reward", "chosen_reward", "rejected_reward")}
    return pa.schema({name: types.get(name, pa.string()) for name in seen.columns or _COMPLETION})


def _encoded(record: JSON) -> JSON:
    lists = {name: record[name] for name in _JSON_LISTS if record.get(name)}
    return {**record, **{name: [orjson.dumps(v).decode() for v in values] for name, values in lists.items()}}

"""DPO chat data: ``{"prompt", "chosen", "rejected", "tools"?, ...}`` with lists of messages, one pair a line.

The conversational preference format of TRL, Axolotl and others. TRL and OpenRLHF have Parquet of the
same pairs as well: ``kind="preference"`` of the formats ``trl`` and ``openrlhf``. Of a harness's rollout, the
conversation that was verified stands in a pair: a reward of the whole does not compare its branches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gym_serve.interop.export.conversation import ArgumentsForm, conversation
from gym_serve.interop.export.pairs import preference_pairs
from gym_serve.interop.export.report import Tally
from gym_serve.interop.export.rollout import Rollout
from gym_serve.types.protocols import ReasoningForm
from gym_serve.types.requests import JSON

__all__ = ["dpo_records"]


def dpo_records(
    rollouts: Iterable[Rollout],
    tally: Tally,
    *,
    margin: float = 0.0,
    reasoning: ReasoningForm = "field",
    arguments: ArgumentsForm = "string",
) -> Iterator[JSON]:
    """Each task's best rollout against its worst. Failed and masked rollouts are left out.

    Args:
        rollouts: in any order.
        tally: the account; rollouts that are in no pair are counted.
        margin: the difference of the two rewards must be larger than this.
        reasoning: as ``reasoning_content``, as ``<think>`` tags in the content, or left out.
        arguments: of tool calls, as a ``string`` or decoded to an ``object``.
    """

    def candidate(rollout: Rollout) -> JSON:
        rollout.require_trainable()
        chat = conversation(rollout, reasoning=reasoning, arguments=arguments)
        made = {"prompt": chat.prompt, "completion": chat.completion, "tools": chat.tools}
        return {**made, "reward": rollout.reward}

    return preference_pairs(rollouts, tally, candidate, margin=margin)

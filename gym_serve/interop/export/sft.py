"""SFT chat data: OpenAI's fine-tuning format, one conversation a line.

``{"messages": [...], "tools": [...], "reward": r}``, as OpenAI, Axolotl, LLaMA-Factory and NeMo RL
(``dataset_name: openai_format``) read it. Arguments of tool calls are strings, as OpenAI has them:
loaders that give a file one schema would fill decoded ones with nulls of other tools' keys. Each
conversation of a harness's rollout is a line of its own.
"""

from __future__ import annotations

from gym_serve.interop.export.conversation import ArgumentsForm, conversation
from gym_serve.interop.export.rollout import Rollout
from gym_serve.types.protocols import ReasoningForm
from gym_serve.types.requests import JSON

__all__ = ["sft_record"]


def sft_record(
    rollout: Rollout, *, reasoning: ReasoningForm = "field", arguments: ArgumentsForm = "string"
) -> JSON:
    """A rollout as one training conversation; it ends with an assistant message.

    Args:
        rollout: the rollout.
        reasoning: as ``reasoning_content``, as ``<think>`` tags in the content, or left out.
        arguments: of tool calls: OpenAI's ``string``, or the ``object`` that many chat templates want
            (for NeMo RL, with ``use_preserving_dataset: true``).

    Raises:
        NotExportable: it failed, is masked, or has no answer.
    """
    rollout.require_trainable()
    chat = conversation(rollout, reasoning=reasoning, arguments=arguments)
    record: JSON = {"messages": chat.messages}
    if chat.tools:
        record["tools"] = chat.tools
    return {**record, "reward": rollout.reward}

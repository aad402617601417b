"""NeMo RL: the result of its NeMo Gym environment for each rollout, as JSON Lines.

A line is what NeMo RL's post-processing makes of a rollout (docs/formats.md, What trainers read),
with lists where it has tensors: ``message_log`` alternates the prompt tokens that are new (role ``user``)
and the generation (role ``assistant``), ``input_message_log`` is its first message, and ``full_result`` the
rollout without the tokens that the log holds. The keys that its GRPO batch has in addition stand
beside them: ``agent_ref``, ``length``, ``total_reward``, ``loss_multiplier`` and ``mask_sample``.

Each conversation of a harness's rollout is a line, with the reward of the whole; ``branch`` is 0 in that of
the one that was verified. The lines of a rollout share ``_rowidx``, so that a baseline can count it once.

A masked rollout stays, with ``loss_multiplier`` 0: NeMo RL keeps it out of the loss, but counts its
reward in the group's baseline.
"""

from __future__ import annotations

from gym_serve.interop.export.rollout import NotExportable, Rollout
from gym_serve.interop.export.tokens import TokenTurn, token_turns
from gym_serve.types.protocols import TOKEN_KEYS
from gym_serve.types.requests import JSON

__all__ = ["message_log", "nemo_rl_record"]


def message_log(turns: list[TokenTurn]) -> list[JSON]:
    """NeMo RL's message log; token ids and log probabilities are lists."""
    log: list[JSON] = []
    for turn in turns:
        log.append({"role": "user", "content": "", "token_ids": turn.prompt})
        generated = {"token_ids": turn.generation, "generation_logprobs": turn.logprobs}
        log.append({"role": "assistant", "content": "", **generated})
    return log


def nemo_rl_record(rollout: Rollout) -> JSON:
    """A rollout, or a branch of one, as NeMo RL's result.

    Raises:
        NotExportable: it has no usable tokens, or no reward.
    """
    try:
        log = message_log(token_turns(rollout))
    except NotExportable as error:
        if error.reason == "no_tokens":
            rollout.require_trainable()  # why it has none
        raise
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

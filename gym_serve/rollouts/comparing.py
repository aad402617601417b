"""Group rewards: what an environment's ``compare`` is asked about a group, and what its answer changes.

The collector calls it when a group is settled (docs/formats.md, Groups), never ``verify``: a verifier that
waits for its group would hold every episode of it open, and would wait for ever for one that failed.
"""

from __future__ import annotations

import math
from dataclasses import replace

from gym_serve.rollouts.grouping import Group
from gym_serve.types.errors import GymError, VerifierFailed
from gym_serve.types.requests import JSON, input_items

__all__ = ["VERIFY_REWARD", "compare_request", "with_comparison", "without_comparison"]

VERIFY_REWARD = "verify_reward"
"""Field of a compared rollout with the reward that ``verify`` gave it."""


def compare_request(group: Group) -> JSON:
    """The body of ``POST /compare`` for a settled group."""
    history = input_items(group.row["responses_create_params"].get("input") or [])
    principle = group.row.get("principle")
    return {
        "conversation_history": history,
        "response_objs": [rollout.get("response") for rollout in group.rollouts],
        **({"principle": principle} if principle is not None else {}),
    }


def with_comparison(group: Group, answer: JSON) -> Group:
    """The group with the rewards that ``compare`` gave.

    Raises:
        VerifierFailed: the answer has not one finite reward for each rollout.
    """
    rewards = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(rewards, list) or len(rewards) != len(group.rollouts):
        raise VerifierFailed(f"compare answered no {len(group.rollouts)} rewards: {str(answer)[:200]}")
    if not all(isinstance(reward, int | float) and math.isfinite(reward) for reward in rewards):
        raise VerifierFailed(f"compare answered rewards that are no finite numbers: {str(rewards)[:200]}")
    rollouts = [
        {**rollout, "reward": float(reward), VERIFY_REWARD: rollout["reward"]}
        for rollout, reward in zip(group.rollouts, rewards, strict=True)
    ]
    return replace(group, rollouts=rollouts, comparison=answer)


def without_comparison(group: Group, error: GymError) -> Group:
    """The group when ``compare`` failed: its rollouts have no reward that could be trained on."""
    failed = f"compare failed: {error.message}"
    return replace(group, usable=False, reason=f"{group.reason}; {failed}" if group.reason else failed)

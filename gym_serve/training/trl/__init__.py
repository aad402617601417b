"""Rollouts of a graph for TRL 1.16.

    trainer = GRPOTrainer(
        model="Qwen/Qwen3-0.6B",
        train_dataset=dataset("rows.jsonl"),
        rollout_func=rollout_func(gym, model="policy"),
        reward_funcs=rollout_reward,
    )

`environment_factory` offers an environment to the tool loop of TRL itself, and `RolloutWorker` feeds its
`AsyncGRPOTrainer`.
"""

from gym_serve.training.trl.environments import environment_factory, environment_reward
from gym_serve.training.trl.rollouts import RolloutWorker, dataset, rollout_func, rollout_reward

__all__ = [
    "RolloutWorker",
    "dataset",
    "environment_factory",
    "environment_reward",
    "rollout_func",
    "rollout_reward",
]

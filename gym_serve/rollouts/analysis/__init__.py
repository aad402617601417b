"""Analysis of stored rollouts: how hard each task is for the policy, and what changed between two runs. Files
are read as a stream; only the numbers of a rollout are kept.
"""

from gym_serve.rollouts.analysis.comparison import Comparison, Estimate, RunScores, TaskDifference
from gym_serve.rollouts.analysis.reading import (
    BUCKETS,
    Asked,
    RewardProfile,
    TaskKey,
    TaskProfile,
    prompts_of_tasks,
    read_asked,
    read_rollouts,
    rows_of_tasks,
)

__all__ = [
    "BUCKETS",
    "Asked",
    "Comparison",
    "Estimate",
    "RewardProfile",
    "RunScores",
    "TaskDifference",
    "TaskKey",
    "TaskProfile",
    "prompts_of_tasks",
    "read_asked",
    "read_rollouts",
    "rows_of_tasks",
]

"""Analysis of stored rollouts: how hard is each task for the policy, and what changed between two runs.

- `RewardProfile`, `TaskProfile`, `BUCKETS`: pass rates by task, and the tasks to train on next.
- `Comparison`, `RunScores`, `TaskDifference`, `Estimate`: two runs over the same tasks, paired.
- `read_rollouts`, `read_asked`, `rows_of_tasks`, `prompts_of_tasks`: the files of runs, a line at a time.

Everything is computed from the files of ``collect`` (or NeMo Gym's rollouts), read as a stream; only the
numbers of a rollout are kept.
"""

from gym_serve.rollouts.analysis.comparison import Comparison, Estimate, RunScores, TaskDifference
from gym_serve.rollouts.analysis.profile import BUCKETS, RewardProfile, TaskProfile
from gym_serve.rollouts.analysis.reading import (
    Asked,
    TaskKey,
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

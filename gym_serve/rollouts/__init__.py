"""The rollout engine: rows in, rollouts out, to an iterator or into files that survive a crash.

- `collect`, `check_run`, `Collection`, `Report`, `Progress`: rows to files, resumable; `merge` joins shards.
- `Budget`, `Spending`, `Spent`, `prices_of`: what a run may use, and what it did.
- `stream`: the same engine as an async iterator; `groups`, `GroupOptions`, `Group`: by groups (GRPO).
- `Expansion`, `expand`, `checked_groups`, `jobs_of`, `PromptTemplate`: from rows to what is run.

Decisions are made by pure state machines (`scheduling`, `outage`, `pacing`, `ordering`, `grouping`) that
own no task and no client; `engine`, `groups` and `collecting` are the async shells around them. Nothing here
knows Ray: an episode is a function.
"""

from gym_serve.rollouts.backoff import Backoff
from gym_serve.rollouts.collecting import Collection, Report, check_run, collect
from gym_serve.rollouts.expansion import Expansion, expand
from gym_serve.rollouts.grouping import Group, GroupOptions
from gym_serve.rollouts.groups import groups
from gym_serve.rollouts.inputs import checked_groups
from gym_serve.rollouts.merging import merge
from gym_serve.rollouts.ordering import Order
from gym_serve.rollouts.outputs import Outputs
from gym_serve.rollouts.problems import refuse
from gym_serve.rollouts.progress import Progress
from gym_serve.rollouts.prompts import PromptTemplate
from gym_serve.rollouts.rows import Rows
from gym_serve.rollouts.runner import Run, RunnerOptions, jobs_of, stream
from gym_serve.rollouts.scheduling import Job
from gym_serve.rollouts.spending import Budget, Spending, Spent, prices_of

__all__ = [
    "Backoff",
    "Budget",
    "Collection",
    "Expansion",
    "Group",
    "GroupOptions",
    "Job",
    "Order",
    "Outputs",
    "Progress",
    "PromptTemplate",
    "Report",
    "Rows",
    "Run",
    "RunnerOptions",
    "Spending",
    "Spent",
    "check_run",
    "checked_groups",
    "collect",
    "expand",
    "groups",
    "jobs_of",
    "merge",
    "prices_of",
    "refuse",
    "stream",
]

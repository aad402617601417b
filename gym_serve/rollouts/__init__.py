"""From rows to rollouts, as an async iterator or into files that survive a crash.

Decisions are made by pure state machines (`scheduling`, `grouping`, `staleness`) that own no task, client or
clock; `runner`, `groups`, `feeding` and `collecting` are the asyncio shells around them. Nothing here knows
Ray: an episode is a function.
"""

from gym_serve.rollouts.collecting import Collection, Report, RolloutBackend, check_run, collect, merge
from gym_serve.rollouts.expansion import Expansion, PromptTemplate, checked_groups, expand
from gym_serve.rollouts.feeding import GroupFeed, Handover, StreamCounts
from gym_serve.rollouts.grouping import Group, GroupOptions, Straddle, StreamOptions
from gym_serve.rollouts.groups import compared, groups
from gym_serve.rollouts.journal import Outputs
from gym_serve.rollouts.progress import Budget, Progress, Spending, Spent, prices_of
from gym_serve.rollouts.rows import Rows, raise_problem
from gym_serve.rollouts.runner import Run, RunnerOptions, jobs_of, stream
from gym_serve.rollouts.scheduling import Backoff, Job, Order
from gym_serve.rollouts.trackers import RolloutTracking, Tracker, Tracking, open_tracker

__all__ = [
    "Backoff",
    "Budget",
    "Collection",
    "Expansion",
    "Group",
    "GroupFeed",
    "GroupOptions",
    "Handover",
    "Job",
    "Order",
    "Outputs",
    "Progress",
    "PromptTemplate",
    "Report",
    "RolloutBackend",
    "RolloutTracking",
    "Rows",
    "Run",
    "RunnerOptions",
    "Spending",
    "Spent",
    "Straddle",
    "StreamCounts",
    "StreamOptions",
    "Tracker",
    "Tracking",
    "check_run",
    "checked_groups",
    "collect",
    "compared",
    "expand",
    "groups",
    "jobs_of",
    "merge",
    "open_tracker",
    "prices_of",
    "raise_problem",
    "stream",
]

"""Metrics of rollouts: statistics, pass@k, majority@k, confidence intervals. Pure functions.

    aggregator = Aggregator(MetricSpec(scores=(Score("accuracy"),), answer="extracted_answer"))
    for rollout in rollouts:
        aggregator.add(rollout)
    metrics = aggregator.result()      # the shape of POST /aggregate_metrics

- `MetricSpec`, `Score`, `Breakdown`: what an environment's metrics are made of, as data.
- `Aggregator`: the metrics of a stream of rollouts; a million of them fit in memory.
- `aggregate_metrics`: the same of a list, as ``POST /aggregate_metrics`` answers it.
- `pass_majority_metrics`, `pass_at_k`: the scores alone, of rollouts grouped by task.
- `reward_profile`, `completion_summary`: a data set's rows joined with their rollouts.
- `select_key_metrics`: the headline metrics out of all.
- `summarize`, `SummaryRow`, `SUMMARY_COLUMNS`: the table printed after a run.

Averages of scores are percentages, 0 to 100 (for scores from 0 to 1); statistics of fields
are in the field's own unit. Names and definitions are NeMo Gym's (docs/formats.md, Metrics).
"""

from gym_serve.metrics.aggregate import aggregate_metrics, pass_majority_metrics
from gym_serve.metrics.aggregator import Aggregator
from gym_serve.metrics.curves import pass_at_k
from gym_serve.metrics.headlines import select_key_metrics
from gym_serve.metrics.profile import completion_summary, reward_profile
from gym_serve.metrics.records import LATENCY_FIELD
from gym_serve.metrics.spec import STATISTICS_ONLY, Breakdown, MetricSpec, Score
from gym_serve.metrics.summary import SUMMARY_COLUMNS, SummaryRow, summarize

__all__ = [
    "LATENCY_FIELD",
    "STATISTICS_ONLY",
    "SUMMARY_COLUMNS",
    "Aggregator",
    "Breakdown",
    "MetricSpec",
    "Score",
    "SummaryRow",
    "aggregate_metrics",
    "completion_summary",
    "pass_at_k",
    "pass_majority_metrics",
    "reward_profile",
    "select_key_metrics",
    "summarize",
]

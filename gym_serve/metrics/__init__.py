"""Metrics of rollouts: statistics, pass@k, majority@k, confidence intervals. Pure functions.

    aggregator = Aggregator(MetricSpec(scores=(Score("accuracy"),), answer="extracted_answer"))
    for rollout in rollouts:
        aggregator.add(rollout)
    metrics = aggregator.result()      # the shape of POST /aggregate_metrics

Averages of scores are percentages, 0 to 100 (for scores from 0 to 1); statistics of fields
are in the field's own unit. Names and definitions are NeMo Gym's (docs/formats.md, Metrics), but for the
summary's (`gym_serve.metrics.aggregator`).
"""

from gym_serve.metrics.aggregator import (
    SUMMARY_COLUMNS,
    Aggregator,
    Coverage,
    Failures,
    SummaryRow,
    aggregate_metrics,
    pass_majority_metrics,
    scored_rollouts,
    summarize,
)
from gym_serve.metrics.estimators import pass_at_k
from gym_serve.metrics.records import (
    LATENCY_FIELD,
    MASKED,
    STATISTICS_ONLY,
    Breakdown,
    MetricSpec,
    Score,
)
from gym_serve.metrics.report import select_key_metrics
from gym_serve.types.endings import failure_class

__all__ = [
    "LATENCY_FIELD",
    "MASKED",
    "STATISTICS_ONLY",
    "SUMMARY_COLUMNS",
    "Aggregator",
    "Breakdown",
    "Coverage",
    "Failures",
    "MetricSpec",
    "Score",
    "SummaryRow",
    "aggregate_metrics",
    "failure_class",
    "pass_at_k",
    "pass_majority_metrics",
    "scored_rollouts",
    "select_key_metrics",
    "summarize",
]

"""Autoscaling policies: how many replicas a deployment gets for its load.

Calls do not pass through Serve, so each replica reports its load (`CALLS`, `SESSIONS`), and the policies here
hand the sum to Serve's own policy in the place of requests. A deployment that is scaled to zero starts again
on the one request that Serve does see (`ReplicaTransport`).

Serve pickles this module by value, and runs the policies in its controller: it imports Ray only.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

from ray.serve.autoscaling_policy import replica_queue_length_autoscaling_policy

CALLS = "gym_serve_calls"  # calls that a replica works on, and those that wait at it

SESSIONS = "gym_serve_sessions"
"""Live sessions of a replica, and calls there that belong to none: sessions being opened, episodes."""


def by_calls(context: Any) -> tuple[int | float, dict[str, Any]]:
    """Serve's policy with `CALLS` in the place of requests."""
    return replica_queue_length_autoscaling_policy(with_load(context, CALLS))


def by_sessions(context: Any) -> tuple[int | float, dict[str, Any]]:
    """Serve's policy with `SESSIONS` in the place of requests."""
    return replica_queue_length_autoscaling_policy(with_load(context, SESSIONS))


def with_load(context: Any, metric: str) -> Any:
    """Serve's ``AutoscalingContext`` with the sum of ``metric`` over its replicas as the requests.

    Without replicas, no load is reported, and Serve's own count of waiting requests stays.
    """
    context = copy(context)
    if context.current_num_replicas:
        reported: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        context.total_num_requests = sum(reported.get(metric, {}).values())
    return context

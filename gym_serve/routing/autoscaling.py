"""How many replicas a deployment gets, by what its replicas have to do.

Calls do not pass through Serve, so Serve counts no requests, and its own policy alone would remove every
replica. Each replica reports its load instead (`CALLS`, `SESSIONS`), and the policies here hand the sum to
Serve's own policy in the place of the requests that it counts. So all options of ``autoscaling`` keep the
meaning that Serve gives them: target, bounds, factors, delays, window.

A deployment that was scaled to zero is woken by the request that Serve does see (`ReplicaTransport`), which
waits in Serve's queue; down to zero it goes when its load was 0 for the whole window.

Serve pickles this module by value, and runs the policies in its controller: it imports Ray only.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

from ray.serve.autoscaling_policy import replica_queue_length_autoscaling_policy

__all__ = ["CALLS", "SESSIONS", "by_calls", "by_sessions", "with_load"]

CALLS = "gym_serve_calls"
"""Calls that a replica works on, and those that wait at it."""

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

    Without a replica there is nobody to report: what counts then is the requests that Serve itself holds.
    """
    context = copy(context)
    if context.current_num_replicas:
        reported: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        context.total_num_requests = sum(reported.get(metric, {}).values())
    return context

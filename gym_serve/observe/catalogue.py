"""All metrics that gym_serve records: what they count, and under which labels.

The publisher adds ``graph`` and ``replica`` to every one. ``server`` is the name of a server in the graph
file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gym_serve.observe.metrics import Count, Counter, Gauge, Histogram, Metric

__all__ = [
    "CALLS",
    "CALLS_QUEUED",
    "CALLS_RUNNING",
    "CALL_SECONDS",
    "FAILURES",
    "METRICS",
    "ROLLOUTS",
    "ROLLOUT_REWARD",
    "ROLLOUT_SECONDS",
    "ROLLOUT_TURNS",
    "SESSIONS",
    "TOOL_CALLS",
    "record_call",
    "record_rollout",
]


def _of_tool(labels: tuple[str, ...]) -> tuple[str, ...] | None:
    server, op, status = labels
    return (server, op.removeprefix("tools/"), status) if op.startswith("tools/") else None


ROLLOUTS = Counter(
    "rollouts_total", "Rollouts that ended; outcome: scored, failed or cancelled.", ("server", "outcome")
)
ROLLOUT_SECONDS = Histogram("rollout_seconds", "Duration of a rollout in its agent.", ("server",))
ROLLOUT_REWARD = Histogram(
    "rollout_reward", "Rewards of scored rollouts.", ("server",), (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
)
ROLLOUT_TURNS = Histogram(
    "rollout_turns", "Model calls of a rollout.", ("server",), (1, 2, 3, 5, 10, 20, 50, 100, 200)
)
FAILURES = Counter(
    "failures_total", "Failed rollouts by the failure's code and its stage.", ("server", "code", "stage")
)
CALL_SECONDS = Histogram(
    "call_seconds", "Duration of a call in its server, by HTTP status.", ("server", "op", "status")
)
CALLS = Count(
    "calls_total",
    "Calls that a server answered, by HTTP status.",
    ("server", "op", "status"),
    CALL_SECONDS,
    lambda labels: labels,
)
TOOL_CALLS = Count(
    "tool_calls_total", "Tool calls by HTTP status.", ("server", "tool", "status"), CALL_SECONDS, _of_tool
)
CALLS_RUNNING = Gauge("calls_running", "Calls that a server is working on.", ("server",))
CALLS_QUEUED = Gauge("calls_queued", "Calls that wait for their turn at a replica.", ("server",))
SESSIONS = Gauge("sessions", "Sessions that a server holds.", ("server",))

METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All of them, in the order above."""


def record_call(server: str, op: str, status: int, seconds: float) -> None:
    """Count a call that a server has answered.

    Args:
        op: its operation; ``unknown`` where the server has none of that name.
    """
    CALL_SECONDS.observe(server, op, str(status), value=seconds)


def record_rollout(server: str, rollout: Mapping[str, Any] | None, turns: int, seconds: float) -> None:
    """Count a rollout that an agent has made.

    Args:
        rollout: None where its episode was cancelled.
        turns: its model calls.
    """
    failure = None if rollout is None else rollout.get("failure")
    if rollout is None:
        ROLLOUTS.add(server, "cancelled")
    elif failure is None:
        ROLLOUTS.add(server, "scored")
        ROLLOUT_REWARD.observe(server, value=rollout["reward"])
    else:
        ROLLOUTS.add(server, "failed")
        FAILURES.add(server, failure["kind"], failure["stage"])
    ROLLOUT_TURNS.observe(server, value=turns)
    ROLLOUT_SECONDS.observe(server, value=seconds)

"""All metrics that gym_serve records: what they count, and under which labels.

The publisher adds ``graph`` and ``replica`` to every one. ``server`` is the name of a server in the graph
file.
"""

from __future__ import annotations

from gym_serve.observe.metrics import Counter, Gauge, Histogram, Metric

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
    "SESSIONS_LOST",
    "TOKENS",
    "TOOL_CALLS",
]

ROLLOUTS = Counter(
    "rollouts_total", "Rollouts that ended; outcome: scored, or failed.", ("server", "outcome")
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
CALLS = Counter("calls_total", "Calls that a server answered, by HTTP status.", ("server", "op", "status"))
CALL_SECONDS = Histogram("call_seconds", "Duration of a call in its server.", ("server", "op"))
CALLS_RUNNING = Gauge("calls_running", "Calls that a server is working on.", ("server",))
CALLS_QUEUED = Gauge("calls_queued", "Calls that wait for their turn at a replica.", ("server",))
SESSIONS = Gauge("sessions", "Sessions that a server holds.", ("server",))
SESSIONS_LOST = Counter("sessions_lost_total", "Calls to a session whose replica is gone.", ("server",))
TOKENS = Counter("tokens_total", "Tokens of a model; kind: input, cached or output.", ("server", "kind"))
TOOL_CALLS = Counter("tool_calls_total", "Tool calls by HTTP status.", ("server", "tool", "status"))

METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All of them, in the order above."""

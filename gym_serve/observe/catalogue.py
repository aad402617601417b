"""All metrics that gym_serve records: what they count, and under which labels.

The publisher adds ``graph``, ``server`` and ``replica`` to every one; ``server`` is that of the process where
the metric names none itself. ``agent``, ``model``, ``judge`` and ``server`` are names of servers in the
graph file.

Every value of a label is one of a few: what a model or a client wrote is counted as ``unknown``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gym_serve.observe.metrics import Counter, Gauge, Histogram, HistogramView, Metric, Tally
from gym_serve.types.errors import STAGES
from gym_serve.types.protocols import tokens_of

_Labels = tuple[str, ...]


def _of_tool(labels: _Labels) -> _Labels | None:
    server, op, status = labels
    return (server, op.removeprefix("tools/"), status) if op.startswith("tools/") else None


def _of_verify(labels: _Labels) -> _Labels | None:
    return labels[:1] if labels[1] == "verify" else None


ROLLOUT_REWARD = Histogram(
    "rollout_reward", "Rewards of scored rollouts.", ("agent",), (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
)
ROLLOUTS = Tally(
    "rollouts_total",
    "Rollouts that ended; outcome: scored, failed or cancelled.",
    ("agent", "outcome"),
    ROLLOUT_REWARD,
    lambda labels: (*labels, "scored"),
)
ROLLOUT_SECONDS = Histogram("rollout_seconds", "Duration of a rollout in its agent.", ("agent",))
ROLLOUT_TURNS = Histogram(
    "rollout_turns", "Model calls of a rollout.", ("agent",), (1, 2, 3, 5, 10, 20, 50, 100, 200)
)
FAILURES = Counter(
    "failures_total", "Failed rollouts by the failure's code and its stage.", ("agent", "class", "stage")
)

ANSWERS = Histogram("answers", "Calls by duration and status.", ("server", "op", "status"))
"""What the metrics of calls are views of; it is not published itself."""
CALL_SECONDS = HistogramView(
    "call_seconds", "Duration of a call in its server.", ("server", "op"), ANSWERS, lambda labels: labels[:2]
)
CALLS = Tally(
    "calls_total",
    "Calls that a server answered, by HTTP status; 499: the caller went away.",
    ("server", "op", "status"),
    ANSWERS,
    lambda labels: labels,
)
TOOL_CALLS = Tally(
    "tool_calls_total",
    "Tool calls by HTTP status; 404 and 422 also for names and arguments that an agent does not pass on.",
    ("server", "tool", "status"),
    ANSWERS,
    _of_tool,
)
VERIFY_SECONDS = HistogramView(
    "verify_seconds", "Duration of a verification.", ("server",), ANSWERS, _of_verify
)
CALLS_RUNNING = Gauge("calls_running", "Calls that a server is working on.", ("server",))
CALLS_QUEUED = Gauge("calls_queued", "Calls that wait for their turn at a replica.", ("server",))
CPU_SECONDS = Counter(
    "cpu_seconds_total",
    "CPU time of calls by stage: an operation, tools, or other; estimated from a few of them.",
    ("server", "stage"),
)
SESSIONS = Gauge("sessions", "Sessions that a server holds.", ("server",))
SESSIONS_LOST = Counter(
    "sessions_lost_total", "Sessions of episodes that were lost with their replica.", ("server",)
)

TOKENS = Counter(
    "tokens_total",
    "Tokens of a model's calls; kind: input (of which cached were in a cache), cached or output.",
    ("model", "kind"),
)
TIME_TO_FIRST_TOKEN = Histogram(
    "time_to_first_token_seconds",
    "Time until a model's first token, of streams and of hf_engine.",
    ("model",),
)
MODEL_RETRIES = Counter(
    "model_retries_total",
    "Requests to a model's endpoint that failed and were made again, by the failure's code.",
    ("model", "endpoint", "reason"),
)
ENDPOINT_UP = Gauge(
    "endpoint_up", "Whether calls go to an endpoint (1), or skip it as it failed (0).", ("model", "endpoint")
)
ENDPOINT_WAIT = Gauge(
    "endpoint_wait_seconds",
    "Time until an endpoint takes calls again, as its last refusal said; 0 if none did.",
    ("model", "endpoint"),
)
POLICY_VERSION = Gauge(
    "policy_version",
    "Number at the end of the version of a model's weights, where it was told one.",
    ("model",),
)
WEIGHTS_UPDATE_SECONDS = Histogram(
    "weights_update_seconds", "Duration of an update of a model's weights, seen by the driver.", ("model",)
)
STALENESS = Histogram(
    "staleness",
    "Versions of the policy from the beginning of a group's oldest rollout until the trainer took the group.",
    (),
    (0, 1, 2, 3, 4, 6, 8, 12, 16, 32),
)

JUDGE_CALLS = Counter(
    "judge_calls_total",
    "Calls of judges; outcome: verdict, no_verdict, cached or failed.",
    ("judge", "outcome"),
)
SANDBOX_RUNNING = Gauge("sandbox_running", "Sandboxed processes, those that wait for a program included.")
BOXES = Gauge(
    "boxes",
    "Boxes of a server; state: live, warm, starting, waiting (takes that wait for one), most (there may be).",
    ("server", "state"),
)
DRIVER_IN_FLIGHT = Gauge("driver_in_flight", "Rollouts that a driver has started and that have not ended.")

METRICS: tuple[Metric, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Metric) and value is not ANSWERS
)
"""All of them, in the order above."""


class TokenMeter:
    """Counts the tokens of one model."""

    def __init__(self, model: str) -> None:
        self._cells = tuple(TOKENS.cell(model, kind) for kind in ("input", "cached", "output"))

    def record(self, usage: Any) -> None:
        """Count the tokens of a call, if its usage tells them.

        Usages are read at once: to keep many of them for later takes a rollout's memory out of the CPU's
        caches, which costs three times as much.
        """
        if (tokens := tokens_of(usage)) is not None:
            prompt, cached, sampled = self._cells
            prompt[0] += tokens[0]
            cached[0] += tokens[1]
            sampled[0] += tokens[2]


class RolloutMeter:
    """Counts the rollouts of one agent."""

    def __init__(self, agent: str, environment: str) -> None:
        self._agent = agent
        self._environment = environment
        self._add_reward = ROLLOUT_REWARD.values(agent).add
        self._add_turns = ROLLOUT_TURNS.values(agent).add
        self._add_seconds = ROLLOUT_SECONDS.values(agent).add

    def record(self, rollout: Mapping[str, Any] | None, turns: int, seconds: float) -> None:
        """Count a rollout that the agent has made. ``rollout``: None where its episode was cancelled."""
        self._add_turns(turns)
        self._add_seconds(seconds)
        if rollout is None:
            ROLLOUTS.add(self._agent, "cancelled")
        elif "failure" in rollout:
            ROLLOUTS.add(self._agent, "failed")
            self._record_failure(rollout["failure"])
        else:
            try:
                self._add_reward(rollout["reward"])
            except (KeyError, TypeError, OverflowError):  # an agent's own verdict: the driver says what it is
                ROLLOUTS.add(self._agent, "failed")

    def _record_failure(self, failure: Mapping[str, Any]) -> None:
        kind, stage = failure["kind"], failure["stage"]
        if stage not in STAGES:  # a server at a URL may say anything
            where, _, limit = kind.rpartition("_")
            kind, stage = f"unknown_{limit}" if where == stage else kind, "unknown"
        FAILURES.add(self._agent, kind, stage)
        if kind == "session_lost":
            SESSIONS_LOST.add(self._environment)

"""What Serve's own series must be after rollouts of the weather graph: those that its dashboard shows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from gym_serve import Gym, Rollout

GRAPH = {
    "extends": "graphs/weather.yaml",
    "models": {
        "broken": {"type": "support.traced:TracedModel", "failures": 99},
        "slow": {"type": "support.scaling:Held", "max_ongoing_requests": 2},
    },
    "agents": {
        "weather_agent": {"health_check_period_s": 1},
        "inline": {
            "type": "simple_agent",
            "model": "policy",
            "resources": "weather",
            "max_steps": 8,
            "inline": ["weather", "policy"],
        },
    },
}
"""The weather graph with an agent in which its servers run, and two models: one fails, of one calls wait."""

BROKEN, HELD = 3, 5
"""How often each of them is called."""

Wanted = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""The values of series, each summed over those that have these labels."""


@contextmanager
def held(gym: Gym, file: Path) -> Iterator[None]:
    """Within the block, `HELD` calls of the model ``slow`` do not end."""
    call = (gym.call, ("slow", "v1/responses", {"input": str(file)}))
    threads = [threading.Thread(target=call[0], args=call[1]) for _ in range(HELD)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        file.touch()
        for thread in threads:
            thread.join()


def wanted(application: str, rollouts: list[Rollout], inline: int) -> Wanted:
    """The series after rollouts of ``weather_agent``, and as many of ``inline``, whose servers are itself."""
    n = len(rollouts)
    tools = sum(item["type"] == "function_call" for rollout in rollouts for item in rollout.output)
    turns = sum(c["calls"] for rollout in rollouts for c in rollout["model_usage"]["model"].values())
    weather = {"seed_session": n, "tools/get_weather": tools, "verify": n, "close_session": n}
    counts: dict[str, dict[str, float]] = {
        "weather": weather,
        "policy": {"v1/responses": turns},
        "weather_agent": {"run": n},
        "inline": {"run": inline},
        "broken": {"v1/responses": BROKEN},
    }
    by_route = [({"deployment": d, "route": op}, n) for d, ops in counts.items() for op, n in ops.items()]
    in_all = [({"deployment": d}, sum(ops.values())) for d, ops in counts.items()]
    values: dict[str, list[tuple[dict[str, str], float]]] = {
        "request_counter_total": [*by_route, *in_all],
        "error_counter_total": [({"deployment": "broken"}, BROKEN), ({"deployment": "policy"}, 0)],
        "processing_latency_ms_bucket": [({**labels, "le": "+Inf"}, n) for labels, n in by_route],
        "queued_queries": [({"deployment": "slow"}, HELD - 2), ({"deployment": "policy"}, 0)],
    }
    found = {
        (f"ray_serve_deployment_{name}", frozenset({**labels, "application": application}.items())): value
        for name, series in values.items()
        for labels, value in series
    }
    slow = frozenset({"deployment": "slow", "application": application}.items())
    found["ray_serve_replica_processing_queries", slow] = 2
    return found


def found(text: str, wanted: Wanted) -> Wanted:
    """What these series are on a page of Ray's metrics.

    Left out is the ping of each process by which Serve's handle finds the replicas. Its route is empty, or
    that of the HTTP request in which it was sent.
    """
    families = text_string_to_metric_families(text)
    samples: list[Any] = [s for each in families for s in each.samples if _is_ours(s.labels)]
    return {
        (name, labels): sum(s.value for s in samples if s.name == name and labels <= s.labels.items())
        for name, labels in wanted
    }


def _is_ours(labels: dict[str, str]) -> bool:
    return labels.get("route", "none")[:1] not in ("", "/")

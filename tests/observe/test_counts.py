"""What is counted, in one process and on a cluster: as many rollouts and calls as there were."""

from __future__ import annotations

import time
import urllib.request
from collections import Counter as Tally
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gym_serve import Gym
from gym_serve.observe.catalogue import METRICS
from gym_serve.routing.metrics import PUBLISH_SECONDS

ROWS = "environments/simple_weather/data/example.jsonl"


@pytest.fixture(autouse=True)
def _fresh() -> None:
    for metric in METRICS:
        metric.clear()


def counted(*names: str) -> dict[str, dict[tuple[str, ...], float]]:
    points = [point for metric in METRICS for point in metric.points()]
    return {
        name: {tuple(p.labels.values()): p.value for p in points if p.name == f"gym_serve_{name}"}
        for name in names
    }


def test_every_rollout_and_call_is_counted_once() -> None:
    with Gym.from_graph("graphs/weather.yaml", ray=False) as gym:
        rollouts = gym.run(ROWS, repeats=3)
        [agent] = {rollout["agent_ref"]["name"] for rollout in rollouts if "agent_ref" in rollout} or {
            "weather_agent"
        }
    found = counted(
        "rollouts_total", "calls_total", "tool_calls_total", "rollout_turns_sum", "rollout_reward_sum"
    )
    assert found["rollouts_total"] == {(agent, "scored"): len(rollouts)}
    tools = Tally(
        item["name"]
        for rollout in rollouts
        for item in rollout["response"]["output"]
        if item["type"] == "function_call"
    )
    turns = sum(c["calls"] for rollout in rollouts for c in rollout["model_usage"]["model"].values())
    assert found["tool_calls_total"] == {("weather", "get_weather", "200"): tools["get_weather"]}
    calls = found["calls_total"]
    for op, count in {"seed_session": len(rollouts), "verify": len(rollouts)}.items():
        assert calls["weather", op, "200"] == count
    assert calls["policy", "v1/responses", "200"] == turns
    assert found["rollout_turns_sum"] == {(agent,): turns}
    assert found["rollout_reward_sum"] == {(agent,): pytest.approx(sum(r["reward"] for r in rollouts))}


def test_failures_and_unknown_names_are_counted_under_few_labels() -> None:
    with Gym.from_graph("graphs/weather.yaml", ray=False) as gym:
        row: dict[str, Any] = {
            "responses_create_params": {"input": "How is Paris?"},
            "verifier_metadata": {"cities": 3},
        }
        [rollout] = gym.run([row])
    assert "failure" in rollout
    found = counted("rollouts_total", "failures_total")
    assert set(found["rollouts_total"].values()) == {1}
    [(_, kind, stage)] = found["failures_total"]
    assert (kind, stage) == (rollout["failure"]["kind"], rollout["failure"]["stage"])


def test_the_metrics_of_a_graph_reach_rays_endpoint(cluster: str) -> None:
    import ray

    name = "counted"
    with Gym.from_graph("graphs/weather.yaml", name=name) as gym:
        rollouts = gym.run(ROWS, repeats=2)
        [node] = [node for node in ray.nodes() if node["Alive"]]
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        deadline = time.monotonic() + 60
        found = 0.0
        while found < len(rollouts) and time.monotonic() < deadline:
            time.sleep(PUBLISH_SECONDS / 5)
            found = _sum_of(url, "ray_gym_serve_rollouts_total", graph=name, outcome="scored")
        assert found == len(rollouts)
        assert _sum_of(url, "ray_gym_serve_call_seconds_count", graph=name, op="verify") == len(rollouts)


def _sum_of(url: str, name: str, **labels: str) -> float:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )

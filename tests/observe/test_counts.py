"""What is counted, in one process and on a cluster: as many rollouts and calls as there were."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import urllib.request
from collections import Counter as Tally
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support import panels
from support.in_process import serving
from support.processes import children_titled

from gym_serve import Gym, ModelServer, ServerRunner, load_graph, resolve
from gym_serve.cluster.serve_metrics import PUBLISH_SECONDS
from gym_serve.deployments.scripted_model import ScriptedModel
from gym_serve.observe.catalogue import METRICS, RolloutMeter
from gym_serve.servers.transport import Call, encode
from gym_serve.types.errors import NotFound, Unavailable

MESSAGE = {
    "type": "message",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "Hello", "annotations": []}],
}
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


def test_tokens_are_counted_as_the_rollouts_tell_them() -> None:
    with Gym.from_graph("graphs/weather.yaml", ray=False) as gym:
        rollouts = gym.run(ROWS, repeats=2)
    told = Tally[str]()
    for rollout in rollouts:
        told.update(rollout["model_usage"]["model"]["policy"])
    assert counted("tokens_total")["tokens_total"] == {
        ("policy", "input"): told["input_tokens"],
        ("policy", "cached"): told["cached_tokens"],
        ("policy", "output"): told["output_tokens"],
    }


def test_failures_and_unknown_names_are_counted_under_few_labels() -> None:
    with Gym.from_graph("graphs/weather.yaml", ray=False) as gym:
        row: dict[str, Any] = {
            "responses_create_params": {"input": "How is Paris?"},
            "verifier_metadata": {"cities": 3},
        }
        [rollout] = gym.run([row])
        for name in ("tools/made_up", "also_made_up"):
            with pytest.raises(NotFound):
                gym.call("weather", name, {})
    assert "failure" in rollout
    found = counted("rollouts_total", "failures_total", "calls_total", "tool_calls_total")
    assert set(found["rollouts_total"].values()) == {1}
    [(_, kind, stage)] = found["failures_total"]
    assert (kind, stage) == (rollout["failure"]["kind"], rollout["failure"]["stage"])
    assert found["calls_total"]["weather", "unknown", "404"] == 1
    assert found["calls_total"]["weather", "tools/unknown", "404"] == 1
    assert {tool for _, tool, _ in found["tool_calls_total"]} <= {"get_weather", "unknown"}


def test_tool_calls_that_an_agent_does_not_pass_on_are_counted() -> None:
    called = [
        {"type": "function_call", "call_id": f"c{number}", "name": name, "arguments": arguments}
        for number, (name, arguments) in enumerate(
            [
                ("made_up", "{}"),
                ("also/made up", "{}"),
                ("get_weather", "{"),
                ("get_weather", '{"city": "Rome"}'),
            ]
        )
    ]
    policy = {"type": "scripted_model", "script": [called, [MESSAGE]]}
    with Gym.from_graph("graphs/weather.yaml", overrides={"models.policy": policy}, ray=False) as gym:
        [rollout] = gym.run([{"responses_create_params": {"input": "How is Rome?"}}])
    assert "failure" not in rollout
    assert counted("tool_calls_total")["tool_calls_total"] == {
        ("weather", "unknown", "404"): 2,
        ("weather", "get_weather", "422"): 1,
        ("weather", "get_weather", "200"): 1,
    }


def test_calls_to_a_server_behind_a_url_are_counted_once() -> None:
    graph = load_graph("graphs/weather.yaml")
    with serving(lambda url: {"": resolve(graph.spec, source=graph.path)}) as url:
        remote = {"type": "http", "url": f"{url}/weather"}
        with Gym.from_graph("graphs/weather.yaml", overrides={"resources.weather": remote}, ray=False) as gym:
            rollouts = gym.run(ROWS, repeats=2)
    found = counted("rollouts_total", "calls_total", "verify_seconds_count")
    assert found["rollouts_total"] == {("weather_agent", "scored"): len(rollouts)}
    assert found["verify_seconds_count"] == {("weather",): len(rollouts)}
    assert found["calls_total"]["weather", "seed_session", "200"] == len(rollouts)


def test_new_weights_are_timed_and_their_version_is_shown() -> None:
    with Gym.from_graph("graphs/weather.yaml", ray=False) as gym:
        assert "policy_version{" not in gym.metrics()
        gym.policy.update_weights("policy", "step-6")
        gym.policy.update_weights("policy", "step-7")
        text = gym.metrics()
    assert _sum_in(text, "gym_serve_weights_update_seconds_count", model="policy") == 2
    assert _sum_in(text, "gym_serve_policy_version", model="policy") == 7


class Waiting(ModelServer):
    """Answers once it is allowed to."""

    allowed = threading.Event()

    def check_endpoint(self, endpoint: Any) -> None:
        """Rows may name any, as it calls none."""

    async def responses(self, body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.to_thread(self.allowed.wait, 60)
        return {"id": "r", "object": "response", "output": [MESSAGE], "usage": None}


@pytest.mark.parametrize("endpoint", [None, {"base_url": "http://127.0.0.1:9/v1"}])
def test_the_rollouts_in_flight_are_shown(endpoint: dict[str, str] | None) -> None:
    """Those at an endpoint of their own as well."""
    Waiting.allowed.clear()
    overrides = {"models.policy": {"type": Waiting}}
    with Gym.from_graph("graphs/weather.yaml", overrides=overrides, ray=False) as gym:
        options: Any = {} if endpoint is None else {"endpoint": endpoint}
        running = threading.Thread(target=gym.run, args=(ROWS,), kwargs={"limit": 3, **options})
        running.start()
        shown = 0.0
        deadline = time.monotonic() + 30
        while shown != 3 and time.monotonic() < deadline:
            shown = _sum_in(gym.metrics(), "gym_serve_driver_in_flight", graph="weather")
        Waiting.allowed.set()
        running.join()
        assert shown == 3
        assert _sum_in(gym.metrics(), "gym_serve_driver_in_flight", graph="weather") == 0


def test_a_graph_in_this_process_renders_its_metrics() -> None:
    with Gym.from_graph("graphs/weather.yaml", ray=False) as gym:
        rollouts = gym.run(ROWS)
        text = gym.metrics()
    assert _sum_in(text, "gym_serve_rollouts_total", graph="weather", outcome="scored") == len(rollouts)
    assert _sum_in(text, "gym_serve_sessions", server="weather") == 0
    assert _sum_in(text, "gym_serve_driver_in_flight", graph="weather") == 0


def test_lost_sessions_are_counted_by_their_server() -> None:
    meter = RolloutMeter("agent", "shop")
    for kind in ("session_lost", "session_lost", "overloaded"):
        meter.record({"failure": {"kind": kind, "stage": "tool"}}, turns=1, seconds=0.1)
    found = counted("sessions_lost_total", "failures_total")
    assert found["sessions_lost_total"] == {("shop",): 2}
    assert found["failures_total"] == {
        ("agent", "session_lost", "tool"): 2,
        ("agent", "overloaded", "tool"): 1,
    }


@pytest.mark.parametrize("verdict", [{}, {"reward": None}, {"reward": "1"}, {"reward": 10**400}])
def test_an_agents_verdict_without_a_reward_is_no_scored_rollout(verdict: dict[str, Any]) -> None:
    RolloutMeter("agent", "shop").record(verdict, turns=1, seconds=0.1)
    found = counted("rollouts_total", "rollout_turns_count", "rollout_reward_count")
    assert found["rollouts_total"] == {("agent", "failed"): 1}
    assert found["rollout_turns_count"] == {("agent",): 1}
    assert found["rollout_reward_count"] == {}


def test_what_a_server_at_a_url_says_of_a_failure_makes_few_labels() -> None:
    for number in range(100):
        stage = f"stage {number}"
        for kind in ("unavailable", f"{stage}_timeout"):
            RolloutMeter("agent", "shop").record({"failure": {"kind": kind, "stage": stage}}, 1, 0.1)
    assert counted("failures_total")["failures_total"] == {
        ("agent", "unavailable", "unknown"): 100,
        ("agent", "unknown_timeout", "unknown"): 100,
    }


async def test_a_call_whose_caller_leaves_is_counted_once() -> None:
    class Slow(ModelServer):
        async def responses(self, body: dict[str, Any]) -> dict[str, Any]:
            await asyncio.sleep(60)
            return {}

    runner = ServerRunner(Slow(name="slow"))
    call = asyncio.create_task(runner.dispatch(Call("v1/responses", b'{"input": "Hi"}')))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert counted("calls_total")["calls_total"] == {("slow", "v1/responses", "499"): 1}


@pytest.mark.parametrize("op", ["v1/responses", "v1/chat/completions", "v1/messages"])
async def test_the_tokens_of_a_stream_are_counted(op: str) -> None:
    runner = ServerRunner(ScriptedModel(name="policy", script=[[MESSAGE]]))
    asked = {"input": "Hi", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
    _ = [chunk async for chunk in runner.stream(Call(op, encode(asked)))]
    found = counted("tokens_total", "time_to_first_token_seconds_count")
    assert found["tokens_total"]["policy", "input"] > 0
    assert found["tokens_total"]["policy", "output"] > 0
    assert found["time_to_first_token_seconds_count"] == {("policy",): 1}


@pytest.fixture(scope="module")
def counted_gym(deploy: Any) -> Gym:
    gym: Gym = deploy(panels.GRAPH, name="counted")
    return gym


def test_the_metrics_of_a_graph_reach_rays_endpoint(counted_gym: Gym, tmp_path: Path) -> None:
    """Over each edge and entry: from here, over HTTP, and by a Gym that joins the graph.

    Serve's own series, which its dashboard shows, say the same; and also what runs and waits at the moment.
    """
    gym = counted_gym
    with panels.held(gym, tmp_path / "held"), Gym.attach("counted") as attached:
        made = {}
        for agent in ("weather_agent", "inline"):
            made[agent] = gym.run(ROWS, repeats=2, agent=agent) + attached.run(ROWS, agent=agent)
            with Gym.connect(gym.url) as remote:
                made[agent] += remote.run(ROWS, agent=agent)
        everything = [rollout for rollouts in made.values() for rollout in rollouts]
        turns = sum(c["calls"] for rollout in everything for c in rollout["model_usage"]["model"].values())
        ours: list[tuple[str, dict[str, str], int]] = [
            ("verify_seconds_count", {"server": "weather"}, len(everything)),
            ("calls_total", {"server": "policy", "op": "v1/responses", "status": "200"}, turns),
            ("driver_in_flight", {}, 0),
        ]
        for agent, rollouts in made.items():
            ours.append(("rollouts_total", {"agent": agent, "outcome": "scored"}, len(rollouts)))
            ours.append(("rollout_seconds_count", {"agent": agent}, len(rollouts)))
        for _ in range(panels.BROKEN):
            with pytest.raises(Unavailable):
                gym.call("broken", "v1/responses", {"input": "Hi"})
        serves = panels.wanted("counted", made["weather_agent"], inline=len(made["inline"]))

        def told(text: str) -> list[float]:
            return [_sum_in(text, f"ray_gym_serve_{n}", graph="counted", **labels) for n, labels, _ in ours]

        expected = [number for _, _, number in ours]
        text = _when(_exported(), lambda t: told(t) == expected and panels.found(t, serves) == serves)
    assert told(text) == expected
    assert panels.found(text, serves) == serves


def _exported() -> str:
    """Where Ray shows the metrics of this node."""
    import ray

    [node] = [node for node in ray.nodes() if node["Alive"]]
    return f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"


def test_a_replica_loses_what_it_had_not_passed_on_if_it_is_killed_and_nothing_if_it_is_stopped(
    counted_gym: Gym,
) -> None:
    gym, url = counted_gym, _exported()

    def scored(text: str) -> float:
        labels = {"agent": "weather_agent", "outcome": "scored"}
        return _sum_in(text, "ray_gym_serve_rollouts_total", graph="counted", **labels)

    before = scored(_when(url, lambda text: True))
    first = before + len(gym.run(ROWS, agent="weather_agent"))
    assert scored(_when(url, lambda text: scored(text) == first)) == first
    [pid] = children_titled("ray::ServeReplica:counted:weather_agent")
    os.kill(pid, signal.SIGKILL)
    both = first + len(gym.run(ROWS, agent="weather_agent", attempts=5))
    gym.shutdown()
    assert scored(_when(url, lambda text: scored(text) >= both)) == both


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [21, 24, 27])
def test_a_killed_replica_loses_at_most_its_last_15_seconds(deploy: Any, seconds: int) -> None:
    """It hands its numbers to Ray every 5 seconds, and Ray passes them on every 10."""
    name = f"killed-{seconds}"
    gym = deploy("graphs/weather.yaml", name=name)
    url = _exported()
    [pid] = children_titled(f"ray::ServeReplica:{name}:weather_agent")
    ended: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        gym.run(ROWS, limit=1)
        ended.append(time.monotonic())
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    time.sleep(2 * _SCRAPED)

    text = _when(url, lambda text: True)
    counted = int(_sum_in(text, "ray_gym_serve_rollouts_total", graph=name, outcome="scored"))
    lost = [killed - moment for moment in ended[counted:]]
    print(
        f"{counted} of {len(ended)} are counted; the first one lost ended {max(lost, default=0):.1f} s before"
    )
    assert 0 < counted <= len(ended)
    assert counted >= sum(moment < killed - PUBLISH_SECONDS - _SCRAPED for moment in ended)


_SCRAPED = 10.0
"""Seconds after which Ray passes metrics on, by default."""


def _when(url: str, is_there: Callable[[str], bool]) -> str:
    """The page once it has what is waited for; the last one if that never comes."""
    deadline = time.monotonic() + 120
    while True:
        with urllib.request.urlopen(url, timeout=10) as answer:
            text: str = answer.read().decode()
        if is_there(text) or time.monotonic() > deadline:
            return text
        time.sleep(PUBLISH_SECONDS / 5)


def _sum_in(text: str, name: str, **labels: str) -> float:
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )

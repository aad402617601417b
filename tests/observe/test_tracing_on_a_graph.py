"""One trace over processes: replicas, inline servers, HTTP both ways, and a harness.

What else tells of the same calls is compared with it: the rollout's timeline and the access log.
"""

import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest
from support.collector import Collector, Received, tree
from support.traced import ROW, TREE, graph

from gym_serve import Gym
from gym_serve.cluster.reports import NodeLogs
from gym_serve.observe import tracing

EDGES = ("replica", "inline", "http")
HARNESS = """
import json, os, urllib.request
body = json.dumps({"model": "any", "messages": [{"role": "user", "content": "Hello"}]}).encode()
headers = {"content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
print(os.environ["TRACEPARENT"])
urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()
"""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        yield collector
        tracing.stop()


@pytest.fixture(scope="module")
def gym(cluster: str, deploy: Any, collector: Collector) -> Gym:
    url = f"{cluster}/traced"
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    common = {"type": "simple_agent", "runtime_env": {"env_vars": variables}}
    harness = {
        **common,
        "type": "harness_agent",
        "gateway_url": url,
        "command": [sys.executable, "-c", HARNESS],
    }
    given = graph(
        replica={**common, "model": "policy", "resources": "env"},
        inline={**common, "model": "policy", "resources": "env", "inline": ["policy", "env"]},
        http={**common, "model": "policy_http", "resources": "env_http"},
        harness={**harness, "model": "policy", "resources": "env"},
    )
    for servers in (given["models"], given["resources"]):
        for server in servers.values():
            server["runtime_env"] = common["runtime_env"]
    given["logs"] = {"format": "json", "access": True}
    given["models"]["policy_http"] = {"type": "http", "url": f"{url}/policy"}
    given["resources"]["env_http"] = {"type": "http", "url": f"{url}/env"}
    return deploy(given, name="traced")


def trace_of(collector: Collector, rollout: str, spans: int) -> list[Received]:
    """The spans of the trace of a rollout, once as many have arrived."""
    tracing.flush()
    deadline = time.monotonic() + 30
    while True:
        ids = {each.trace for each in collector.spans if each.attributes.get("gym_serve.rollout") == rollout}
        found = [each for each in collector.spans if each.trace in ids]
        if len(found) >= spans or time.monotonic() > deadline:
            assert len(ids) == 1
            return found
        time.sleep(0.1)


@pytest.mark.parametrize("edge", EDGES)
def test_a_rollout_over(edge: str, gym: Gym, collector: Collector) -> None:
    [rollout] = gym.run([{**ROW, "_ng_task_index": EDGES.index(edge)}], agent=edge)
    assert rollout["reward"] == 1.0
    wanted = TREE.replace("AGENT", edge)
    wanted = wanted.replace("chat policy", "chat policy_http") if edge == "http" else wanted
    spans = trace_of(collector, rollout["_ng_rollout_id"], len(wanted.splitlines()))
    assert "\n".join(tree(spans)) == wanted
    run = next(each for each in spans if each.name == "run")
    assert run.resource["service.namespace"] == "traced"
    processes = {each.resource["service.instance.id"] for each in spans}
    assert len(processes) == (3 if edge == "inline" else 5)


def test_a_driver_that_attaches_traces_as_the_graph_says(gym: Gym, collector: Collector) -> None:
    with Gym.attach("traced") as attached:
        [rollout] = attached.run([{**ROW, "_ng_task_index": 10}], agent="replica")
    spans = trace_of(collector, rollout["_ng_rollout_id"], len(TREE.splitlines()))
    assert "\n".join(tree(spans)) == TREE.replace("AGENT", "replica")


def test_a_driver_that_connects_over_http_traces_as_the_graph_says(gym: Gym, collector: Collector) -> None:
    with Gym.connect(gym.url) as connected:
        [rollout] = connected.run([{**ROW, "_ng_task_index": 11}], agent="replica")
    spans = trace_of(collector, rollout["_ng_rollout_id"], len(TREE.splitlines()))
    assert "\n".join(tree(spans)) == TREE.replace("AGENT", "replica")


@pytest.mark.parametrize("edge", EDGES)
def test_the_timeline_tells_what_the_trace_tells(edge: str, gym: Gym, collector: Collector) -> None:
    row = {**ROW, "_ng_task_index": 30 + EDGES.index(edge)}
    [rollout] = gym.run([row], agent=edge)
    assert rollout.timeline is not None
    steps = [(s.kind, s.stage, s.name, s.server) for s in rollout.timeline.steps]
    policy, env = ("policy_http", "env_http") if edge == "http" else ("policy", "env")
    assert steps == [
        ("seed", None, None, env),
        ("model", None, None, policy),
        ("tool", None, "add", env),
        ("model", None, None, policy),
        ("model", "verify", None, "judge"),
        ("verify", None, None, env),
    ]
    spans = trace_of(collector, rollout["_ng_rollout_id"], len(TREE.splitlines()))
    clients = [s for s in spans if s.kind == "client" and s.name.startswith("chat policy")]
    own = [step for step in rollout.timeline.steps if step.kind == "model" and step.stage is None]
    for step, seen in zip(own, sorted(clients, key=lambda s: s.start), strict=True):
        began = seen.start / 1e9 - rollout.timeline.began
        assert step.start - 0.5 < began < step.end + 0.5  # two clocks, read one after the other
    if edge == "replica":
        replicas = {s.resource["service.instance.id"] for s in spans if s.kind == "server"}
        places = {step.replica for step in rollout.timeline.steps} | {rollout.timeline.replica}
        assert places == replicas


def test_the_access_log_has_each_call_as_json(gym: Gym) -> None:
    [rollout] = gym.run([{**ROW, "_ng_task_index": 40}], agent="replica")
    servers = [("traced", server) for server in ("replica", "policy", "judge", "env")]
    records = NodeLogs(servers, rollout=rollout["_ng_rollout_id"]).read()
    calls = [orjson.loads(record.text) for record in records]
    assert Counter((call["server"], *call["message"].split()[:2]) for call in calls) == {
        ("replica", "run", "200"): 1,
        ("env", "seed_session", "200"): 1,
        ("env", "tools/add", "200"): 1,
        ("env", "verify", "200"): 1,
        ("env", "close_session", "200"): 1,
        ("policy", "v1/responses", "200"): 2,
        ("judge", "v1/responses", "200"): 1,
    }
    assert {call["graph"] for call in calls} == {"traced"}
    assert all(call["replica"] and call["request"] for call in calls)
    assert len({call["session"] for call in calls if call["server"] == "env" and call.get("session")}) == 1


def test_a_client_s_span_is_the_parent(gym: Gym, collector: Collector) -> None:
    trace, parent = "c" * 32, "d" * 16
    row = {**ROW, "_ng_rollout_id": "of-a-client", "agent_ref": {"name": "replica"}}
    headers = {"traceparent": f"00-{trace}-{parent}-01"}
    assert httpx.post(f"{gym.url}/run", json=row, headers=headers).json()["reward"] == 1.0
    spans = trace_of(collector, "of-a-client", len(TREE.splitlines()) - 2)
    [run] = [each for each in spans if each.name == "run"]
    assert (run.trace, run.parent) == (trace, parent)


def test_a_client_that_does_not_sample_decides(gym: Gym, collector: Collector) -> None:
    row = {**ROW, "_ng_rollout_id": "not-sampled", "agent_ref": {"name": "replica"}}
    headers = {"traceparent": f"00-{'e' * 32}-{'d' * 16}-00"}
    assert httpx.post(f"{gym.url}/run", json=row, headers=headers).json()["reward"] == 1.0
    assert not any(each.trace == "e" * 32 for each in collector.spans)


def test_the_calls_of_a_harness_belong_to_its_rollout(gym: Gym, collector: Collector) -> None:
    [rollout] = gym.run([{**ROW, "_ng_task_index": 20}], agent="harness")
    assert rollout["reward"] == 1.0, rollout.failure
    spans = trace_of(collector, rollout["_ng_rollout_id"], 18)
    [episode] = [each for each in spans if each.name == "invoke_agent harness"]
    assert rollout["harness"]["output"].startswith(f"00-{episode.trace}-{episode.id}-")
    assert "rollouts/v1/chat/completions" in {each.name for each in spans}

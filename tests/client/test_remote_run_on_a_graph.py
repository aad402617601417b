"""Runs on a cluster: gateways find the run of another one, one of them is killed, and a policy is steered."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest
from support.processes import replicas_of
from support.remote_runs import graph, rows
from support.upstream import ChatEndpoint
from support.waiting import until
from typer.testing import CliRunner

from gym_serve import Gym, InvalidRequest
from gym_serve.cli import local_ray, main
from gym_serve.client.deployed import launch
from gym_serve.graph import GraphSpec, resolve

NAME, TOKEN = "remote", "the-token-of-the-graph"
JSON = dict[str, Any]


@pytest.fixture(scope="module")
def endpoints() -> Iterator[list[ChatEndpoint]]:
    with ChatEndpoint("first") as first, ChatEndpoint("second") as second:
        yield [first, second]


@pytest.fixture(scope="module")
def url(cluster: str, endpoints: list[ChatEndpoint]) -> Iterator[str]:
    """A graph with two gateways."""
    os.environ["REMOTE_TOKEN"] = TOKEN
    with Gym.from_graph(spec(endpoints[0]), name=NAME) as gym:
        yield gym.url


def spec(endpoint: ChatEndpoint, **gateway: Any) -> JSON:
    gateways = {"num_replicas": 2, "health_check_period_s": 0.5, **gateway}
    found = graph(auth_token="${REMOTE_TOKEN}", gateway=gateways, default_agent="doer")
    found["models"]["policy"] = {"type": "chat_model", "base_url": endpoint.url, "model": "m"}
    found["agents"]["asker"] = {"type": "simple_agent", "model": "policy", "resources": "nothing"}
    return found


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {TOKEN}"}
    # A connection for each request, so that the proxy gives each to any gateway.
    with httpx.Client(
        base_url=url, headers=headers, timeout=60, limits=httpx.Limits(max_keepalive_connections=0)
    ) as client:
        yield client


def lines_of(answer: httpx.Response) -> list[JSON]:
    assert answer.status_code == 200, answer.text
    return [orjson.loads(line) for line in answer.content.splitlines()]


def test_any_gateway_goes_on_with_a_run(http: httpx.Client) -> None:
    key = {"idempotency-key": "a-key-of-one-request"}
    body = {"rows": rows(20), "stream": False}
    runs = {http.post("/rollouts", json=body, headers=key).json()["run"] for _ in range(6)}
    assert len(runs) == 1
    (run,) = runs
    first = lines_of(http.get(f"/rollouts/{run}"))
    assert first[-1]["end"] == {"rollouts": 20, "failed": 0}
    assert all(lines_of(http.get(f"/rollouts/{run}")) == first for _ in range(5))
    assert http.post("/rollouts", json={"rows": rows(1)}, headers=key).status_code == 422
    assert http.delete(f"/rollouts/{run}").status_code == 200
    assert {http.get(f"/rollouts/{run}").status_code for _ in range(4)} == {404}
    assert http.get("/rollouts/nobody.x").json()["error"]["code"] == "session_lost"
    open_run = http.post("/rollouts", json={"open": True}).json()["run"]
    for number, row in enumerate(rows(6)):
        answer = http.post(f"/rollouts/{open_run}/rows", json={"first": number, "rows": [row]})
        assert answer.json() == {"rows": number + 1}
    http.post(f"/rollouts/{open_run}/rows", json={"first": 6, "rows": [], "open": False})
    numbers = [line["rollout"]["number"] for line in lines_of(http.get(f"/rollouts/{open_run}"))[1:-1]]
    assert sorted(numbers) == list(range(6))


def test_status_of_a_graph_whose_gateways_have_runs(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gateways listen to one another then, but report no load."""
    http.post("/rollouts", json={"rows": rows(1), "stream": False})
    monkeypatch.setattr(local_ray, "connect", lambda address: None)
    result = CliRunner().invoke(main, ["status"])
    assert result.exit_code == 0, result.output
    assert f"/{NAME}" in result.stdout


def test_rollouts_while_a_gateway_is_killed_and_both_are_replaced(
    url: str, endpoints: list[ChatEndpoint]
) -> None:
    found: Counter[int] = Counter()

    async def collect(gym: Gym) -> None:
        async for rollout in gym.rollouts(rows(1500, act="slow"), concurrency=20, agent="doer"):
            assert rollout.failure is None, rollout.failure
            found[rollout["number"]] += 1

    async def disturb() -> None:
        await until(lambda: found.total() >= 100)
        (killed, *_) = sorted(replicas_of(NAME)["gateway"])
        os.kill(killed, signal.SIGKILL)
        await until(lambda: len(replicas_of(NAME)["gateway"] - {killed}) == 2)
        before = replicas_of(NAME)["gateway"]
        changed = resolve(GraphSpec(**spec(endpoints[0], run_ttl=200.0)))
        await asyncio.to_thread(launch, changed, NAME, f"/{NAME}", owned=True)
        assert not before & replicas_of(NAME)["gateway"]

    async def both(gym: Gym) -> None:
        await asyncio.gather(collect(gym), disturb())

    with Gym.connect(url, TOKEN) as gym:
        asyncio.run(both(gym))
    assert found == dict.fromkeys(range(1500), 1)


def test_a_policy_that_is_steered(url: str, endpoints: list[ChatEndpoint]) -> None:
    row = {"prompt": "Which?", "agent_ref": {"name": "asker"}}
    with Gym.connect(url, TOKEN) as gym:
        assert gym.policy_version is None
        assert gym.run([row])[0].output_text == "first"
        asyncio.run(gym.pause("wait"))
        gym.set_model_endpoints("policy", [endpoints[1].url], model_name="m2", version="7")
        assert gym.policy_version == "7"
        before = len(endpoints[1].requests)

        async def held() -> JSON:
            episode = asyncio.ensure_future(gym.arun([row]))
            await asyncio.sleep(0.5)
            assert len(endpoints[1].requests) == before
            await gym.resume()
            return (await episode)[0]

        rollout = asyncio.run(held())
        assert rollout["response"]["output"][0]["content"][0]["text"] == "second"
        assert endpoints[1].requests[-1]["model"] == "m2"
        gym.update_weights("policy", "8")
        assert gym.policy_version == "8"
        with pytest.raises(InvalidRequest, match="base_urls"):
            gym.set_model_endpoints("policy", ["file:///etc/passwd"])
    answer = httpx.post(f"{url}/policy/policy/pause", json={"mode": "keep"}, timeout=30)
    assert answer.status_code == 401

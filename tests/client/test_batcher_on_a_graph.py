"""A graph at a URL, on a cluster: one of its gateways is killed, all are replaced, a policy is steered."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.processes import replicas_of
from support.remote_agents import graph, rows
from support.upstream import ChatEndpoint
from support.waiting import until

from gym_serve import AsyncGym, Gym, InvalidRequest
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
        changed = resolve(GraphSpec(**spec(endpoints[0], max_request_bytes=2**20)))
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
        assert gym.policy.version() is None
        assert gym.run([row])[0].output_text == "first"
        gym.policy.pause("wait")
        gym.policy.set_endpoints("policy", [endpoints[1].url], model_name="m2", version="7")
        assert gym.policy.version() == "7"
        before = len(endpoints[1].requests)

        async def held() -> JSON:
            episode = asyncio.ensure_future(AsyncGym.of(gym).run([row]))
            await asyncio.sleep(0.5)
            assert len(endpoints[1].requests) == before
            await AsyncGym.of(gym).policy.resume()
            return (await episode)[0]

        rollout = asyncio.run(held())
        assert rollout["response"]["output"][0]["content"][0]["text"] == "second"
        assert endpoints[1].requests[-1]["model"] == "m2"
        gym.policy.update_weights("policy", "8")
        assert gym.policy.version() == "8"
        with pytest.raises(InvalidRequest, match="base_urls"):
            gym.policy.set_endpoints("policy", ["file:///etc/passwd"])
    answer = httpx.post(f"{url}/policy/policy/pause", json={"mode": "keep"}, timeout=30)
    assert answer.status_code == 401

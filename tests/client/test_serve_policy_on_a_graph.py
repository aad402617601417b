"""Policies of a trainer on a cluster: every replica's requests come to it, or go where rows say."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from support.letters import Engine, HangingEngine, LettersModel, answers
from support.upstream import ChatEndpoint

from gym_serve import AsyncGym, BadRequest, Gym, PolicyAnswer, PolicyRequest

KEY = "sk-of-the-row-1234567890"
ROW: dict[str, Any] = {"prompt": "?", "options": [{"A": "one"}, {"B": "two"}], "expected_answer": "A"}


@pytest.fixture(scope="module")
def gym(deploy: Callable[..., Gym]) -> Gym:
    return deploy(
        {
            "models": {
                "policy": {"type": LettersModel, "tokenizer": "letters", "num_replicas": 2},
                "named": {
                    "type": "chat_model",
                    "base_url": "http://127.0.0.1:9/v1",
                    "model": "m",
                    "row_endpoints": ["127.0.0.1"],
                },
            },
            "resources": {"mcqa": {"type": "mcqa"}},
            "agents": {
                "agent": {"type": "simple_agent", "model": "policy", "resources": "mcqa", "inline": ["mcqa"]},
                "other": {
                    "type": "simple_agent",
                    "model": "named",
                    "resources": "mcqa",
                    "inline": ["mcqa", "named"],
                },
            },
        },
        name="served",
    )


def test_a_function_and_then_an_actor_serve_two_replicas(gym: Gym) -> None:
    sizes: list[int] = []

    def generate(requests: list[PolicyRequest]) -> list[PolicyAnswer]:
        sizes.append(len(requests))
        return answers(requests)

    gym.policy.serve("policy", generate)
    rollouts = gym.run([ROW], repeats=12, agent="agent")
    assert [(rollout.failure, rollout.reward) for rollout in rollouts] == [(None, 1.0)] * 12
    assert sum(sizes) == 12
    actor = ray.remote(num_cpus=0)(Engine).remote()
    gym.policy.serve("policy", actor)
    rollouts = gym.run([ROW], repeats=12, agent="agent")
    assert [rollout.failure for rollout in rollouts] == [None] * 12
    assert rollouts[0]["response"]["output"][-1]["weight_version"] == "4"
    assert ray.get(actor.asked.remote()) == 12
    # Nobody takes the policy's place over HTTP.
    assert httpx.post(f"{gym.url}/policy/each/policy/take", json={}, timeout=60).status_code == 404
    refused = pytest.raises(BadRequest, match=r"policy\.serve needs a graph on a Ray cluster")
    with Gym.connect(gym.url) as connected, refused:
        connected.policy.serve("policy", generate)
    ray.kill(actor)


async def test_a_cancelled_episode_cancels_its_generation_in_the_actor(gym: Gym) -> None:
    actor = ray.remote(num_cpus=0)(HangingEngine).remote()
    await asyncio.to_thread(gym.policy.serve, "policy", actor, max_batch=1)
    run = asyncio.ensure_future(AsyncGym.of(gym).run([ROW], repeats=2, agent="agent"))
    while (await actor.counts.remote())[0] < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    while (await actor.counts.remote()) != (2, 2):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    ray.kill(actor)


def test_the_endpoint_of_a_row_reaches_its_model_and_its_key_no_log(gym: Gym) -> None:
    with ChatEndpoint("\\boxed{A}") as endpoint:
        lease = {"base_url": endpoint.url, "api_key": KEY, "model": "lease-7"}
        rollouts = gym.run([ROW], repeats=3, agent="other", endpoint=lease)
    assert [(rollout.failure, rollout.reward) for rollout in rollouts] == [(None, 1.0)] * 3
    assert [headers["authorization"] for headers in endpoint.headers] == [f"Bearer {KEY}"] * 3
    assert KEY not in json.dumps(rollouts)
    logs = Path(os.environ["RAY_TMPDIR"], "ray", "session_latest", "logs")
    written = [path for path in logs.rglob("*") if path.is_file()]
    assert any("served" in path.name for path in written)
    assert not [path for path in written if KEY.encode() in path.read_bytes()]


async def test_what_runs_inside_an_agent_cannot_be_paused_or_moved(gym: Gym) -> None:
    with pytest.raises(BadRequest, match="take it out of `inline` of other"):
        await AsyncGym.of(gym).policy.pause(model="named")
    with pytest.raises(BadRequest, match="take it out of `inline` of other"):
        await AsyncGym.of(gym).policy.set_endpoints("named", ["http://127.0.0.1:10/v1"])
    with pytest.raises(BadRequest, match="take it out of `inline` of other"):
        await AsyncGym.of(gym).policy.update_weights("named", "2")
    await AsyncGym.of(gym).policy.pause(model="policy")
    await AsyncGym.of(gym).policy.resume(model="policy")

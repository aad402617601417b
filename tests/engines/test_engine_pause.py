"""`Policy.pause` with an engine in the graph: its generations stop between two tokens, and go on."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest

from gym_serve import AsyncGym, Gym

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_a_pause_of_an_engine_costs_no_rollout(mode: Literal["keep", "wait", "abort"]) -> None:
    graph: dict[str, Any] = {
        "models": {"policy": {"type": "hf_engine", "extra_body": {"ignore_eos": True}}},
        "resources": {"mcqa": {"type": "mcqa"}},
        "agents": {"agent": {"type": "simple_agent", "model": "policy", "resources": "mcqa"}},
    }
    row = {"prompt": "?", "options": [{"A": "one"}, {"B": "two"}], "expected_answer": "A"}
    with Gym.from_graph(graph, ray=False) as blocking:
        gym = AsyncGym.of(blocking)
        run = asyncio.ensure_future(gym.run([row], repeats=4, params={"max_output_tokens": 300}))
        while (await gym.call("policy", "load"))["running"] < 4:  # noqa: ASYNC110  # it can only be asked
            await asyncio.sleep(0.01)
        await gym.policy.pause(mode)
        running = (await gym.call("policy", "load"))["running"]
        assert running == (4 if mode == "keep" else 0)
        if mode == "keep":
            await asyncio.sleep(0.2)
            assert (await gym.call("policy", "load"))["running"] == 4
        await gym.policy.resume()
        rollouts = await run
    assert [rollout.failure for rollout in rollouts] == [None] * 4
    bundles = [rollout["response"]["output"][-1] for rollout in rollouts]
    assert {len(bundle["generation_token_ids"]) for bundle in bundles} == {300}
    assert {bundle["weight_version"] for bundle in bundles} == {"0"}

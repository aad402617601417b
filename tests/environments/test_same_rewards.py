"""Every environment that ships: two runs of its rows with the scripted policy give the same rewards.

Each run has servers of its own, and all rows of it run at once: a reward that depends on what was loaded
first, on chance or on the clock differs. (`tests/transports` has the same over the other transports.)
"""

import asyncio
from typing import Any

import pytest
from support.everything import JUDGE, OFFLINE, Everything, rows, shipped

pytest.importorskip("lm_eval", reason="needs the extra instruction_following")
pytest.importorskip("reasoning_gym", reason="needs the extra reasoning_gym")

from gym_serve import EnvironmentClient, ModelClient, ServerRunner
from gym_serve.deployments.scripted_model import ScriptedModel
from gym_serve.graph.classes import find_class
from gym_serve.transports import InlineTransport

NEEDS_A_SERVER = {"mcp", "reward_model"}
GUESSED = {"gymnasium"}  # the policy has no script for it


async def run(name: str) -> list[Any]:
    """The rewards, or failures, of six rows with two rollouts each."""
    judge = ModelClient(InlineTransport(ServerRunner(ScriptedModel(script=JUDGE["script"]))))
    settings = {key: judge if value == "judge" else value for key, value in OFFLINE[name].items()}
    env = ServerRunner(find_class("resources", settings.pop("type", name))(name=name, **settings))
    policy = ModelClient(InlineTransport(ServerRunner(ScriptedModel(name="policy"))))
    agent = Everything(model=policy, environments={name: EnvironmentClient(InlineTransport(env))})
    await env.start()
    try:
        tasks = [
            {**row, "_ng_rollout_id": f"{index}-{repeat}"}
            for index, row in enumerate(rows(name, 6))
            for repeat in range(2)
        ]
        rollouts = await asyncio.gather(*map(agent.run, tasks))
    finally:
        await env.stop()
    return [rollout.get("failure", rollout["reward"]) for rollout in rollouts]


@pytest.mark.parametrize("name", OFFLINE)
async def test_two_runs_give_the_same_rewards(name: str) -> None:
    first = await run(name)
    assert all(isinstance(reward, float | int) for reward in first), first
    assert name in GUESSED or any(first), "all rewards are zero"
    assert await run(name) == first


def test_every_environment_that_ships_is_among_them() -> None:
    assert shipped() - NEEDS_A_SERVER == OFFLINE.keys()

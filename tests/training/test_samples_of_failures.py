"""Samples of rollouts that failed: one at least, masked, with what tokens there were."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.bells import CALL, Bell
from support.letters import END, Letters, LettersModel

from gym_serve import Gym, PolicyAnswer, PolicyRequest, ResourcesServer, VerifyRequest
from gym_serve.training import samples
from gym_serve.training.trl import environment_factory, environment_reward
from gym_serve.types.errors import InvalidRequest, ToolFailed

SAID = [*Letters.ids(CALL), END]
TOOL = 3


def calls_and_breaks(requests: list[PolicyRequest]) -> list[PolicyAnswer]:
    if any(TOOL in request.prompt_ids for request in requests):
        raise RuntimeError("the engine is lost")
    return [PolicyAnswer(SAID, [-0.5] * len(SAID)) for _ in requests]


def test_every_failed_rollout_gives_a_masked_sample() -> None:
    graph: dict[str, Any] = {
        "models": {"policy": {"type": LettersModel, "tokenizer": "letters", "policy_timeout": 0.2}},
        "resources": {"bell": {"type": Bell}},
        "agents": {"agent": {"type": "simple_agent", "model": "policy", "resources": "bell"}},
    }
    row = {"prompt": "ring the bell"}
    with Gym.from_graph(graph, ray=False) as gym:
        (unserved,) = gym.run([row])
        gym.policy.serve("policy", calls_and_breaks)
        (broken,) = gym.run([row])
        (late,) = gym.run([row], timeout=0.0001)
    for rollout, failure in ((unserved, "unavailable"), (broken, "unavailable"), (late, "episode_timeout")):
        (sample,) = samples(rollout, pad_token_id=7)
        assert sample.failure == failure
        assert sample.prompt_ids
        assert sample.response_ids
        assert not any(sample.loss_mask)
        assert (sample.reward, sample.task, sample.rollout_id) == (0.0, "0", "0-0")
    assert samples(broken)[0].response_ids == SAID  # what it had said before
    assert samples(late, pad_token_id=7)[0].response_ids == [7]


class Masks(ResourcesServer):
    """Masks what is empty, and cannot close a session."""

    Session = dict

    async def verify(self, request: VerifyRequest, session: Any) -> dict[str, Any]:
        return {"reward": 1.0, "mask_sample": not request.response.output_text}

    async def close(self, session: Any) -> None:
        raise ToolFailed("it stays open")


class Compares(ResourcesServer):
    """Rewards groups."""

    async def verify(self, request: VerifyRequest) -> dict[str, Any]:
        return {"reward": 1.0}

    async def compare(self, body: Any) -> dict[str, Any]:
        return {"rewards": []}


def test_trl_leaves_out_what_an_environment_masks() -> None:
    graph = {"resources": {"masks": {"type": Masks}, "compares": {"type": Compares}}}
    with Gym.from_graph(graph, ray=False) as gym:
        pair = [environment_factory(gym, "masks")() for _ in range(2)]
        for environment in pair:
            environment.reset(prompt="say something")
        said = [[{"role": "assistant", "content": text}] for text in ("", "yes")]
        assert asyncio.run(environment_reward(["p", "p"], said, environments=pair)) == [None, 1.0]
        with pytest.raises(InvalidRequest, match="groups of rollouts"):
            environment_factory(gym, "compares")

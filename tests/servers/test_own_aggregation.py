"""``POST /aggregate_metrics``: what an environment's own aggregation gets."""

from typing import Any

import pytest

from gym_serve import ResourcesServer, ServerRunner, Verdict, VerifyRequest
from gym_serve.servers import EnvironmentClient
from gym_serve.transports import InlineTransport
from gym_serve.types.requests import JSON

SCORED = [{"_ng_task_index": task, "_ng_rollout_index": 0, "reward": 1.0} for task in range(2)]
FAILED = [
    {**row, "_ng_rollout_index": 1, "reward": 0.0, "mask_sample": True, "_ng_failure_class": "model_timeout"}
    for row in SCORED
]
MASKED = [{**row, "_ng_rollout_index": 2, "reward": 0.0, "mask_sample": True} for row in SCORED]


class Own(ResourcesServer):
    """Averages all that it gets, as environments of NeMo Gym do."""

    async def verify(self, request: VerifyRequest) -> Verdict:
        return Verdict(reward=1.0)

    async def aggregate(self, rollouts: list[JSON]) -> JSON | None:
        rewards = [rollout["reward"] for rollout in rollouts]
        return {"agent_metrics": {"mean/reward": sum(rewards) / len(rewards)}, "group_level_metrics": []}


class Declared(ResourcesServer):
    async def verify(self, request: VerifyRequest) -> Verdict:
        return Verdict(reward=1.0)


@pytest.mark.parametrize("environment", [Own, Declared])
@pytest.mark.parametrize(
    ("rollouts", "mean"),
    [
        (SCORED, 1.0),
        ([*SCORED, *FAILED], 1.0),
        ([*MASKED, *SCORED], 1.0),
        ([*FAILED, *MASKED], None),
        ([], None),
    ],
)
async def test_failed_and_masked_rollouts_reach_no_aggregation(
    environment: type[ResourcesServer], rollouts: list[JSON], mean: float | None
) -> None:
    """S9."""
    client = EnvironmentClient(InlineTransport(ServerRunner(environment())))
    metrics: Any = await client.fetch("aggregate_metrics", {"verify_responses": rollouts})
    assert metrics["agent_metrics"].get("mean/reward") == mean

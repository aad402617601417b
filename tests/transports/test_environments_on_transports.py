"""Environments that ship: two runs of the same rows give the same rewards, over each kind of transport.

One environment of each sort. Slow: `tests/environments/test_same_rewards.py` has all of them without Ray, and
`test_transports.py` what transports do.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.everything import OFFLINE, Everything, rows

from gym_serve import Gym

pytestmark = pytest.mark.slow

TRANSPORTS = ("replica", "inline", "http")
NAMES = (
    "gymnasium",
    "math_with_code",
    "workplace_assistant",
)

Found = dict[str, dict[tuple[int, int], Any]]


@pytest.fixture(scope="module")
def gym(cluster: str, deploy: Any) -> Gym:
    url = f"{cluster}/everything"
    here = {name: name for name in NAMES}
    there = {name: f"{name}_http" for name in NAMES}
    graph = {
        "models": {
            "policy": {"type": "scripted_model"},
            "policy_http": {"type": "http", "url": f"{url}/policy"},
        },
        "resources": {
            **{name: {"type": name, **OFFLINE[name]} for name in NAMES},
            **{f"{name}_http": {"type": "http", "url": f"{url}/{name}"} for name in NAMES},
        },
        "agents": {
            "replica": {"type": Everything, "model": "policy", "environments": here},
            "inline": {
                "type": Everything,
                "model": "policy",
                "environments": here,
                "inline": ["policy", *NAMES],
            },
            "http": {"type": Everything, "model": "policy_http", "environments": there},
        },
    }
    return deploy(graph, name="everything")


def run(gym: Gym, transport: str) -> Found:
    """Rewards (or failures) by environment, row and repeat."""
    found: Found = {name: {} for name in NAMES}
    given = [row for name in NAMES for row in rows(name, 3)]
    for rollout in gym.run(given, agent=transport, repeats=2, concurrency=16):
        key = (rollout["_ng_task_index"], rollout["_ng_rollout_index"])
        found[rollout["environment"]][key] = rollout.get("failure", rollout["reward"])
    return found


@pytest.fixture(scope="module")
def runs(gym: Gym) -> dict[str, list[Found]]:
    return {transport: [run(gym, transport), run(gym, transport)] for transport in TRANSPORTS}


@pytest.mark.parametrize("name", NAMES)
def test_two_runs_give_the_same_rewards_over_every_edge(runs: Any, name: str) -> None:
    first = runs["replica"][0][name]
    assert len(first) == 6
    assert all(isinstance(reward, float | int) for reward in first.values()), first
    assert name == "gymnasium" or any(first.values()), "all rewards are zero"
    for transport in TRANSPORTS:
        for found in runs[transport]:
            assert found[name] == first, transport

"""`Gym.stream` on a cluster: the policy changes in another process, and what is too old is cancelled."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import ray
from support.held import HeldEndpoint, graph_of, row
from support.waiting import until

from gym_serve import AsyncGym, Gym


@ray.remote
def update(gym: Gym, version: str) -> None:
    """Tell a version, as a trainer in another process does."""
    gym.policy.update_weights("policy", version)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[HeldEndpoint]:
    with HeldEndpoint() as running:
        yield running


@pytest.fixture(scope="module")
def gym(deploy: Callable[..., Gym], endpoint: HeldEndpoint) -> Gym:
    return deploy(graph_of(endpoint), name="streamed")


async def test_a_version_of_another_process_cuts_off_what_is_too_old(
    gym: Gym, endpoint: HeldEndpoint
) -> None:
    rows = [row("slow"), *(row(f"question {number}") for number in range(5))]
    stream = gym.stream(rows, size=2, max_staleness=1, batch=2)
    async with stream:
        taken = [(await anext(stream)).row["prompt"] for _ in range(2)]
        assert "slow" not in taken
        await until(lambda: endpoint.held == 2)
        for version in ("1", "2"):
            await update.remote(gym, version)
        await until(lambda: endpoint.cancelled == 2)  # nobody asks for a group meanwhile
        await until(lambda: endpoint.held == 2)
        endpoint.let()
        rest = [group async for group in stream]
    assert sorted([*taken, *(group.row["prompt"] for group in rest)]) == sorted(r["prompt"] for r in rows)
    assert {group.staleness for group in rest} <= {0, 1}
    assert all(group.usable for group in rest)
    assert stream.counts.dropped["stale"] >= 2


async def test_a_stream_over_http_follows_the_version_of_the_cluster(
    gym: Gym, endpoint: HeldEndpoint
) -> None:
    rows = [row(f"question {number}") for number in range(4)]
    before, found = len(endpoint.requests), []
    with Gym.connect(gym.url) as connected:
        async for group in connected.stream(rows, size=2, max_staleness=0, batch=2):
            found.append(group)
            if len(found) == 2:  # nothing is made for the next version before it is there
                assert len(endpoint.requests) == before + 4
                await AsyncGym.of(gym).policy.update_weights("policy", "3")
    assert [group.staleness for group in found] == [0] * 4
    assert all(group.usable for group in found)

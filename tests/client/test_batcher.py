"""`Gym.connect`: all rollouts go through one run, whatever happens to its connections and gateways."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
import pytest
from support.in_process import InProcess
from support.remote_agents import CuttingProxy, Doer, graph, rows
from support.rollouts import read_jsonl
from support.waiting import until

from gym_serve import AsyncGym, BadRequest, InvalidRequest, Unauthorized, Unavailable
from gym_serve.client import remote_agent
from gym_serve.gateway import batch
from gym_serve.graph import GraphSpec, resolve
from gym_serve.types.errors import Forbidden

JSON = dict[str, Any]


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    Doer.ran.clear()
    Doer.cancelled.clear()


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[InProcess]:
    running = InProcess({"/g": resolve(GraphSpec(**graph(**options)), literal_secrets=True)})
    await running.start()
    try:
        yield running
    finally:
        await running.stop()


@asynccontextmanager
async def connected(url: str, **options: Any) -> AsyncIterator[AsyncGym]:
    async with await AsyncGym.connect(f"{url}/g", **options) as gym:
        yield gym


async def collect(gym: AsyncGym, count: int, **options: Any) -> Counter[int]:
    """How many rollouts came of each row; all of them must be right."""
    found: Counter[int] = Counter()
    async for rollout in gym.rollouts(iter(rows(count)), **options):
        assert rollout.failure is None, rollout.failure
        assert rollout.reward == rollout["number"] % 7 / 7
        found[rollout["number"]] += 1
    return found


async def test_ten_thousand_rollouts_with_20_forced_disconnects() -> None:
    """Through a proxy that cuts connections: none lost, and none doubled."""
    count, cuts = 10_000, 20
    async with served() as running:
        proxy = CuttingProxy(urlsplit(running.url).port or 0, cuts, seed=count, most=count * 200 // cuts)
        url = await proxy.start()
        proxy.left, left = 0, proxy.left
        async with connected(url) as gym:
            proxy.left = left
            assert await collect(gym, count, concurrency=64) == dict.fromkeys(range(count), 1)
        assert proxy.left == 0
        await proxy.stop()
    assert count <= Doer.ran.total() < count * 1.2  # what was on its way when a connection broke ran again


async def test_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as running:
        proxy = CuttingProxy(urlsplit(running.url).port or 0, cuts=0, seed=0, most=1)
        monkeypatch.setenv("http_proxy", await proxy.start())
        async with connected("http://192.0.2.1") as gym:
            assert await collect(gym, 10) == dict.fromkeys(range(10), 1)
        await proxy.stop()


async def test_few_requests_carry_many_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: Counter[str] = Counter()
    lines = remote_agent.Batcher._lines

    def counted(self: Any, batch: Any) -> Any:
        sent["POST"] += 1
        return lines(self, batch)

    monkeypatch.setattr(remote_agent.Batcher, "_lines", counted)
    async with served() as running, connected(running.url) as gym:
        assert (await collect(gym, 300, concurrency=100)).total() == 300
    assert sent["POST"] < 100


async def test_a_gateway_that_is_lost_in_the_middle_of_a_run() -> None:
    async with served() as running, connected(running.url) as gym:
        collecting = asyncio.ensure_future(collect(gym, 200, concurrency=50))
        for share in (50, 120):
            await until(lambda share=share: Doer.ran.total() >= share)
            await running.replace_gateways()
        assert await collecting == dict.fromkeys(range(200), 1)


async def test_a_row_that_ends_every_gateway_fails_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "_BEAT_SECONDS", 0.05)
    async with served() as running, connected(running.url) as gym:
        episode = asyncio.ensure_future(gym.run(rows(1, act="hang")))
        for times in range(1, 7):
            await until(lambda times=times: Doer.ran[0] >= times)
            await running.replace_gateways()
        (rollout,) = await episode
        assert rollout["failure"]["kind"] == "unavailable"
        assert rollout["failure"]["retryable"]


async def test_groups_cancel_their_stragglers_down_to_the_agent() -> None:
    async with served() as running, connected(running.url) as gym:
        async for group in gym.groups(rows(2), size=3, oversample=1):
            assert len(group.rollouts) == 3
        async for group in gym.groups(rows(3, act="hang")[2:], size=2, deadline=0.3, quorum=1):
            assert not group.usable
        await until(lambda: Doer.cancelled == {2: 2})


async def test_files_and_retries(tmp_path: Path) -> None:
    async with served() as running, connected(running.url) as gym:
        report = await gym.collect(rows(30, act="down"), tmp_path / "out.jsonl", repeats=2)
        assert report.complete
        found = Counter(rollout["number"] for rollout in read_jsonl(tmp_path / "out.jsonl"))
        assert found == dict.fromkeys(range(30), 2)


async def test_what_the_agent_refuses_is_a_failure_of_its_row() -> None:
    async with served() as running, connected(running.url) as gym:
        good, bad = rows(1)[0], {"responses_create_params": {"input": "x", "temprature": 1}, "number": 1}
        found = [rollout async for rollout in gym.rollouts([good, bad])]
        failed = [rollout for rollout in found if rollout.failure is not None]
        assert [rollout["number"] for rollout in failed] == [1]
        assert failed[0]["failure"]["kind"] == "invalid_request"


async def test_a_graph_that_is_gone_fails_rollouts_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_agent, "_PATIENCE_SECONDS", 0.5)
    async with served() as running:
        gym = await AsyncGym.connect(f"{running.url}/g")
    async with gym:
        found = [rollout async for rollout in gym.rollouts(rows(3))]
        assert [rollout["failure"]["kind"] for rollout in found] == ["unavailable"] * 3


async def test_bodies_are_as_small_as_the_gateway_wants_them() -> None:
    async with served(gateway={"max_request_bytes": 2_000}) as running, connected(running.url) as gym:
        assert await collect(gym, 100, concurrency=100) == dict.fromkeys(range(100), 1)
        (rollout,) = await gym.run(rows(1, text="x" * 3_000))
        assert rollout["failure"]["kind"] == "too_large"


async def test_a_wrong_token_ends_the_run() -> None:
    token = "a-token-of-the-graph"
    async with served(auth_token=token) as running, connected(running.url, auth_token=token) as gym:
        gym._core.connection._batcher._headers["authorization"] = "Bearer another"  # taken back meanwhile
        with pytest.raises(Unauthorized, match="auth_token"):
            await gym.run(rows(1))


async def test_one_call_to_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as running, connected(running.url) as gym:
        assert (await gym.call("doer", "run", rows(4)[3]))["number"] == 3
        with pytest.raises(InvalidRequest):
            await gym.call("doer", "run", {"number": 0})
        with pytest.raises(Unavailable):
            await gym.call("doer", "run", rows(1, act="down")[0])
        assert "verify_responses" not in await gym.call("doer", "aggregate_metrics", {"verify_responses": []})


async def test_the_span_of_a_rollout_travels_with_it() -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with served() as running:
        batcher = remote_agent.Batcher(f"{running.url}/g", {})
        found = await asyncio.gather(
            batcher.episode("doer", orjson.dumps(rows(1)[0]), trace),
            batcher.episode("doer", orjson.dumps(rows(1)[0])),
        )
        assert [reply.json()["trace"] for reply in found] == [trace, None]
        await batcher.close()


async def test_a_graph_without_a_token_is_not_steered() -> None:
    async with served() as running, connected(running.url) as gym:
        for steering in (
            gym.policy.pause(),
            gym.policy.resume(),
            gym.policy.update_weights("policy", "7"),
            gym.policy.set_endpoints("policy", ["http://127.0.0.1:9/v1"]),
        ):
            with pytest.raises(Forbidden, match="needs a graph with a token"):
                await steering
        with pytest.raises(BadRequest, match="update_weights with weights needs a graph on a Ray cluster"):
            await gym.policy.update_weights("policy", "7", path="weights.safetensors")

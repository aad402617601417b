"""Sessions stay on their replica: by handle, by header and by cookie; and a dead one is typed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from typing import Any

import httpx
import pytest
from support.pinned import Pinned, SlowModel

from gym_serve import AsyncGym, Gym
from gym_serve.client import loop
from gym_serve.servers.clients import EnvironmentClient

SESSIONS, CALLS = 100, 5


@pytest.fixture(scope="module")
def gym(deploy: Any) -> Gym:
    graph = {
        "models": {"model": {"type": SlowModel}},
        "resources": {"env": {"type": Pinned, "num_replicas": 3}},
        "agents": {
            "agent": {
                "type": "simple_agent", "model": "model", "resources": "env",
                "episode_timeout": 90, "tool_timeout": 60, "verify_timeout": 60,
            }
        },
    }  # fmt: skip
    return deploy(graph, name="pinning")


async def interleaved(open_one: Any, touch: Any) -> Counter[int]:
    """Open sessions, call them in random order, several at a time; how many lived on each replica."""
    seeded = await asyncio.gather(*(open_one(f"k{n}") for n in range(SESSIONS)))
    expected = {key: 0 for key, _, _ in seeded}
    order = [one for one in seeded for _ in range(CALLS)]
    random.Random(1).shuffle(order)

    async def check(key: str, session: Any, pid: int) -> None:
        answer = await touch(key, session)
        assert answer["pid"] == pid, "a call reached another replica"
        assert answer["mine"], "a call reached another session"
        expected[key] += 1

    for start in range(0, len(order), 40):
        await asyncio.gather(*(check(*one) for one in order[start : start + 40]))
    assert set(expected.values()) == {CALLS}
    return Counter(pid for _, _, pid in seeded)


def test_by_handle(gym: Gym) -> None:
    resources = EnvironmentClient(gym._core.transport("env"))

    async def open_one(key: str) -> tuple[str, str | None, int]:
        session, fields = await resources.seed_session({"key": key})
        return key, session, fields["pid"]

    async def touch(key: str, session: str) -> dict[str, Any]:
        return (await resources.call_tool("touch", {"key": key}, session)).json()

    replicas = loop.wait(interleaved(open_one, touch))
    assert len(replicas) > 1, "all sessions lived on one replica"


async def test_by_http(gym: Gym) -> None:
    """Half of the clients go by the header, the others by the cookie."""
    async with httpx.AsyncClient(base_url=gym.url, timeout=60) as client:

        async def open_one(key: str) -> tuple[str, dict[str, str], int]:
            answer = await client.post("/env/seed_session", json={"key": key})
            client.cookies.clear()
            if int(key[1:]) % 2:
                headers = {"x-session-id": answer.headers["x-session-id"]}
            else:
                headers = {"cookie": f"gym_session={answer.cookies['gym_session']}"}
            return key, headers, answer.json()["pid"]

        async def touch(key: str, headers: dict[str, str]) -> dict[str, Any]:
            answer = await client.post("/env/touch", json={"key": key}, headers=headers)
            client.cookies.clear()
            return answer.json()

        assert len(await interleaved(open_one, touch)) > 1


def test_a_cookie_client_needs_to_do_nothing(gym: Gym) -> None:
    with httpx.Client(base_url=gym.url, timeout=60) as client:
        client.post("/env/seed_session", json={"key": "a"})
        answers = [client.post("/env/touch", json={"key": "a"}).json() for _ in range(3)]
        assert [a["calls"] for a in answers] == [1, 2, 3]
        response = {"output": []}
        verdict = client.post(
            "/env/verify", json={"responses_create_params": {}, "response": response}
        ).json()
        assert verdict["reward"] == 3
        closed = client.cookies["gym_session"]
        assert client.post("/env/close_session").json() == {}
        late = client.post("/env/touch", json={"key": "a"}, headers={"x-session-id": closed})
        assert late.json()["error"]["code"] == "session_not_found"


async def test_kill_9_of_a_replica_ends_no_run(gym: Gym) -> None:
    """Every rollout ends with a reward or a typed failure; none is a made-up zero."""
    rows = [{"responses_create_params": {"input": "go"}, "key": "k"} for _ in range(300)]
    pid = gym.call("env", "seed_session", {"key": "k"})["pid"]
    ended: Counter[str] = Counter()
    async for rollout in gym.rollouts(rows, concurrency=60):
        if not ended:  # those that started together end together: kill in the middle of the next ones
            asyncio.get_running_loop().call_later(0.5, os.kill, pid, signal.SIGKILL)
        if "failure" in rollout:
            assert rollout["mask_sample"] is True
            ended[rollout["_ng_failure_class"]] += 1
        else:
            assert rollout["reward"] == 10
            ended["reward"] += 1
    assert sum(ended.values()) == len(rows)
    assert ended["reward"] > 0
    assert set(ended) <= {"reward", "session_lost", "unavailable"}, ended
    assert ended["session_lost"] > 0, ended
    counted = (await AsyncGym.of(gym).stats())["metrics"]["gym_serve_sessions_lost_total"]
    assert [(point["labels"], point["value"]) for point in counted] == [
        ({"server": "env"}, ended["session_lost"])
    ]


async def test_after_that_all_is_well_again(gym: Gym) -> None:
    rows = [{"responses_create_params": {"input": "go"}, "key": "k"} for _ in range(20)]
    assert [r["reward"] async for r in gym.rollouts(rows)] == [10.0] * 20

"""A replica of the environment is killed while rollouts are collected: the files are those of a calm run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.killed import ChainModel, KilledChain
from support.rollouts import JSON, read_jsonl

from gym_serve import AsyncGym, Gym, Progress

ROWS = [{"responses_create_params": {"input": "go", "user": f"u{n}"}, "number": n} for n in range(60)]


@pytest.fixture(scope="module")
def gym(deploy: Any) -> Gym:
    graph = {
        "models": {"model": {"type": ChainModel}},
        "resources": {"env": {"type": KilledChain, "num_replicas": 2, "health_check_period_s": 1}},
        "agents": {"agent": {"type": "simple_agent", "model": "model", "resources": "env", "max_steps": 20}},
    }
    return deploy(graph, name="failover")


def seeded(gym: Gym) -> int:
    pid: int = gym.call("env", "seed_session", {"number": -1})["pid"]
    return pid


def comparable(path: Path) -> list[JSON]:
    """Rollouts without what tells when they were made, and at which attempt."""
    volatile = ("_ng_latency_s", "_ng_timeline", "_ng_attempt_index", "_ng_rollout_id", "_ng_run_id")
    found = [{k: v for k, v in r.items() if k not in volatile} for r in read_jsonl(path)]
    return sorted(found, key=lambda rollout: rollout["number"])


async def test_kill_9_changes_no_rollout(gym: Gym, tmp_path: Path) -> None:
    await AsyncGym.of(gym).collect(ROWS, tmp_path / "calm.jsonl", concurrency=30)
    pid, killed = seeded(gym), []

    def kill(progress: Progress) -> None:
        if progress.scored and not killed:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    report = await AsyncGym.of(gym).collect(ROWS, tmp_path / "killed.jsonl", concurrency=30, progress=kill)
    assert killed
    assert report.complete
    for found, calm in zip(
        comparable(tmp_path / "killed.jsonl"), comparable(tmp_path / "calm.jsonl"), strict=True
    ):
        assert found == calm
    # A replica may die while it seeds a session, of which nobody holds a state: that is tried again.
    failures = tmp_path / "killed_failures.jsonl"
    stages = [f["failure"]["stage"] for f in (read_jsonl(failures) if failures.exists() else [])]
    assert set(stages) <= {"seed"}, stages


def test_a_client_by_http_goes_on_with_its_first_id(gym: Gym) -> None:
    with httpx.Client(base_url=gym.url, timeout=60) as client:
        for kill in (False, True):
            seed = client.post("/env/seed_session", json={"number": 5})
            headers = {"x-session-id": seed.headers["x-session-id"]}
            client.cookies.clear()
            first = client.post("/env/add", json={"what": "a"}, headers=headers)
            if kill:
                os.kill(seed.json()["pid"], signal.SIGKILL)
            client.cookies.clear()
            second = client.post("/env/add", json={"what": "b"}, headers=headers)
            client.cookies.clear()
            if not kill:
                calm = (first.json(), second.json())
        assert (first.json(), second.json()) == calm
        before, after = (answer.headers["x-session-id"].split(".")[0] for answer in (first, second))
        assert before != after
        body = {"state": "AAAAAAAAAAFqW10="}
        assert client.post("/env/restore_session", json=body).status_code == 404

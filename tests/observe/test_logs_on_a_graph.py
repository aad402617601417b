"""What a graph on a cluster logs, and how it is found: by rollout, level and server."""

import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from support.author import Careless
from support.traced import ROW, Mortal, TracedModel
from typer.testing import CliRunner

from gym_serve import Gym
from gym_serve.cli import lifecycle, local_ray, main
from gym_serve.cluster.reports import NodeLogs

SERVERS = [
    ("logged", server)
    for server in ("policy", "broken", "careless", "mortal", "agent", "unlucky", "widow", "gateway")
]


@pytest.fixture(scope="module")
def gym(deploy: Any) -> Gym:
    agent = {"type": "simple_agent", "resources": "careless"}
    given = {
        "auth_token": "the-graph-s-own-token",
        "models": {"policy": {"type": TracedModel}, "broken": {"type": TracedModel, "failures": 99}},
        "resources": {"careless": {"type": Careless}, "mortal": {"type": Mortal}},
        "agents": {
            "agent": {**agent, "model": "policy"},
            "unlucky": {**agent, "model": "broken"},
            "widow": {**agent, "model": "policy", "resources": "mortal"},
        },
    }
    return deploy(given, name="logged")


def said(**options: Any) -> str:
    return "\n".join(record.text for record in NodeLogs(SERVERS, **options).read())


def test_faults_are_found_by_their_rollout(gym: Gym) -> None:
    [careless] = gym.run([{**ROW, "_ng_task_index": 2, "mistake": "seed"}], agent="agent")
    [unlucky] = gym.run([{**ROW, "_ng_task_index": 3, "mistake": "none"}], agent="unlucky")
    assert careless.failure is not None
    assert unlucky.failure is not None

    of_author = said(rollout=careless["_ng_rollout_id"])
    assert " ERROR careless `seed` of careless failed at " in of_author
    assert "KeyError: 'opening'" in of_author  # the traceback
    assert " WARNING agent the rollout failed in its seed stage: seed_failed" in of_author

    of_model = said(rollout=unlucky["_ng_rollout_id"])
    assert " WARNING broken v1/responses failed: unavailable: the model is away" in of_model
    assert " WARNING unlucky the rollout failed in its model stage: unavailable" in of_model
    assert "careless" not in of_model


def test_a_refused_token_is_logged_and_not_shown(gym: Gym) -> None:
    answer = httpx.get(f"{gym.url}/graph", headers={"authorization": "Bearer a-wrong-token"})
    assert answer.status_code == 401
    log = said(level="warning")
    assert " WARNING gateway a request from 127.0.0.1 was refused: unauthorized" in log
    assert "token" in log
    assert "a-wrong-token" not in log
    assert "the-graph-s-own-token" not in log


def test_reading_goes_on(gym: Gym) -> None:
    logs = NodeLogs(SERVERS, level="warning")
    logs.read()
    assert logs.read() == []
    [rollout] = gym.run([{**ROW, "_ng_task_index": 5, "mistake": "verify"}], agent="agent")
    assert rollout.failure is not None
    assert any("careless" in record.text for record in logs.read())


def test_a_lost_session_is_logged_and_the_log_of_the_dead_replica_is_read(gym: Gym) -> None:
    [rollout] = gym.run([{**ROW, "_ng_task_index": 7}], agent="widow", attempts=1)
    assert rollout.failure is not None
    assert rollout.failure["kind"] == "session_lost"
    log = said(rollout=rollout["_ng_rollout_id"])
    assert " WARNING mortal the last words" in log
    assert " WARNING widow the rollout failed in its tool stage: session_lost: " in log


def test_follow_prints_what_is_logged_from_then_on(gym: Gym, monkeypatch: pytest.MonkeyPatch) -> None:
    """`gym-serve logs --follow`, with a rollout in its first pause and Ctrl-C in a later one."""
    pauses = 0

    def pause(seconds: float) -> None:
        nonlocal pauses
        pauses += 1
        if pauses == 1:
            gym.run([{**ROW, "_ng_task_index": 9, "mistake": "seed"}], agent="agent")
        elif pauses == 5:
            raise KeyboardInterrupt
        time.sleep(0.1)

    monkeypatch.setattr(local_ray, "connect", lambda address: None)
    monkeypatch.setattr(lifecycle, "time", SimpleNamespace(sleep=pause))
    options = ["logs", "careless", "--graph", "logged", "--level", "error", "-n", "0", "--follow"]
    result = CliRunner().invoke(main, options)
    assert result.exit_code == 130
    assert result.stdout.count(" ERROR careless ") == 1
    assert "KeyError: 'opening'" in result.stdout
    assert "rollout=9-0" in result.stdout

"""New weights reach every replica of a model, and those that start later."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from support.weights import Weighted

from gym_serve import Gym
from gym_serve.servers.model import VERSION
from gym_serve.types.errors import BadRequest, DeadlineExceeded, GymError

_GRAPH: dict[str, Any] = {
    "models": {
        "policy": {"type": Weighted, "num_replicas": 2, "health_check_period_s": 1},
        "other": {"type": Weighted},
    }
}
_NAME = "weighted"


@pytest.fixture(scope="module")
def gym(cluster: str) -> Iterator[Gym]:
    """Two models, one of them on two replicas."""
    with Gym.from_graph(_GRAPH, name=_NAME) as running:
        yield running


def _said(gym: Gym) -> dict[int, tuple[str, str]]:
    """Weights and version by process, of both replicas."""
    found: dict[int, tuple[str, str]] = {}
    while len(found) < 2:
        with suppress(GymError):  # of a replica that was killed
            answer = gym.call("policy", "v1/responses", {"input": "a"})
            found[answer["pid"]] = (answer["weights"], answer["version"])
    return found


def _replaced(gym: Gym) -> dict[int, tuple[str, str]]:
    """What both replicas say after the ones before were killed."""
    for pid in (killed := set(_said(gym))):
        os.kill(pid, signal.SIGKILL)
    found: dict[int, tuple[str, str]] = {}
    while len(found) < 2:
        time.sleep(0.05)
        found |= {pid: said for pid, said in _said_by_one(gym).items() if pid not in killed}
    return found


def _said_by_one(gym: Gym) -> dict[int, tuple[str, str]]:
    with suppress(GymError):
        answer = gym.call("policy", "v1/responses", {"input": "a"})
        return {answer["pid"]: (answer["weights"], answer["version"])}
    return {}


def test_tensors_reach_every_replica(gym: Gym) -> None:
    assert set(_said(gym).values()) == {("first", "0")}
    gym.policy.update_weights("policy", "1", tensors=b"second")
    assert set(_said(gym).values()) == {("second", "1")}
    assert gym.call("other", "v1/responses", {"input": "a"})["weights"] == "first"


def test_wrong_weights_are_not_kept(gym: Gym) -> None:
    gym.policy.update_weights("policy", "2", tensors=b"third")
    with pytest.raises(BadRequest, match="not the weights"):
        gym.policy.update_weights("policy", "3", tensors=b"wrong")
    assert set(_replaced(gym).values()) == {("third", "2")}


def test_over_http_all_replicas_are_told_as_well(gym: Gym, tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("fourth")
    url = f"{gym.url}/policy/weights"
    body = {"path": str(tmp_path / "weights"), "version": "4"}
    assert httpx.post(f"{url}/update", json=body, timeout=60).json() == {"weight_version": "4"}
    assert set(_said(gym).values()) == {("fourth", "4")}
    assert httpx.post(f"{url}/update", json={"path": "x"}, timeout=60).status_code == 422
    assert httpx.post(f"{url}/pause", timeout=60).json() == {"paused": True}
    pids = {answer["pid"] for answer in _answers(gym) if answer["paused"]}
    assert pids == set(_said(gym))


def test_a_pause_holds_every_replica_and_those_that_start_later(gym: Gym) -> None:
    pids = set(_said(gym))
    gym.policy.pause(model="policy")
    for _ in range(4):  # of both
        with pytest.raises(DeadlineExceeded):
            gym.call("policy", "v1/responses", {"input": "a"}, timeout=0.2)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    while not _is_paused(gym):
        time.sleep(0.05)
    gym.policy.resume(model="policy")
    assert not set(_said(gym)) & pids
    assert httpx.post(f"{gym.url}/policy/each/policy/pause", timeout=60).status_code == 404


def _is_paused(gym: Gym) -> bool:
    with suppress(GymError):
        return bool(gym.call("policy", VERSION, timeout=5)["paused"])
    return False


def _answers(gym: Gym) -> list[dict[str, Any]]:
    return [gym.call("policy", "v1/responses", {"input": "a"}) for _ in range(40)]


def test_a_graph_of_the_same_name_has_its_first_weights(gym: Gym) -> None:
    gym.shutdown()
    with pytest.raises(ValueError, match="weights of weighted"):
        ray.get_actor("weights of weighted", namespace="gym_serve")
    with Gym.from_graph({"models": {"policy": {"type": Weighted}}}, name=_NAME) as again:
        assert [*_said_by_one(again).values()] == [("first", "0")]

"""Which server limits a graph, and how many rollouts suit it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_serve.gateway.host import pressure


def replica(**counts: Any) -> dict[str, Any]:
    idle = {
        "draining": False, "running": 0, "waiting": 0, "limit": 100, "sessions": 0, "target_sessions": None,
        "max_replicas": 0, "cpu": 0.0, "refused": 0.0, "autoscaling": None, "boxes": None,
    }  # fmt: skip
    return {**idle, **counts}


def graph(
    agent: list[Any], env: list[Any] | None = None, model: list[Any] | None = None
) -> dict[str, list[Any]]:
    return {"model": model or [replica()], "env": env or [replica()], "agent": agent}


def found(reports: dict[str, list[Any]]) -> tuple[Any, Any, Any, Any]:
    result = pressure(reports, ["agent"])
    return result["bottleneck"], result["reason"], result["load"], result["concurrency"]


def test_nothing_limits_an_idle_graph() -> None:
    assert found(graph([replica()])) == (None, None, 0.0, None)
    assert found({"agent": []}) == (None, None, 0.0, None)


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        (graph([replica(running=10)]), ("agent", "calls", 0.1, 100)),
        (graph([replica(running=10)], model=[replica(running=8, limit=4)]), ("model", "calls", 2.0, 5)),
        (
            graph([replica(running=60)], model=[replica(running=4, waiting=20, limit=4)]),
            ("model", "calls", 6.0, 10),
        ),
        (
            graph([replica(running=48)], [replica(sessions=24, target_sessions=16) for _ in range(2)]),
            ("env", "sessions", 1.5, 32),
        ),
        (
            graph([replica(running=48)], [replica(boxes={"live": 12, "waiting": 4, "most": 8})] * 2),
            ("env", "boxes", 2.0, 24),
        ),
        (
            graph(
                [replica(running=48)], [replica(boxes={"live": 8, "waiting": 0, "most": 8}, max_replicas=2)]
            ),
            ("env", "boxes", 0.5, 96),
        ),
        (graph([replica(running=30, cpu=0.9), replica(running=30, cpu=0.7)]), ("agent", "cpu", 0.8, 75)),
        (graph([replica(running=64)], model=[replica(refused=0.5)]), ("model", "overloaded", 2.0, 32)),
        (graph([replica(running=64)], model=[replica(refused=1.0)]), ("model", "overloaded", 100.0, 1)),
    ],
)
def test_the_highest_load_limits(reports: dict[str, list[Any]], expected: tuple[Any, ...]) -> None:
    assert found(reports) == expected


@pytest.mark.parametrize(("loads", "asks"), [([0, 0], 1), ([30, 0], 2), ([17, 16], 3), ([90, 90], 4)])
def test_autoscaling_says_which_load_asks_for_how_many_replicas(loads: list[int], asks: int) -> None:
    rule = {"measure": "sessions", "target": 16, "min": 1, "max": 4}
    replicas = [replica(autoscaling={**rule, "load": load}) for load in loads]
    leaving = replica(autoscaling={**rule, "load": 99}, draining=True)
    servers = pressure({"env": [*replicas, leaving], "agent": [replica()]}, ["agent"])["servers"]
    assert servers["env"]["autoscaling"] == {**rule, "load": sum(loads), "asks": asks}
    assert servers["agent"]["autoscaling"] is None


def test_replicas_that_may_be_added_count() -> None:
    busy = replica(sessions=32, target_sessions=16, max_replicas=4)
    assert found(graph([replica(running=32)], [busy])) == ("env", "sessions", 0.5, 64)


def test_a_draining_replica_is_counted_and_takes_no_load() -> None:
    result = pressure(
        graph([replica(running=2), replica(running=90, cpu=1.0, draining=True)]), ["agent", "gone"]
    )
    agent = result["servers"]["agent"]
    assert (agent["replicas"], agent["draining"], agent["running"], agent["load"]) == (1, 1, 92, 0.02)


@settings(deadline=None)
@given(
    st.lists(
        st.builds(
            replica,
            draining=st.booleans(),
            running=st.integers(0, 5000),
            waiting=st.integers(0, 5000),
            sessions=st.integers(0, 5000),
            target_sessions=st.none() | st.floats(0.1, 100),
            max_replicas=st.integers(0, 9),
            limit=st.integers(1, 5000),
            cpu=st.floats(0, 4),
            refused=st.floats(0, 1),
        ),
        max_size=5,
    )
)
def test_a_recommendation_is_never_less_than_one(replicas: list[Any]) -> None:
    result = pressure({"agent": replicas}, ["agent"])
    assert result["concurrency"] is None or result["concurrency"] >= 1
    assert (result["bottleneck"] is None) == (result["load"] == 0)

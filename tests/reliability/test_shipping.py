"""`Gym.from_graph` and `gym-serve up --address` bring a user's code to nodes that lack it.

`up` brings new versions of it too, under load.

Slow: it takes two minutes, and what it covers changes seldom. The fast part is tests/cluster/test_code.py.
"""

from typing import Any

import pytest
from support.processes import RAY_TOKEN, can_mount, run_module

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not can_mount(), reason="a mount namespace is not permitted here"),
]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in RAY_TOKEN.items():  # of both nodes, the driver and the command
            patch.setenv(name, value)
        return run_module("support.shipping", str(tmp_path_factory.mktemp("shipping")))


def test_nodes_that_lack_the_package_run_it(said: dict[str, Any]) -> None:
    assert said["had"] == [False, False]
    assert said["before"]["versions"] == [["1", 10]]
    assert said["nodes"] == 2


def test_a_trainer_brings_its_code_along(said: dict[str, Any]) -> None:
    assert said["had"] == [False, False]  # before it
    assert said["trained"] == {"here": "1", "rollouts": [[1.0, "1", 10]] * 4}


def test_the_same_code_replaces_nothing(said: dict[str, Any]) -> None:
    assert said["same"] == {"rc": 0, "changed": []}
    assert said["remote"] == said["same"]  # by Ray Client, where it has the same hash
    assert said["same code"]["versions"] == [["1", 10]]


def test_new_code_replaces_its_servers_and_loses_nothing(said: dict[str, Any]) -> None:
    assert (said["new"]["rc"], said["new"]["changed"]) == (0, ["env"]), said["new"]
    assert said["new"]["held"] == [[1.0, "1"]] * 6  # open sessions end where they began
    assert said["new code"]["versions"] == [["1", 10], ["2", 20]]
    assert said["after"]["versions"] == [["2", 20]]
    assert (said["rewards"], said["retried"]) == ([[1.0, ""]], 0)
    assert said["rollouts"] > 100


def test_a_mistake_is_told_with_its_line_and_what_runs_goes_on(said: dict[str, Any]) -> None:
    here, there = said["missing here"], said["missing there"]
    assert (here["rc"], there["rc"]) == (1, 1)
    assert "No module named 'no_such_package' (my_env/__init__.py:3)" in here["said"]
    assert "No module named 'only_here' (my_env/__init__.py:3); install it on the nodes" in there["said"]
    assert said["at the end"]["versions"] == [["2", 20]]

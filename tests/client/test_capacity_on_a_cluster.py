"""A graph that the cluster cannot hold or run is refused at once, with what is missing."""

from typing import Any

import pytest

from gym_serve import Gym
from gym_serve.types.errors import GraphError


def _graph(**options: Any) -> dict[str, Any]:
    return {
        "models": {"policy": {"type": "scripted_model"}, "judge": {"type": "scripted_model", **options}},
        "resources": {"weather": {"type": "simple_weather"}},
        "agents": {"agent": {"type": "simple_agent", "model": "policy", "resources": "weather"}},
    }


def test_a_graph_for_gpus_on_a_cluster_without(cluster: str) -> None:
    with pytest.raises(GraphError) as caught:
        Gym.from_graph(_graph(num_gpus=1), name="needs_a_gpu")
    (problem,) = caught.value.problems
    assert problem.startswith(
        "models.judge.num_gpus: a replica needs 1 GPU, and no node of the cluster has any"
    )


def test_more_cpus_than_there_are(cluster: str) -> None:
    with pytest.raises(GraphError, match="CPU: all servers together need 3"):
        Gym.from_graph(_graph(num_cpus=10, num_replicas=3), name="needs_cpus")


def test_a_runtime_env_that_ray_does_not_take(cluster: str) -> None:
    with pytest.raises(GraphError, match=r"models\.judge\.runtime_env: .*nope is not a valid path"):
        Gym.from_graph(_graph(runtime_env={"working_dir": "./nope"}), name="needs_a_folder")


def test_a_server_is_asked_in_its_own_environment(cluster: str) -> None:
    """Where the module and the variable of its runtime_env are, which this process does not have."""
    judge = {
        "type": "support.graph_fakes:WithVariable",
        "model": "m",
        "runtime_env": {"env_vars": {"GS_PREFLIGHT": "no"}},
    }
    with pytest.raises(GraphError) as caught:
        Gym.from_graph({"models": {"judge": judge}}, name="needs_a_variable")
    assert caught.value.problems == ["models.judge: GS_PREFLIGHT is 'no'"]

"""An environment with boxes on a cluster of two nodes, of which the second one alone has room for boxes."""

from __future__ import annotations

from typing import Any

import psutil
import ray

from gym_serve import Gym
from gym_serve.types.errors import GraphError
from support.processes import replicas_of
from support.rollouts import JSON
from support.two_nodes import BOXES, TwoNodes

NAME = "boxes"
ROW: JSON = {
    "responses_create_params": {"input": "Write a file."},
    "test_command": "test -e /app/file",
    "solution": "touch file",
}


def graph(*, replicas: int, each: int) -> JSON:
    """Replicas with so many boxes each."""
    environment: dict[str, Any] = {"type": "workspace", "box_resource": "boxes", "max_boxes": each}
    return {
        "models": {"policy": {"type": "scripted_model"}},
        "resources": {"workspace": {**environment, "num_replicas": replicas, "warm_boxes": 0}},
        "agents": {"oracle": {"type": "oracle", "model": "policy", "resources": "workspace"}},
    }


def _node_of(process: int) -> str:
    raylet = psutil.Process(process).parent()
    assert raylet is not None
    (node,) = (word.removeprefix("--node_id=") for word in raylet.cmdline() if word.startswith("--node_id="))
    return node


def _problems(address: str, **asked: int) -> list[str]:
    try:
        Gym.from_graph(graph(**asked), name=NAME, address=address).shutdown()
    except GraphError as error:
        return error.problems
    return []


def run(cluster: TwoNodes) -> JSON:
    """Rewards of oracles, whether all replicas are where boxes are, and what a graph that asks for more is
    told."""
    (second,) = (node["NodeID"] for node in ray.nodes() if "boxes" in node["Resources"])
    with Gym.from_graph(graph(replicas=2, each=BOXES // 2), name=NAME, address=cluster.address) as gym:
        rewards = [rollout.reward for rollout in gym.run([ROW], agent="oracle", repeats=8)]
        places = [_node_of(process) == second for process in replicas_of(NAME)["workspace"]]
        left = ray.available_resources().get("boxes", 0.0)
    return {
        "rewards": rewards,
        "places": places,
        "left": left,
        "too large": _problems(cluster.address, replicas=1, each=BOXES + 1),
        "too many": _problems(cluster.address, replicas=3, each=BOXES // 2),
    }

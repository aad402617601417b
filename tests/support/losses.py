"""A collection over HTTP on a cluster of two nodes that loses its gateway, its agent, and a node.

    python -m support.losses FOLDER

The agent's only replica needs a resource that the second node alone has; the node is replaced by
another one. Prints one JSON object: what was lost, and the counts at the end.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import orjson
import psutil
import ray
from ray import serve
from ray.cluster_utils import Cluster

from gym_serve import Gym, Progress
from gym_serve.client.cluster import free_port
from support.rollouts import JSON
from support.stragglers import StragglingEnvironment, StragglingModel

ROWS = 400
# How soon Serve replaces what was lost: by default it looks every 10 seconds, a wait that shows nothing.
QUICK = {"health_check_period_s": 1.0}
GRAPH = {
    "models": {"model": {"type": StragglingModel}},
    "resources": {"env": {"type": StragglingEnvironment}},
    "agents": {
        "agent": {
            "type": "simple_agent",
            "model": "model",
            "resources": "env",
            "ray_resources": {"second": 0.01},
            **QUICK,
        }
    },
    "gateway": QUICK,
}


def rows() -> list[JSON]:
    params = {"input": "go", "user": "slow"}
    return [{"responses_create_params": params, "number": number} for number in range(ROWS)]


class Losses:
    """Loses one thing after the other, as the collection goes on."""

    def __init__(self, cluster: Cluster, second: Any) -> None:
        self._cluster = cluster
        self._second = second
        self._plan = [
            (0.15, "gateway", self._gateway),
            (0.4, "agent", self._agent),
            (0.65, "node", self._node),
        ]
        self.happened: list[str] = []

    def progress(self, now: Progress) -> None:
        if self._plan and now.finished >= self._plan[0][0] * now.total:
            _, name, lose = self._plan.pop(0)
            self.happened.append(name)
            lose()

    def _gateway(self) -> None:
        _kill("gateway")

    def _agent(self) -> None:
        _kill("agent")

    def _node(self) -> None:
        self._cluster.remove_node(self._second, allow_graceful=False)
        self._cluster.add_node(num_cpus=4, resources={"second": 1})


def _kill(server: str) -> None:
    for process in psutil.Process().children(recursive=True):
        title, *_ = [*process.cmdline(), ""]  # with the method that runs, if one does
        if title.partition(".")[0] == f"ray::ServeReplica:losses:{server}":
            os.kill(process.pid, signal.SIGKILL)
            return
    raise AssertionError(f"no replica of {server}")


def main(folder: Path) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
    second = cluster.add_node(num_cpus=4, resources={"second": 1})
    ray.init(address=cluster.address, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": free_port()})
    losses = Losses(cluster, second)
    with Gym.from_graph(GRAPH, name="losses", address=cluster.address) as gym:
        remote = Gym.connect(gym.url)
        report = asyncio.run(
            remote.collect(rows(), folder / "out.jsonl", concurrency=40, timeout=20, progress=losses.progress)
        )
        remote.shutdown()
        result = {
            "lost": losses.happened,
            "complete": report.complete,
            "scored": report.progress.scored,
            "failed_attempts": report.progress.failed_attempts,
        }
        print(orjson.dumps(result).decode(), flush=True)
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

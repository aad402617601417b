"""A collection over HTTP on a cluster of two nodes that loses each of its parts.

The agent's only replica needs a resource that the second node alone has; the node is replaced by
another one.
"""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from pathlib import Path

from gym_serve import AsyncGym, Gym, Progress
from support.processes import children_titled
from support.rollouts import JSON
from support.stragglers import StragglingEnvironment, StragglingModel
from support.two_nodes import TwoNodes

ROWS = 400
_REPLICA = "ray::ServeReplica:losses"
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

    def __init__(self, cluster: TwoNodes) -> None:
        self._plan = [
            (0.1, "gateway", partial(_kill, f"{_REPLICA}:gateway")),
            (0.3, "proxy", partial(_kill, "ray::ProxyActor")),
            (0.5, "agent", partial(_kill, f"{_REPLICA}:agent")),
            (0.7, "node", cluster.replace_second),
            (0.85, "controller", partial(_kill, "ray::ServeController")),
        ]
        self.happened: list[str] = []

    def progress(self, now: Progress) -> None:
        if self._plan and now.finished >= self._plan[0][0] * now.total:
            _, name, lose = self._plan.pop(0)
            self.happened.append(name)
            lose()


def _kill(title: str) -> None:
    pid, *_ = children_titled(title)  # of the proxies the head node's, which is asked
    os.kill(pid, signal.SIGKILL)


def run(cluster: TwoNodes, folder: Path) -> JSON:
    """What was lost, and the counts at the end; the files of the collection are in the folder."""
    losses = Losses(cluster)
    with Gym.from_graph(GRAPH, name="losses", address=cluster.address) as gym:
        remote = Gym.connect(gym.url)
        collected = AsyncGym.of(remote).collect(
            rows(), folder / "out.jsonl", concurrency=40, attempts=8, timeout=60, progress=losses.progress
        )
        report = asyncio.run(collected)  # here, as Ray starts nodes in the main thread only
        remote.shutdown()
    return {
        "lost": losses.happened,
        "complete": report.complete,
        "scored": report.progress.scored,
        "failed_attempts": report.progress.failed_attempts,
    }

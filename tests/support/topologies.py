"""What each topology survives: faults under a trainer that never stops asking for rollouts, on two nodes.

    python -m support.topologies FOLDER

Prints what happened to standard error, and one JSON object at the end: where things were placed; and by
topology and fault, how long no rollout ended, how many failed or were tried again, and how many replicas are
still the same. docs/topologies.md has its numbers.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path

import orjson
import ray
from ray import serve

from gym_serve import Gym
from gym_serve.client.deployed import launch
from gym_serve.cluster.serve_compat import http_address
from gym_serve.graph import GraphSpec, resolve
from support.losses import QUICK
from support.processes import children_titled, replicas_of
from support.rollouts import JSON
from support.stragglers import StragglingEnvironment, StragglingModel
from support.two_nodes import TwoNodes, two_nodes
from support.waiting import wait_until

NAME = "topology"
TOKEN = "a-secret-of-both-sides"
LEASE = 45.0
EXAMPLE = Path(__file__).parents[2] / "examples" / "on_the_trainers_cluster.py"
STEADY = 40
"""Rollouts that end before a fault, and after it."""

_SPREAD = {"num_replicas": 2, "max_replicas_per_node": 1, **QUICK}
GRAPH: JSON = {
    "models": {"model": {"type": StragglingModel, **_SPREAD}},
    "resources": {"env": {"type": StragglingEnvironment, **_SPREAD}},
    "agents": {"agent": {"type": "simple_agent", "model": "model", "resources": "env", **_SPREAD}},
    "gateway": _SPREAD,
}


async def train(gym: Gym, log: Path) -> None:
    """Ask for rollouts for ever; each that ends is a line of ``log``."""

    def rows() -> Iterator[JSON]:
        while True:
            yield {"responses_create_params": {"input": "go", "user": "slow"}}

    with log.open("ab", buffering=0) as file:
        async with aclosing(gym.rollouts(rows(), concurrency=8, attempts=8, timeout=60)) as rollouts:
            async for rollout in rollouts:
                line = {
                    "at": time.time(),
                    "pid": os.getpid(),
                    "failure": rollout.get("_ng_failure_class"),
                    "attempt": rollout.get("_ng_attempt_index", 0),
                }
                file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def owned(address: str | None) -> Gym:
    return Gym.from_graph(GRAPH, address=address, name=NAME, owner="run", lease_s=LEASE)


@ray.remote(num_cpus=0, resources={"node:__internal_head__": 0.001}, max_restarts=-1, max_task_retries=-1)
class Trainer:
    """A trainer's actor; Ray calls `train` again on the one that it starts in its place."""

    def __init__(self) -> None:
        self._gym = owned(None)

    def train(self, log: Path) -> None:
        asyncio.run(train(self._gym, log))


def drive(topology: str, where: str, file: str) -> None:
    """The trainer's first process."""
    log = Path(file)
    if topology == "inside":
        ray.init(address=where, log_to_driver=False)
        ray.get(Trainer.remote().train.remote(log))
    elif topology == "own":
        asyncio.run(train(owned(where), log))
    else:
        asyncio.run(train(Gym.connect(where, TOKEN), log))


class Run:
    """A trainer that runs.

    Args:
        topology: ``inside``, ``own`` or ``http``.
        where: address of the cluster, or URL of the graph.
        folder: for its log.
    """

    def __init__(self, topology: str, where: str, folder: Path) -> None:
        self._arguments = [topology, where, str(folder / f"{topology}.jsonl")]
        self._log = Path(self._arguments[-1])
        self._log.touch()
        self.topology = topology
        self.start()

    def start(self) -> None:
        """Start its first process, again."""
        # Not `-m`: the cluster's processes import the actor by the name of its module.
        code = "import sys; from support.topologies import drive; drive(*sys.argv[1:])"
        self._process = subprocess.Popen([sys.executable, "-c", code, *self._arguments], stdout=sys.stderr)

    def kill(self) -> None:
        """Kill its first process."""
        self._process.kill()
        self._process.wait()

    def kill_actor(self) -> None:
        """Kill the actor that asks for rollouts."""
        os.kill(self._lines()[-1]["pid"], signal.SIGKILL)

    def _lines(self) -> list[JSON]:
        return [orjson.loads(line) for line in self._log.read_bytes().splitlines()]

    def steady(self) -> None:
        """Wait until a number of further rollouts have ended."""
        count = len(self._lines())
        while len(self._lines()) < count + STEADY:
            time.sleep(0.1)

    def survives(self, fault: Callable[[], None]) -> JSON:
        """Let something happen, and see how the rollouts go on."""
        self.steady()
        before, begun = replicas_of(NAME), time.time()
        fault()
        self.steady()
        wait_until(_complete)
        self.steady()
        lines = [line for line in self._lines() if line["at"] > begun]
        ends = [begun, *(line["at"] for line in lines)]
        after = replicas_of(NAME)
        happened = {
            "pause": round(max(later - earlier for earlier, later in pairwise(ends)), 1),
            "failed": sum(line["failure"] is not None for line in lines),
            "again": sum(line["attempt"] > 0 for line in lines),
            "rollouts": len(lines),
            "replicas": sum(map(len, before.values())),
            "same": sum(len(pids & after[server]) for server, pids in before.items()),
        }
        print(self.topology, getattr(fault, "__name__", fault), happened, file=sys.stderr, flush=True)
        return happened


@ray.remote(num_cpus=0, resources={"gpu_share": 0.75})
class Worker:
    """A trainer's worker; there is room for one on each node, with a quarter of its GPU left."""

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()


def placement(cluster: TwoNodes) -> JSON:
    """How a graph and a trainer share two GPUs; and what the example with all kinds of actors prints."""
    workers = [Worker.remote() for _ in range(2)]
    nodes = set(ray.get([worker.node.remote() for worker in workers]))
    model = {"type": "scripted_model", "num_replicas": 2, "ray_resources": {"gpu_share": 0.25}}
    with Gym.from_graph({"models": {"policy": model}}, name="placed"):
        left = ray.available_resources().get("gpu_share", 0.0)
    for worker in workers:
        ray.kill(worker)
    wait_until(lambda: ray.available_resources().get("gpu_share") == 2.0)
    printed = subprocess.run(
        [sys.executable, EXAMPLE, cluster.address], stdout=subprocess.PIPE, text=True, check=True
    )
    return {"nodes": len(nodes), "left": left, "printed": printed.stdout}


def runs() -> bool:
    """Whether the graph is there."""
    return NAME in serve.status().applications


def _complete() -> bool:
    return [len(pids) for pids in replicas_of(NAME).values()] == [2, 2, 2, 2]


def kill_controller() -> None:
    """Kill Serve's controller, also one that has just been started."""
    wait_until(lambda: bool(children_titled("ray::ServeController")))
    pid, *_ = children_titled("ray::ServeController")
    os.kill(pid, signal.SIGKILL)


def owned_topology(topology: str, cluster: TwoNodes, folder: Path) -> JSON:
    """A trainer on the graph's cluster."""
    run = Run(topology, cluster.address, folder)

    def driver() -> None:
        run.kill()
        run.start()

    happened = {"driver": run.survives(driver)}
    if topology == "inside":
        happened["actor"] = run.survives(run.kill_actor)
    happened["node"] = run.survives(cluster.replace_second)
    happened["controller"] = run.survives(kill_controller)
    run.kill()
    killed = time.time()
    if topology == "own":
        kill_controller()  # which keeps nobody from taking the graph down
    wait_until(lambda: not runs())
    happened["abandoned"] = {"seconds": round(time.time() - killed)}
    return happened


def http_topology(cluster: TwoNodes, folder: Path) -> JSON:
    """A trainer elsewhere, and a graph that an operator has deployed."""
    graph = resolve(GraphSpec(**GRAPH, auth_token=TOKEN))
    launch(graph, NAME, f"/{NAME}")
    run = Run("http", f"{http_address()}/{NAME}", folder)

    def driver() -> None:
        run.kill()
        run.start()

    happened = {
        "driver": run.survives(driver),
        "node": run.survives(cluster.replace_second),
        "controller": run.survives(kill_controller),
    }
    run.kill()
    serve.delete(NAME)
    return happened


def main(folder: Path) -> None:
    happened = {}
    with two_nodes() as cluster:
        happened["placement"] = placement(cluster)
        for topology in ("inside", "own"):
            happened[topology] = owned_topology(topology, cluster, folder)
        happened["http"] = http_topology(cluster, folder)
    print(orjson.dumps(happened).decode(), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

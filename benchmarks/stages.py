"""From nothing to a graph in stages, so that the costs of Ray and of Ray Serve are told from ours.

Each stage is a context manager, on a Ray of its own that it starts and stops: inside, all of it runs, and
what answers has answered once.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.harness.work import ROOT
from gym_serve.cli import local_ray
from gym_serve.cluster.starting import free_port

__all__ = ["STAGES", "run_empty"]

# Servers that do next to nothing: no server of a model beside them, no GPU.
_GRAPH: dict[str, Any] = {
    "models": {"policy": {"type": "scripted_model"}},
    "resources": {"weather": {"type": "simple_weather"}},
    "agents": {"agent": {"type": "simple_agent", "model": "policy", "resources": "weather"}},
}


@contextmanager
def ray_alone() -> Iterator[None]:
    """``ray.init``, as anybody calls it."""
    import ray

    ray.init(log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _own_folders() -> Iterator[Path]:
    """Own folders for the Ray of `gym-serve up`: no other Ray is in sight. Short, for its sockets."""
    folder = Path(tempfile.mkdtemp(prefix="gs"))
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.update(XDG_STATE_HOME=str(folder), RAY_TMPDIR=str(folder))
    try:
        yield folder
    finally:
        if (own := local_ray.started()) is not None:
            local_ray.stop(own)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def serve_alone() -> Iterator[None]:
    """And Ray Serve: its controller, and its proxy on this node."""
    from ray import serve

    with ray_alone():
        serve.start(http_options={"host": "127.0.0.1", "port": free_port()})
        try:
            yield
        finally:
            serve.shutdown()  # its client would outlive Ray otherwise, and be taken for that of the next one


@contextmanager
def empty_deployments() -> Iterator[None]:
    """And an application of four deployments that do nothing, as many as the graph has."""
    with serve_alone():
        run_empty()
        yield


def run_empty() -> None:
    """Deploy four deployments that do nothing, until the first of them has answered."""
    from ray import serve

    class Nothing:
        def __init__(self, *others: Any) -> None:
            pass

        async def answer(self) -> int:
            return 1

    def deployment(name: str) -> Any:
        return serve.deployment(name=name, ray_actor_options={"num_cpus": 0.1})(Nothing)

    leaves = [deployment(name).bind() for name in ("a", "b", "c")]
    handle = serve.run(deployment("ingress").bind(*leaves), route_prefix="/empty")
    assert handle.answer.remote().result() == 1


_EMPTY_ON_STARTED_RAY = """
from gym_serve.cli import local_ray
local_ray.start()
local_ray.connect(None)
from ray import serve
from benchmarks.stages import run_empty
from gym_serve.cluster.starting import free_port
serve.start(http_options={"host": "127.0.0.1", "port": free_port()})
run_empty()
"""


@contextmanager
def empty_on_started_ray() -> Iterator[None]:
    """The same application on a Ray that ``ray start`` has started, as `gym-serve up` starts it."""
    with _own_folders():
        subprocess.run([sys.executable, "-c", _EMPTY_ON_STARTED_RAY], cwd=ROOT, check=True)
        yield


@contextmanager
def up() -> Iterator[None]:
    """``gym-serve up`` of the graph, until the graph has answered over HTTP."""
    with _own_folders() as folder:
        (folder / "graph.yaml").write_text(json.dumps(_GRAPH))
        command = [
            sys.executable,
            "-c",
            "from gym_serve.cli import main; main()",
            "up",
            "graph.yaml",
            "--json",
        ]
        answer = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, check=True)
        response = httpx.get(json.loads(answer.stdout)["url"] + "/health", timeout=30.0, trust_env=False)
        assert response.status_code == 200, response.text
        yield


@contextmanager
def graph(spec: dict[str, Any] = _GRAPH) -> Iterator[None]:
    """Instead of all of them `Gym.from_graph`: a model, an environment, an agent and the gateway."""
    from gym_serve import Gym

    with Gym.from_graph(spec) as gym:
        data = ROOT / "environments" / "simple_weather" / "data" / "example.jsonl"
        row = json.loads(data.read_text().splitlines()[0])
        (rollout,) = gym.run([{**row, "agent_ref": {"name": "agent"}}])
        assert "failure" not in rollout, rollout
        yield


def inline_graph() -> AbstractContextManager[None]:
    """The same servers with model and environment inside the agent's replica, and none of their own."""
    (policy,), (weather,), (agent,) = (_GRAPH[kind].values() for kind in ("models", "resources", "agents"))
    unused = {"autoscaling": {"min_replicas": 0, "max_replicas": 1}}  # started when something calls them
    return graph(
        {
            "models": {"policy": {**policy, **unused}},
            "resources": {"weather": {**weather, **unused}},
            "agents": {"agent": {**agent, "inline": ["policy", "weather"]}},
        }
    )


STAGES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "ray": ray_alone,
    "serve": serve_alone,
    "empty": empty_deployments,
    "graph": graph,
    "inline": inline_graph,
    "up-empty": empty_on_started_ray,
    "up": up,
}
"""Every stage by its name. The first three build on one another; the last two start Ray by ``ray start``."""

"""From nothing to a graph in stages, so that the costs of Ray and of Ray Serve are told from ours.

Each stage is a context manager, on a Ray of its own that it starts and stops: inside, all of it runs, and
what answers has answered once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from benchmarks.harness.work import ROOT
from gym_serve.routing.ports import free_port

__all__ = ["STAGES"]

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
    from ray import serve

    class Nothing:
        def __init__(self, *others: Any) -> None:
            pass

        async def answer(self) -> int:
            return 1

    def deployment(name: str) -> Any:
        return serve.deployment(name=name, ray_actor_options={"num_cpus": 0.1})(Nothing)

    with serve_alone():
        leaves = [deployment(name).bind() for name in ("a", "b", "c")]
        handle = serve.run(deployment("ingress").bind(*leaves), route_prefix="/empty")
        assert handle.answer.remote().result() == 1
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
}
"""Every stage by its name. The first three build on one another."""

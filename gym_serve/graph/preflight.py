"""What can be known before a graph is deployed: whether the machines have what its servers need.

A graph that cannot start must not take the place of one that runs. Each server is asked where a replica of it
would run: on a node of the cluster that has its resources, in its ``runtime_env``. Ray is imported only for
that: `problems_here` comes before a Ray is started.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from gym_serve.graph.spec import SECTION_OF, Graph, Node

__all__ = ["preflight", "problems_here"]


def preflight(graph: Graph) -> list[str]:
    """What the connected cluster lacks for a graph: a line for each, with the server that needs it."""
    from gym_serve.graph.capacity import missing_resources

    return missing_resources(graph) or list(_problems_there(graph))


def problems_here(graph: Graph) -> list[str]:
    """The same of this machine, for a Ray that is to be started here; resources are not looked at."""
    # A server with a runtime_env sees other packages and files.
    return list(_problems_of(node for node in _deployed(graph) if not node.options.runtime_env))


def _problems_there(graph: Graph) -> Iterator[str]:
    import ray

    from gym_serve.routing.serve_compat import started_ray

    alike: dict[tuple[str, str], list[Node]] = {}
    for node in _deployed(graph):
        if started_ray() and not node.options.runtime_env:
            yield from _problems_of([node])  # this process's machine and Python are those of the replicas
        elif (place := _place(node)) is not None:
            alike.setdefault((place, repr(node.options.runtime_env)), []).append(node)
    asked = []
    for (place, _), nodes in alike.items():
        try:
            asked.append((nodes, _ask(place, nodes)))
        except (TypeError, ValueError) as error:  # Ray's own check of a runtime_env
            yield f"{_path(nodes[0])}.runtime_env: {error}"
    for nodes, answer in asked:
        try:
            yield from ray.get(answer)
        except ray.exceptions.RayError as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            yield f"{_path(nodes[0])}: no worker starts where its replicas run: {reason}"


def _ask(place: str, nodes: list[Node]) -> Any:
    """Ask servers with one ``runtime_env``, in a worker on a node."""
    import ray
    from ray import cloudpickle
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask = ray.remote(num_cpus=0)(_problems_of_pickled).options(
        scheduling_strategy=NodeAffinitySchedulingStrategy(place, soft=True),
        runtime_env=nodes[0].options.runtime_env or {},
    )
    pickled = [(_path(node), cloudpickle.dumps(node)) for node in nodes]  # type: ignore[no-untyped-call]
    return ask.remote(pickled)


def _problems_of_pickled(servers: list[tuple[str, bytes]]) -> list[str]:
    from ray import cloudpickle

    found: list[str] = []
    for path, pickled in servers:
        try:
            node = cloudpickle.loads(pickled)
        except Exception as error:  # foreign code, or none: the module may be on the driver's machine alone
            reason = f"{type(error).__name__}: {error}"
            found.append(f"{path}: its class cannot be imported where its replicas run: {reason}")
        else:
            found += _problems_of([node])
    return found


def _problems_of(nodes: Iterable[Node]) -> Iterator[str]:
    for node in nodes:
        assert node.cls is not None  # a remote server needs nothing here
        for problem in node.cls.preflight(node.cls.Config(**node.settings)):
            yield f"{_path(node)}: {problem}"


def _place(node: Node) -> str | None:
    """A node of the cluster that can hold a replica; None if one has to be added for it."""
    from gym_serve.graph.capacity import bundles
    from gym_serve.routing.serve_compat import node_resources

    needs = bundles(node)[0]
    for place, has in node_resources().items():
        if all(has.get(resource, 0.0) >= amount for resource, amount in needs.items()):
            return place
    return None


def _deployed(graph: Graph) -> Iterator[Node]:
    yield from (node for node in graph.nodes.values() if node.cls is not None)


def _path(node: Node) -> str:
    return f"{SECTION_OF[node.kind]}.{node.name}"

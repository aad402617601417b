"""Checks before a graph is deployed: whether the cluster has what its servers need.

A graph that cannot start must not replace one that runs. The resources come first, as Serve would wait for
them for ever: the nodes' totals, and what a cluster may grow to. Then each server is asked what it lacks
where a replica of it would run, in its ``runtime_env``. `problems_here` runs before a Ray is started.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gym_serve.cluster.code import with_code
from gym_serve.gateway.access import open_ray
from gym_serve.graph.spec import SECTION_OF, Graph, Node

_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
_TYPE = "accelerator_type:"

_Amounts = Mapping[str, float]


def preflight(graph: Graph, *, checked: bool = False, shipped: Mapping[str, str] | None = None) -> list[str]:
    """What the connected cluster lacks for a graph: a line for each, with the server that needs it.

    ``checked``: all replicas will run on this machine with this process's Python, and `problems_here` has
    found nothing: only servers with a ``runtime_env`` are asked.
    """
    from gym_serve.cluster.serve_compat import most_resources, node_resources

    machines, growth = list(node_resources().values()), most_resources()
    lacking = list(resource_problems(graph, [*machines, growth] if growth else machines))
    return lacking or list(_problems_there(graph, shipped or {}, checked=checked))


def problems_here(graph: Graph) -> list[str]:
    """What this machine lacks, for a Ray that will be started here; resources are not checked."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "disabled" and (
        problem := open_ray(insecure=graph.insecure)
    ):
        return [problem]
    # A server with a runtime_env sees other packages and files.
    return list(_problems_of(node for node in _deployed(graph) if not node.options.runtime_env))


def _problems_there(graph: Graph, shipped: Mapping[str, str], *, checked: bool) -> Iterator[str]:
    import ray

    from gym_serve.cluster.serve_compat import started_ray

    alike: dict[tuple[str, str], tuple[dict[str, Any], list[Node]]] = {}
    for node in _deployed(graph):
        uris = [shipped[node.name]] if node.name in shipped else []
        environment = with_code(node.options.runtime_env, uris)
        if checked and not environment:
            continue
        if started_ray() and not environment:
            yield from _problems_of([node])  # this process's machine and Python are those of the replicas
        elif (place := _place(node)) is not None:
            alike.setdefault((place, repr(environment)), (environment, []))[1].append(node)
    checks = []
    for (place, _), (environment, nodes) in alike.items():
        try:
            checks.append((nodes, _ask(place, nodes, environment)))
        except (TypeError, ValueError) as error:  # Ray's own check of a runtime_env
            yield f"{_path(nodes[0])}.runtime_env: {error}"
    for nodes, answer in checks:
        try:
            yield from ray.get(answer)
        except ray.exceptions.RayError as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            yield f"{_path(nodes[0])}: no worker starts where its replicas run: {reason}"


def _ask(place: str, nodes: list[Node], environment: dict[str, Any]) -> Any:
    import ray
    from ray import cloudpickle
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask = ray.remote(num_cpus=0)(_problems_of_pickled).options(
        scheduling_strategy=NodeAffinitySchedulingStrategy(place, soft=True), runtime_env=environment
    )
    pickled = [(_path(node), cloudpickle.dumps(node)) for node in nodes]  # type: ignore[no-untyped-call]
    return ask.remote(pickled)


def _problems_of_pickled(servers: list[tuple[str, bytes]]) -> list[str]:
    from ray import cloudpickle

    problems: list[str] = []
    for path, pickled in servers:
        try:
            node = cloudpickle.loads(pickled)
        except Exception as error:  # foreign code, or none: the module may be on the driver's machine alone
            reason = f"{type(error).__name__}: {error}{_line(error)}"
            if isinstance(error, ModuleNotFoundError):
                reason += "; install it on the nodes, or name it in the server's runtime_env: {pip: [...]}"
            problems.append(f"{path}: its class cannot be imported where its replicas run: {reason}")
        else:
            problems += _problems_of([node])
    return problems


def _line(error: Exception) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    if len(frames) < 2:  # none but that of this module: the class's own module is missing
        return ""
    file = Path(frames[-1].filename)
    roots = (Path(folder) for folder in sys.path if folder and file.is_relative_to(folder))
    root = max(roots, key=lambda root: len(root.parts), default=file.parent)
    return f" ({file.relative_to(root)}:{frames[-1].lineno})"


def _problems_of(nodes: Iterable[Node]) -> Iterator[str]:
    for node in nodes:
        assert node.cls is not None  # a remote server needs nothing here
        for problem in node.cls.preflight(node.cls.Config(**node.settings)):
            yield f"{_path(node)}: {problem}"


def _place(node: Node) -> str | None:
    """A node of the cluster that can hold a replica; None if one has to be added for it."""
    from gym_serve.cluster.serve_compat import node_resources

    needs = _bundles(node)[0]
    for place, has in node_resources().items():
        if all(has.get(resource, 0.0) >= amount for resource, amount in needs.items()):
            return place
    return None


def _deployed(graph: Graph) -> Iterator[Node]:
    yield from (node for node in graph.nodes.values() if node.cls is not None)


def _path(node: Node) -> str:
    return f"{SECTION_OF[node.kind]}.{node.name}"


def resource_problems(graph: Graph, machines: Sequence[_Amounts]) -> Iterator[str]:
    """What machines with these resources lack for a graph: a line for each server and resource."""
    short: set[str] = set()
    for node in _deployed(graph):
        for bundle in _bundles(node):
            for resource, amount in bundle.items():
                most = max((machine.get(resource, 0.0) for machine in machines), default=0.0)
                if amount > most:
                    short.add(resource)
                    yield f"{_path(node)}.{_option(resource)}: {_lack(resource, amount, most)}"
    total = {r: sum(machine.get(r, 0.0) for machine in machines) for one in machines for r in one}
    for resource in sorted(total.keys() - short):
        needs = {
            node.name: _replicas(node) * sum(bundle.get(resource, 0.0) for bundle in _bundles(node))
            for node in _deployed(graph)
        }
        # 1e-6: the shares of many light servers are sums of tenths.
        if sum(needs.values()) > total[resource] + 1e-6:
            first = sorted((name for name in needs if needs[name]), key=lambda name: -needs[name])[:5]
            largest = ", ".join(f"{name} {needs[name]:g}" for name in first)
            has = f"the cluster has {total[resource]:g} ({largest})"
            yield f"{_name(resource)}: all servers together need {sum(needs.values()):g}, and {has}"


def _bundles(node: Node) -> list[dict[str, float]]:
    """What each replica of a server reserves; it runs in the first bundle."""
    from gym_serve.cluster.deploy import deployed_options

    options = deployed_options(node)
    actor = {resource: float(options.get(option) or 0) for resource, option in _OPTIONS.items()}
    actor |= {resource: float(amount) for resource, amount in (options.get("resources") or {}).items()}
    if kind := options.get("accelerator_type"):
        actor[f"{_TYPE}{kind}"] = 0.001
    reserved = [dict(bundle) for bundle in options.get("placement_group_bundles") or [actor]]
    return [{resource: amount for resource, amount in bundle.items() if amount} for bundle in reserved]


def _replicas(node: Node) -> int:
    scaling = node.options.autoscaling
    return scaling.fewest if scaling is not None else node.options.num_replicas or 1


def _option(resource: str) -> str:
    return "accelerator_type" if resource.startswith(_TYPE) else _OPTIONS.get(resource, "resources")


def _lack(resource: str, amount: float, most: float) -> str:
    has = "no node of the cluster has any"
    if resource.startswith(_TYPE):
        return f"a replica needs a {_name(resource)}, and {has}"
    if most:
        has = f"the largest node of the cluster has {most:g}"
    hint = " (to run without one, set num_gpus to 0)" if resource == "GPU" and not most else ""
    return f"a replica needs {amount:g} {_name(resource)}, and {has}{hint}"


def _name(resource: str) -> str:
    return resource.removeprefix(_TYPE)

"""Whether the cluster can hold a graph: said before it is deployed, as Serve would wait for ever.

What counts is what the nodes have, not what is free now: other work ends. A cluster that grows counts as
what it may grow to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gym_serve.graph.deploy import deployed_options
from gym_serve.graph.spec import SECTION_OF, Graph, Node
from gym_serve.routing.serve_compat import most_resources, node_resources

__all__ = ["bundles", "missing_resources", "problems_of"]

_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
_TYPE = "accelerator_type:"

Amounts = Mapping[str, float]


def missing_resources(graph: Graph) -> list[str]:
    """What the connected cluster lacks for a graph: a line for each server and resource."""
    nodes, growth = list(node_resources().values()), most_resources()
    return list(problems_of(graph, [*nodes, growth] if growth else nodes))


def problems_of(graph: Graph, nodes: Sequence[Amounts]) -> Iterator[str]:
    """The same for given nodes.

    Args:
        graph: the graph.
        nodes: the resources of each node.
    """
    short: set[str] = set()
    for node in _deployed(graph):
        for bundle in bundles(node):
            for resource, amount in bundle.items():
                most = max((n.get(resource, 0.0) for n in nodes), default=0.0)
                if amount > most:
                    short.add(resource)
                    yield f"{_path(node, resource)}: {_lack(resource, amount, most)}"
    total = {r: sum(n.get(r, 0.0) for n in nodes) for n in nodes for r in n}
    for resource in sorted(total.keys() - short):
        needs = {node.name: _replicas(node) * _sum(node, resource) for node in _deployed(graph)}
        # 1e-6: the shares of many light servers are sums of tenths.
        if sum(needs.values()) > total[resource] + 1e-6:
            largest = ", ".join(
                f"{n} {needs[n]:g}" for n in sorted(needs, key=lambda n: -needs[n])[:5] if needs[n]
            )
            yield (
                f"{_name(resource)}: all servers together take {sum(needs.values()):g}, and the cluster has "
                f"{total[resource]:g} ({largest})"
            )


def _deployed(graph: Graph) -> Iterator[Node]:
    yield from (node for node in graph.nodes.values() if node.cls is not None)


def bundles(node: Node) -> list[dict[str, float]]:
    """What each replica of a server reserves; it runs in the first bundle."""
    options = deployed_options(node)
    actor = {resource: float(options.get(option) or 0) for resource, option in _OPTIONS.items()}
    actor |= {resource: float(amount) for resource, amount in (options.get("resources") or {}).items()}
    if kind := options.get("accelerator_type"):
        actor[f"{_TYPE}{kind}"] = 0.001
    reserved = [dict(bundle) for bundle in options.get("placement_group_bundles") or [actor]]
    return [{resource: amount for resource, amount in bundle.items() if amount} for bundle in reserved]


def _sum(node: Node, resource: str) -> float:
    return sum(bundle.get(resource, 0.0) for bundle in bundles(node))


def _replicas(node: Node) -> int:
    scaling = node.options.autoscaling
    if scaling is None:
        return node.options.num_replicas or 1
    return scaling.fewest


def _path(node: Node, resource: str) -> str:
    option = "accelerator_type" if resource.startswith(_TYPE) else _OPTIONS.get(resource, "resources")
    return f"{SECTION_OF[node.kind]}.{node.name}.{option}"


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

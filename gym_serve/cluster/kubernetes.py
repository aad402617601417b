"""A graph as objects of Kubernetes: KubeRay's ``RayService``, and a ``PodMonitor`` for its metrics.

Formats: ``ray.io/v1`` (https://github.com/ray-project/kuberay, ray-operator/apis/ray/v1) and
``monitoring.coreos.com/v1`` (the Prometheus operator).
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NamedTuple

import yaml

from gym_serve.cluster.deploy import deployed_options
from gym_serve.graph.loading import IMPORT_PATH, GraphSource, variables_of
from gym_serve.graph.spec import Graph, Node
from gym_serve.types.errors import GraphError
from gym_serve.types.requests import JSON

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,39}[a-z0-9])?")
_PORTS = {"gcs": 6379, "dashboard": 8265, "client": 10001, "serve": 8000, "metrics": 8080}
_HEAD_MEMORY_GIB = 8
_DRAIN_SECONDS = 3600  # the old cluster goes on after an upgrade as long as replicas get to finish sessions


class PodSize(NamedTuple):
    """What a worker pod has. One with GPUs has this beside them."""

    cpus: int = 4
    memory_gib: int = 16


class _Kind(NamedTuple):
    """What a replica asks of its pod beside CPU cores and memory."""

    gpus: float = 0
    accelerator: str | None = None
    resources: tuple[tuple[str, float], ...] = ()


@dataclass
class _Group:
    """How many worker pods of one kind the replicas of its servers fill, at least and at most."""

    servers: int = 0
    fewest: float = 0
    most: float = 0


def kubernetes_objects(source: GraphSource, graph: Graph, *, image: str, size: PodSize) -> list[JSON]:
    """The RayService and the PodMonitor of a graph.

    In ``source``, the graph as it was read, variables stay variables: pods get them from a Secret. Raises
    `GraphError` with all problems: others in the cluster could use the graph without a token; Kubernetes
    takes no such name; a replica does not fit into a pod.
    """
    if problems := list(_problems(source, graph, size)):
        raise GraphError(problems, source=source.path)
    labels = {"app.kubernetes.io/name": "gym-serve", "app.kubernetes.io/instance": _name(source)}
    metadata = {"name": _name(source), "labels": labels}
    container = {
        "image": image,
        "env": list(_environment(source)),
        "securityContext": {"runAsNonRoot": True, "allowPrivilegeEscalation": False},
    }
    # The head offers no CPU: a replica there that takes all of its memory would end the cluster.
    head = {
        "rayStartParams": {"dashboard-host": "0.0.0.0", "num-cpus": "0"},
        "template": _pod(labels, {"name": "ray-head", **container, **_resources(2, _HEAD_MEMORY_GIB, 0)}),
    }
    ready = {
        "httpGet": {"path": f"{source.route_prefix.rstrip('/')}/health", "port": "serve"},
        "periodSeconds": 5,
        "timeoutSeconds": 5,
    }
    worker = {"name": "ray-worker", **container, "readinessProbe": ready}
    cluster = {
        "rayVersion": version("ray"),
        # Whoever reaches the ports of Ray could otherwise run code, and read the Secret. From KubeRay 1.5.1.
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": True,
        "headGroupSpec": head,
        "workerGroupSpecs": list(_worker_groups(graph, size, labels, worker)),
    }
    service = {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": metadata,
        "spec": {
            "rayClusterDeletionDelaySeconds": _DRAIN_SECONDS,
            "serveConfigV2": _serve_config(source),
            "rayClusterConfig": cluster,
        },
    }
    monitor = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": metadata,
        "spec": {
            "selector": {"matchLabels": labels},
            "podMetricsEndpoints": [{"port": "metrics", "interval": "10s"}],
        },
    }
    return [service, monitor]


def secret_of(source: GraphSource) -> tuple[str, dict[str, bool]]:
    """Name of the Secret with the graph's variables, and of each variable whether the graph needs it."""
    return f"{_name(source)}-variables", variables_of(source.spec.raw())


def _name(source: GraphSource) -> str:
    return source.name.lower().replace("_", "-")


def _problems(source: GraphSource, graph: Graph, size: PodSize) -> Iterator[str]:
    if not _NAME.fullmatch(_name(source)):
        yield f"name: must begin with a letter and have at most 41 characters, got {source.name!r}"
    if not graph.auth_tokens and not graph.insecure:
        yield (
            "auth_token: must be set, as all pods of the Kubernetes cluster can reach the graph: "
            "--set 'auth_token=${GYM_TOKEN}'"
        )
    for node in _deployed(graph):
        needs = deployed_options(node)
        for key, most, option in (
            ("num_cpus", size.cpus, "--cpus"),
            ("memory", size.memory_gib * 2**30, "--memory"),
        ):
            if needs.get(key, 0) > most:
                yield f"{node.name}.{key}: must fit into a worker pod ({most}; {option}), got {needs[key]}"


def _deployed(graph: Graph) -> Iterator[Node]:
    return (node for node in graph.nodes.values() if node.cls is not None)


def _serve_config(source: GraphSource) -> str:
    application: JSON = {"name": source.name, "route_prefix": source.route_prefix}
    application |= {"import_path": IMPORT_PATH, "args": source.spec.raw()}
    # One proxy on each node with replicas: KubeRay sends requests to those pods.
    config = {"proxy_location": "EveryNode", "http_options": {"host": "0.0.0.0", "port": _PORTS["serve"]}}
    return yaml.safe_dump({**config, "applications": [application]}, sort_keys=False, width=10_000)


def _environment(source: GraphSource) -> Iterator[JSON]:
    secret, variables = secret_of(source)
    for name, needed in variables.items():
        key = {"name": secret, "key": name, **({} if needed else {"optional": True})}
        yield {"name": name, "valueFrom": {"secretKeyRef": key}}


def _worker_groups(
    graph: Graph, size: PodSize, labels: Mapping[str, str], worker: Mapping[str, Any]
) -> Iterator[JSON]:
    groups: defaultdict[_Kind, _Group] = defaultdict(_Group)
    for node in _deployed(graph):
        needs, scaling = deployed_options(node), node.options.autoscaling
        kind, cpus = _needs(needs)
        gpus = math.ceil(kind.gpus)
        # How many replicas fit into a pod, by each resource: a replica is never split between two.
        fits = [size.cpus / cpus] if cpus else []
        fits += [gpus / kind.gpus] if gpus else []
        fits += [size.memory_gib * 2**30 / needs["memory"]] if needs.get("memory") else []
        fits += [1.0] if kind.resources else []
        share = 1 / max(1, math.floor(min(fits))) if fits else 0.0
        replicas = needs.get("num_replicas", 1)
        group = groups[kind._replace(gpus=gpus)]
        group.servers += 1
        group.fewest += share * (scaling.fewest if scaling else replicas)
        group.most += share * (scaling.max_replicas if scaling else replicas)
    by_size = sorted(groups.items(), key=lambda group: (group[0].gpus, len(group[0].resources)))
    for number, (kind, group) in enumerate(by_size):
        gpus = int(kind.gpus)
        start = {"resources": json.dumps(json.dumps(dict(kind.resources)))} if kind.resources else {}
        names = [f"{gpus}-gpu" if gpus else "cpu", (kind.accelerator or "").lower(), *dict(kind.resources)]
        yield {
            "groupName": "-".join([*filter(None, names), str(number)]).replace("_", "-").lower(),
            "replicas": math.ceil(group.fewest),
            "minReplicas": math.ceil(group.fewest),
            # Servers of different sizes leave gaps between them.
            "maxReplicas": max(1, math.ceil(group.most)) + (group.servers > 1),
            "rayStartParams": start,
            "template": _pod(labels, {**worker, **_resources(size.cpus, size.memory_gib, gpus)}),
        }


def _needs(options: Mapping[str, Any]) -> tuple[_Kind, float]:
    """What a replica asks of its pod, and its CPU cores. Of placement groups, all bundles are in one pod."""
    cores, gpus = options.get("num_cpus", 0), options.get("num_gpus", 0)
    actor = {"CPU": cores, "GPU": gpus, **(options.get("resources") or {})}
    bundles = options.get("placement_group_bundles") or [actor]
    total: defaultdict[str, float] = defaultdict(float)
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] += amount
    cpus, gpus = total.pop("CPU", 0.0), total.pop("GPU", 0.0)
    total.pop("memory", None)
    custom = tuple(sorted((name, amount) for name, amount in total.items() if amount))
    return _Kind(gpus, options.get("accelerator_type"), custom), cpus


def _pod(labels: Mapping[str, str], container: JSON) -> JSON:
    ports = [{"name": name, "containerPort": port} for name, port in _PORTS.items()]
    if container["name"] != "ray-head":
        ports = [port for port in ports if port["name"] in ("serve", "metrics")]
    return {"metadata": {"labels": dict(labels)}, "spec": {"containers": [{**container, "ports": ports}]}}


def _resources(cpus: int, memory_gib: int, gpus: int) -> JSON:
    amounts: JSON = {"cpu": str(cpus), "memory": f"{memory_gib}Gi"}
    if gpus:
        amounts["nvidia.com/gpu"] = str(gpus)
    # Requests and limits are equal: Ray plans with all of a pod.
    return {"resources": {"requests": amounts, "limits": dict(amounts)}}

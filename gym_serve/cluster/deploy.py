"""From a resolved graph to a Serve application: one deployment per server, and the gateway.

`app` is the typed builder that graph files name in ``import_path``: Serve reads its annotation, so
this module does without postponed annotations.
"""

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import orjson
from pydantic import BaseModel, SecretStr
from ray import cloudpickle, serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from gym_serve.cluster.code import code_hash, with_code
from gym_serve.cluster.ingress import Ingress, application
from gym_serve.cluster.replica import Replica
from gym_serve.cluster.serve_compat import autoscaling_config, http_host, takes_any_code, with_version
from gym_serve.gateway.access import exposure, open_ray
from gym_serve.graph.resolving import resolve
from gym_serve.graph.spec import AutoscalingOptions, Graph, GraphSpec, Node, ServerOptions
from gym_serve.types.errors import GraphError

GATEWAY = "gateway"  # name of the deployment that is every application's ingress

_GATEWAY_DEFAULTS = {
    "num_cpus": 0,  # it must always fit beside the servers
    "max_ongoing_requests": 4096,  # Serve's default of 5 suits a GPU model; an episode mostly waits
    "graceful_shutdown_timeout_s": 3600.0,  # Serve's 20 s would end the sessions of a draining replica
    "graceful_shutdown_wait_loop_s": 0.5,
}
_SERVER_DEFAULTS = {
    **_GATEWAY_DEFAULTS,
    "num_cpus": 0.1,  # Serve's default of 1 would not fit a graph of eight light servers on a laptop
    "max_queued_requests": 16_384,  # Serve has no limit; a stuck queue must not take all memory
}
_ROUTER = RequestRouterConfig(
    request_router_class="gym_serve.cluster.serve_compat:MemberRouter"  # type: ignore[arg-type]
)
_BY_REQUESTS = "ray.serve.autoscaling_policy:default_autoscaling_policy"  # HTTP requests pass through Serve
# A runtime_env is the user's alone: Ray starts Python twice for a worker with one, 0.4 s of CPU per replica.
_ACTOR_OPTIONS = ("num_cpus", "num_gpus", "memory", "resources", "accelerator_type", "runtime_env")
_DEPLOYMENT_OPTIONS = (
    *("num_replicas", "max_ongoing_requests", "max_queued_requests", "max_replicas_per_node"),
    *(
        "placement_group_bundles",
        "placement_group_strategy",
        "health_check_period_s",
        "health_check_timeout_s",
    ),
    *("graceful_shutdown_timeout_s", "graceful_shutdown_wait_loop_s"),
)


def app(args: GraphSpec) -> serve.Application:
    """Serve's builder: the application of the graph under ``args`` of a config file.

    What is wrong with the graph is printed too: `serve run` shows it before Ray's traceback and at its end.
    """
    try:
        return build(resolve(args, literal_secrets=False))
    except GraphError as error:
        print(f"this graph is refused: {error}", file=sys.stderr, flush=True)
        raise


def build(
    graph: Graph, *, owned: bool = False, shipped: Mapping[str, str] | None = None
) -> serve.Application:
    """The application of a resolved graph; one that is ``owned`` belongs to a run, and ends with it.

    Raises `GraphError` where other machines reach Serve, and the graph has no token; or Ray has none.
    """
    if problem := exposure(http_host(), graph.auth_tokens, insecure=graph.insecure):
        raise GraphError(problem)
    if takes_any_code() and (problem := open_ray(insecure=graph.insecure)):
        raise GraphError(problem)
    bound: dict[str, serve.Application] = {}
    for name in graph.order():
        node = graph.nodes[name]
        if node.cls is None:
            continue
        nodes = _nodes_for(graph, name)
        handles = {n: bound[n] for n in nodes if n in bound}
        scaling = node.options.autoscaling
        measure = "sessions" if scaling and scaling.sessions else "calls"
        settings = _with_shipped(deployed_options(node), nodes, shipped or {})
        options = _options(name, node.options, settings, f"gym_serve.cluster.autoscaling:by_{measure}")
        deployment = serve.deployment(name=name, request_router_config=_ROUTER, **options)(Replica)
        arguments = (name, nodes, graph.tracing, graph.logs)
        code = [code_hash(n.cls) for n in nodes.values() if n.cls is not None]
        version = _fingerprint((arguments, code), sorted(handles))
        bound[name] = with_version(deployment, version).bind(name, nodes, handles, graph.tracing, graph.logs)
    outline = graph.outline()
    gateway = serve.deployment(
        name=GATEWAY,
        user_config={"graph": graph.public(), "owned": owned},
        **_options(GATEWAY, graph.gateway, _given(graph.gateway, _GATEWAY_DEFAULTS), _BY_REQUESTS),
    )(serve.ingress(application)(Ingress))
    version = _fingerprint(outline, sorted(bound))
    return with_version(gateway, version).bind(outline, bound)


def _nodes_for(graph: Graph, name: str) -> dict[str, Node]:
    """The servers that a replica of ``name`` constructs or calls: of those that it calls, the outlines."""
    constructed: set[str] = set()
    called: dict[str, None] = {}

    def visit(server: str) -> None:
        constructed.add(server)
        for target in graph.nodes[server].references.values():
            called[target] = None
            if target in graph.nodes[server].inline:
                visit(target)

    visit(name)
    nodes = {n: graph.nodes[n] for n in [name, *called]}
    return {n: node if n in constructed else node.outline() for n, node in nodes.items()}


def _with_shipped(
    options: dict[str, Any], nodes: Mapping[str, Node], shipped: Mapping[str, str]
) -> dict[str, Any]:
    uris = sorted({shipped[name] for name, node in nodes.items() if node.cls is not None and name in shipped})
    return {**options, "runtime_env": with_code(options.get("runtime_env"), uris)} if uris else options


def deployed_options(node: Node) -> dict[str, Any]:
    """Serve options of a server: gym_serve's defaults, overridden by the file's and by its class's."""
    options = _given(node.options, _SERVER_DEFAULTS)
    added = node.cls.deployment_options(node.settings, options) if node.cls is not None else {}
    return {key: value for key, value in {**options, **added}.items() if value is not None}


def _given(options: ServerOptions, defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {**defaults, **options.model_dump(exclude_none=True)}


def _options(name: str, options: ServerOptions, values: Mapping[str, Any], policy: str) -> dict[str, Any]:
    actor = {key: values[key] for key in _ACTOR_OPTIONS if key in values}
    deployment: dict[str, Any] = {key: values[key] for key in _DEPLOYMENT_OPTIONS if key in values}
    if (scaling := options.autoscaling) is None:
        deployment.setdefault("num_replicas", 1)
    else:
        deployment["autoscaling_config"] = _autoscaling(scaling, policy)
    return {**deployment, "ray_actor_options": actor, "logging_config": {"enable_access_log": False}}


def _autoscaling(options: AutoscalingOptions, policy: str) -> AutoscalingConfig:
    settings = options.model_dump(exclude_none=True, exclude={"target_sessions", "target_ongoing_requests"})
    target = options.sessions or options.target_ongoing_requests
    return autoscaling_config(policy, target_ongoing_requests=target, **settings)


def _fingerprint(arguments: Any, handles: list[str]) -> str:
    """Version of a deployment: it changes if, and only if, its replicas must restart."""
    return hashlib.sha256(orjson.dumps([arguments, handles], default=_plain, option=_PLAIN)).hexdigest()


_PLAIN = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_DATACLASS


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        left_out = "options" if isinstance(value, Node) else None
        return {f.name: getattr(value, f.name) for f in fields(value) if f.name != left_out}
    if isinstance(value, type):
        return f"{value.__module__}:{value.__qualname__}"
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, BaseModel):
        return value.model_dump()
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    return cloudpickle.dumps(value).hex()  # type: ignore[no-untyped-call]

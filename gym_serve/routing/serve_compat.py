"""Ray beyond its documented API, feature-detected: no other module uses its private parts (a test checks it).

- `MemberRouter` and `RunningVersion`: which replicas and versions run.
- `with_version`: a deploy restarts only the servers that changed.
- ``kv_...``: the key-value store that Ray's own libraries use.
"""

from __future__ import annotations

import asyncio
import warnings
from copy import copy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray._private import worker
from ray.exceptions import RayActorError
from ray.experimental import internal_kv
from ray.serve import Deployment, context
from ray.serve import config as serve_config
from ray.serve._private.build_app import BuiltApplication
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.handle_options import InitHandleOptions
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve.config import AutoscalingConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus

from gym_serve.routing.balancing import members_of
from gym_serve.types.errors import Unavailable

__all__ = [
    "MemberRouter",
    "RunningVersion",
    "autoscaling_config",
    "can_autoscale",
    "forget_serve",
    "http_address",
    "http_host",
    "is_being_deleted",
    "kv_delete",
    "kv_get",
    "kv_keys",
    "kv_put",
    "local_handle",
    "logs_directory",
    "may_report_load",
    "most_resources",
    "node_address",
    "node_resources",
    "request_limits",
    "route_prefix",
    "running_version",
    "serve_is_running",
    "started_ray",
    "with_version",
]

_OWN_LOOP = "_run_router_in_separate_loop"
_RAY = tuple(map(int, ray.__version__.split(".")[:2]))


class MemberRouter(PowerOfTwoChoicesRequestRouter):
    """Serve's power-of-two router, which reports to `Members` which replicas run.

    A custom request router is the documented way to learn it. What Serve still routes itself is the request
    that wakes a deployment which was scaled to zero.
    """

    def __init__(self, *args: Any, deployment_id: Any, **kwargs: Any) -> None:
        super().__init__(*args, deployment_id=deployment_id, **kwargs)  # type: ignore[no-untyped-call]
        self._members = members_of(deployment_id.app_name, deployment_id.name)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Learn which replicas run."""
        self._members.update(replica.replica_id.unique_id for replica in replicas)
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Forget a replica whose process is gone."""
        self._members.died(replica_id.unique_id)
        super().on_replica_actor_died(replica_id)


def local_handle(handle: DeploymentHandle[Any], method: str) -> DeploymentHandle[Any]:
    """``handle`` for ``method``, its router on the running event loop (before Ray 2.49: in a thread).

    Call it inside the event loop that will use the handle.
    """
    if not handle.is_initialized:
        here = {_OWN_LOOP: False} if hasattr(InitHandleOptions, _OWN_LOOP) else {}
        handle._init(**here)  # type: ignore[no-untyped-call]
    return handle.options(method_name=method)


def can_autoscale() -> bool:
    """Whether this Ray has autoscaling policies (2.51 and later)."""
    return hasattr(serve_config, "AutoscalingContext")


def autoscaling_config(policy: str, look_back_period_s: float = 30.0, **settings: Any) -> AutoscalingConfig:
    """Serve's autoscaling by a policy of ours.

    Args:
        policy: ``module:function``.
        look_back_period_s: seconds over which the load is averaged; replicas report it three times within
            them, and at least every 10 seconds.
        **settings: further ones of Serve.
    """
    with warnings.catch_warnings():
        # Serve means to replace this field by a variable of the environment, for all deployments together.
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(
            policy={"policy_function": policy},  # type: ignore[arg-type]
            look_back_period_s=look_back_period_s,
            metrics_interval_s=min(10.0, look_back_period_s / 3),
            **settings,
        )


def request_limits() -> tuple[int, int]:
    """``max_ongoing_requests`` and ``max_queued_requests`` of the replica that this process is."""
    config = serve.get_replica_context()._deployment_config
    return config.max_ongoing_requests, config.max_queued_requests


def may_report_load() -> bool:
    """Whether the replica that this process is may have Serve's hook ``record_autoscaling_stats``.

    Before Ray 2.56 a replica that has it does not start, if its deployment does not scale.
    """
    config = serve.get_replica_context()._deployment_config
    return _RAY >= (2, 56) or config.autoscaling_config is not None


def node_address() -> str:
    """Address of this machine, as the other machines of the cluster reach it."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def node_resources() -> dict[str, dict[str, float]]:
    """What each node of the connected cluster has, by its id."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"]: node["Resources"] for node in nodes if node["Alive"]}


def started_ray() -> bool:
    """Whether this process has started the Ray that it is connected to."""
    node: Any = worker._global_node
    return node is not None and bool(node.is_head())


def logs_directory() -> Path:
    """The log folder of the connected Ray on this machine."""
    node: Any = worker._global_node
    return Path(node.get_logs_dir_path())


def most_resources() -> dict[str, float] | None:
    """What a cluster that grows may have in all; None for one that does not grow, or does not say."""
    known = getattr(ray._private.state.state, "get_max_resources_from_cluster_config", None)
    most: dict[str, float] | None = known() if known is not None else None
    return most


async def is_being_deleted(application: str) -> bool:
    """Whether an application of this cluster's Serve is going or gone, not just this replica of it."""
    try:
        running = (await asyncio.to_thread(serve.status)).applications
    except RayActorError:
        return True  # so is Serve itself
    return application not in running or running[application].status == ApplicationStatus.DELETING


def with_version(deployment: Deployment, version: str) -> Deployment:
    """``deployment`` with a version of its own, so that a deploy restarts it only when that changes.

    Serve gives all deployments of an application one version, a hash over the whole file for ``serve deploy``
    and a random one for ``serve.run``: a changed setting of one server would restart all of them. There is no
    supported way to choose it: ``Deployment.options(version=...)`` was removed, and ``serve deploy`` writes
    its own version into the config whatever the deployment says. So the config is replaced by one of a
    subclass that keeps its version.
    """
    deployment = copy(deployment)
    state = dict(deployment._deployment_config.__getstate__())
    state["__dict__"] = {**state["__dict__"], "version": version}
    config = _FixedVersion.__new__(_FixedVersion)
    config.__setstate__(state)  # as unpickling does: Ray's versions use different ones of pydantic
    deployment._deployment_config = config
    return deployment


class _FixedVersion(DeploymentConfig):
    def __setattr__(self, name: str, value: Any) -> None:
        if name != "version":
            super().__setattr__(name, value)


_NAMESPACE = b"gym_serve"


def kv_put(key: bytes, value: bytes) -> None:
    """Write an entry of the connected cluster's key-value store."""
    internal_kv._internal_kv_put(key, value, True, namespace=_NAMESPACE)


def kv_get(key: bytes) -> bytes | None:
    """An entry; None if there is none."""
    value: bytes | None = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
    return value


def kv_keys(prefix: bytes) -> list[bytes]:
    """The keys with a prefix."""
    keys: list[bytes] = internal_kv._internal_kv_list(prefix, namespace=_NAMESPACE)
    return keys


def kv_delete(key: bytes) -> None:
    """Remove an entry."""
    internal_kv._internal_kv_del(key, namespace=_NAMESPACE)


@dataclass(frozen=True)
class RunningVersion:
    """The deployments of an application, as Serve's controller knows them.

    Attributes:
        application: its name.
        deployments: what Serve was given for each.
        ingress: name of the one that answers HTTP.
        route: its path.
    """

    application: str
    deployments: list[Deployment]
    ingress: str
    route: str

    def restore(self) -> None:
        """Deploy them again, in the place of what was deployed since, and wait until they run.

        Replicas of these versions that still run go on.

        Raises:
            RuntimeError: they do not start any more.
        """
        given: dict[str, Any] = {
            "name": self.application,
            "route_prefix": self.route,
            "logging_config": None,
            "ingress_deployment_name": self.ingress,
            "deployments": self.deployments,
            "deployment_handles": {},
            "external_scaler_enabled": False,
        }
        known = {field.name for field in fields(BuiltApplication)}
        built = BuiltApplication(**{key: value for key, value in given.items() if key in known})
        _client().deploy_applications([built])


def running_version(application: str) -> RunningVersion | None:
    """What runs as an application now; None if nothing does."""
    known = ray.get(_client()._controller.list_deployments_internal.remote())
    own = {id.name: info for id, (info, _) in known.items() if id.app_name == application}
    deployments = [
        Deployment(name, info.deployment_config, info.replica_config, info.version, _internal=True)
        for name, info in own.items()
    ]
    for id, (_, route) in known.items():
        if id.app_name == application and route is not None:
            return RunningVersion(application, deployments, id.name, route)
    return None


def serve_is_running() -> bool:
    """Whether a Serve instance runs on the connected cluster."""
    return _client() is not None


def forget_serve() -> None:
    """Forget the Serve instance of the Ray that this process leaves.

    Serve keeps it beyond ``ray.shutdown()``, and takes that of the next local Ray for the same one.
    """
    context._set_global_client(None)  # type: ignore[no-untyped-call]


def http_address() -> str:
    """Base URL of the HTTP proxy, as this machine reaches it.

    Raises:
        Unavailable: Serve does not run.
    """
    client = _client()
    if client is None:
        raise Unavailable("Serve does not run on this cluster")
    host = client.http_config.host or "127.0.0.1"
    return f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{client.http_config.port}"


def http_host() -> str | None:
    """Where the Serve of the joined cluster listens for HTTP requests; None where it does not run."""
    client = _client() if ray.is_initialized() else None
    return None if client is None else client.http_config.host


def route_prefix(application: str) -> str:
    """Route prefix of a running application; ``""`` for the root."""
    client = _client()
    details = client.get_serve_details()["applications"] if client is not None else {}
    prefix: str = details.get(application, {}).get("route_prefix") or "/"
    return "" if prefix == "/" else prefix


def _client() -> Any:
    return context._get_global_client(raise_if_no_controller_running=False)

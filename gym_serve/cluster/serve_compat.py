"""Ray beyond its documented API: no other module uses its private parts (a test checks it)."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import ray
from ray import serve
from ray._private import ray_constants, worker
from ray._private.runtime_env import packaging
from ray._private.thirdparty.pathspec import PathSpec  # type: ignore[attr-defined]
from ray._raylet import (  # type: ignore[attr-defined]  # in Cython
    AuthenticationMode,
    Config,
    get_authentication_mode,
)
from ray.core.generated import gcs_pb2
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.experimental import internal_kv
from ray.serve import Deployment, context
from ray.serve._private import constants
from ray.serve._private.build_app import BuiltApplication
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve.config import AutoscalingConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus
from ray.util import client

from gym_serve.cluster.routing.balancing import members_of
from gym_serve.types.errors import Unavailable

_STOP_SECONDS = 30.0
_PIN_SECONDS = 2_000_000  # 23 days: in milliseconds it must fit 31 bits
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
        self._members.update(replica.replica_id.unique_id for replica in replicas)
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: Any) -> None:
        self._members.died(replica_id.unique_id)
        super().on_replica_actor_died(replica_id)


def local_handle(handle: DeploymentHandle[Any], method: str) -> DeploymentHandle[Any]:
    """``handle`` for ``method``, its router on the running event loop.

    Call it inside the event loop that will use the handle.
    """
    if not handle.is_initialized:
        handle._init(_run_router_in_separate_loop=False)  # type: ignore[no-untyped-call]
    return handle.options(method_name=method)


def autoscaling_config(policy: str, look_back_period_s: float = 30.0, **settings: Any) -> AutoscalingConfig:
    """Serve's autoscaling by a policy of ours.

    Args:
        look_back_period_s: seconds over which the load is averaged; replicas report it three times within
            them, and at least every 10 seconds.
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


def latency_bounds() -> list[float]:
    """Upper bounds of the buckets of Serve's latencies, in milliseconds."""
    return [float(bound) for bound in constants.REQUEST_LATENCY_BUCKETS_MS]


def require_token() -> None:
    """Let the Ray that this process will start ask for a token, as it does by itself from 2.59 on."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    Config.initialize("")  # Ray has read the environment when it was imported


def takes_any_code() -> bool:
    """Whether the connected Ray has no token, so that whoever reaches its ports runs code on it."""
    return bool(ray.is_initialized() and get_authentication_mode() == AuthenticationMode.DISABLED)


def node_address() -> str:
    """Address of this machine, as the other machines of the cluster reach it."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def node_resources() -> dict[str, dict[str, float]]:
    """What each node of the connected cluster has, by its id."""
    return {node["NodeID"]: node["Resources"] for node in live_nodes()}


def live_nodes() -> list[dict[str, Any]]:
    """What Ray knows of each node of the connected cluster that lives."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in nodes if node["Alive"]]


def this_process() -> str:
    """Names this process to others, for `process_is_alive`; empty where it is part of no cluster."""
    if not ray.is_initialized():  # else Ray would start one
        return ""
    context = ray.get_runtime_context()
    return f"{context.get_worker_id()}@{context.get_node_id()}"


def process_is_alive(name: str) -> bool:
    """Whether a process that names itself by `this_process` lives; see `worker_is_alive`."""
    worker_id, _, node_id = name.partition("@")
    return worker_is_alive(worker_id, node_id)


def worker_is_alive(worker_id: str, node_id: str) -> bool:
    """Whether a driver, actor or worker process of the connected cluster lives, by Ray's ids of it.

    Ray knows by the process's connection to its node, so it need not answer. (The documented state API asks
    the dashboard, which a cluster may lack.) Raises `RuntimeError` or `RayError` where Ray does not answer.
    """
    if node_id not in node_resources():
        return False  # its workers are not reported any more
    state: Any = ray._private.state.state
    data = state._connect_and_get_accessor().get_worker_info(ray.WorkerID.from_hex(worker_id))
    tables: Any = gcs_pb2
    return data is not None and bool(tables.WorkerTableData.FromString(data).is_alive)


def started_ray() -> bool:
    """Whether this process has started the Ray that it is connected to."""
    node: Any = worker._global_node
    return node is not None and bool(node.is_head())


def logs_directory() -> Path:
    """The log folder of the connected Ray on this machine."""
    node: Any = worker._global_node
    return Path(node.get_logs_dir_path())


def metrics_targets() -> tuple[Path | None, list[str]]:
    """The file in which Ray keeps the targets for Prometheus, None where this machine has none (no dashboard
    runs, or the head is another machine); and the present ``host:port`` of every node."""
    node: Any = worker._global_node
    present = [f"{n['NodeManagerAddress']}:{n['MetricsExportPort']}" for n in live_nodes()]
    file = Path(node.get_session_dir_path(), ray_constants.PROMETHEUS_SERVICE_DISCOVERY_FILE)
    with suppress(OSError, ValueError):
        listed = {target for group in json.loads(file.read_text()) for target in group["targets"]}
        if listed.issuperset(present):
            return file, present
    return None, present


def dashboard_url() -> str | None:
    """URL of the dashboard of the connected cluster; None where there is none, or if it was joined by ``ray://``."""
    address = None if _by_ray_client() else worker.get_dashboard_url()  # type: ignore[no-untyped-call]
    return f"http://{address}" if address else None


def ray_boards() -> Path | None:
    """The folder with Ray's own Grafana boards for the connected cluster; None without a dashboard here."""
    node: Any = worker._global_node
    folder = Path(node.get_session_dir_path()) / "metrics" / "grafana" / "dashboards"
    return folder if folder.is_dir() else None


def most_resources() -> dict[str, float] | None:
    """What a cluster that grows may have in all; None for one that does not grow, or does not say."""
    if _by_ray_client():
        return None
    most = ray._private.state.state.get_max_resources_from_cluster_config()
    return None if most is None else {name: float(amount) for name, amount in most.items()}


async def is_being_deleted(application: str) -> bool:
    """Whether an application of this cluster's Serve is going or gone, not just this replica of it."""
    try:
        running = (await asyncio.to_thread(serve.status)).applications
    except RayActorError:
        return True  # so is Serve itself
    return application not in running or running[application].status == ApplicationStatus.DELETING


def is_leaving(application: str, deployment: str, replica: str) -> bool:
    """Whether Serve stops a replica, or has stopped it. (By Serve's hook, it learns so only at its end.)"""
    client = _client()
    applications = client.get_serve_details()["applications"] if client is not None else {}
    deployments = applications.get(application, {}).get("deployments", {})
    replicas = deployments.get(deployment, {}).get("replicas", [])
    states = {each["replica_id"]: each["state"] for each in replicas}
    return bool(states.get(replica, "STOPPING") == "STOPPING")


def with_version(deployment: Deployment, version: str) -> Deployment:
    """``deployment`` with a version of its own, so that a deploy restarts it only when that changes.

    Serve gives all deployments of an application one version, and has no way to choose it, so the config is
    replaced by one of a subclass that keeps its version.
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
    return cast("bytes | None", internal_kv._internal_kv_get(key, namespace=_NAMESPACE))


def kv_keys(prefix: bytes) -> list[bytes]:
    """The keys with a prefix."""
    return internal_kv._internal_kv_list(prefix, namespace=_NAMESPACE)


def kv_delete(key: bytes) -> None:
    """Remove an entry."""
    internal_kv._internal_kv_del(key, namespace=_NAMESPACE)


@dataclass(frozen=True)
class RunningVersion:
    """The deployments of an application, as Serve's controller knows them."""

    application: str
    deployments: list[Deployment]
    ingress: str
    route: str

    def configured(self, name: str, changes: dict[str, Any]) -> RunningVersion:
        def changed(deployment: Deployment) -> Deployment:
            if deployment.name != name:
                return deployment
            deployment = copy(deployment)
            config = deployment._deployment_config = deepcopy(deployment._deployment_config)
            config.user_config = {**(config.user_config or {}), **changes}
            return deployment

        return replace(self, deployments=[changed(deployment) for deployment in self.deployments])

    def settings(self, name: str) -> dict[str, Any]:
        """What was changed in one deployment since it was deployed."""
        return next((dict(d.user_config or {}) for d in self.deployments if d.name == name), {})

    def restore(self) -> None:
        """Deploy them, in the place of what was deployed since. Replicas of these versions go on."""
        built = BuiltApplication(
            name=self.application,
            route_prefix=self.route,
            logging_config=None,
            ingress_deployment_name=self.ingress,
            deployments=self.deployments,
            deployment_handles={},
            external_scaler_enabled=False,
        )
        _client().deploy_applications([built], wait_for_applications_running=False)


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


def ignoring(file: Path) -> Callable[[Path], bool]:
    """Whether a ``.gitignore`` names a file below its folder, by the library that Ray brings."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    rules: Any = PathSpec.from_lines("gitwildmatch", lines)  # type: ignore[no-untyped-call]
    return lambda path: path.is_relative_to(file.parent) and rules.match_file(path.relative_to(file.parent))


def upload_code(folder: Path) -> str:
    """Store a folder on the connected cluster; an URI of it for ``py_modules``, which is a hash of its
    files."""
    if _by_ray_client():  # it has no access to the store that a worker has
        with TemporaryDirectory() as scratch:
            archive = shutil.make_archive(f"{scratch}/code", "zip", folder)
            stored = ray.remote(num_cpus=0)(_upload_archive).remote(Path(archive).read_bytes())
        return str(ray.get(stored))
    try:
        uri: str = packaging.get_uri_for_directory(str(folder), include_gitignore=False)
        # Ray's own reference to it ends after minutes, and then it goes with the last replica that uses it: a
        # replica that is started in the place of the only one would not find it.
        packaging.pin_runtime_env_uri(uri, expiration_s=_PIN_SECONDS)
        with TemporaryDirectory() as scratch:
            packaging.upload_package_if_needed(uri, scratch, str(folder), include_gitignore=False)
    except (RuntimeError, ValueError, OSError, RayError) as error:
        raise Unavailable(f"the cluster does not take the graph's code: {error}") from error
    return uri


def _upload_archive(archive: bytes) -> str:
    with TemporaryDirectory() as scratch:
        Path(scratch, "code.zip").write_bytes(archive)
        shutil.unpack_archive(f"{scratch}/code.zip", f"{scratch}/code")
        return upload_code(Path(scratch, "code"))


def serve_is_running() -> bool:
    """Whether a Serve instance runs on the connected cluster."""
    return _client() is not None


def stop_serve() -> None:
    """Stop the Serve instance of the connected cluster, and wait for its end. (``serve.shutdown`` also prints
    that its call failed when the controller ended.)"""
    if (client := _client()) is not None:
        client.shutdown_cached_handles()
        ends = client._controller.graceful_shutdown.options(max_task_retries=0).remote()
        with suppress(RayActorError, GetTimeoutError):
            ray.get(ends, timeout=_STOP_SECONDS)
    forget_serve()


def forget_serve() -> None:
    """Forget the Serve instance of the Ray that this process leaves, or Serve takes the next one for the
    same."""
    context._set_global_client(None)  # type: ignore[no-untyped-call]


def http_address() -> str:
    """Base URL of the HTTP proxy, as this machine reaches it. Raises `Unavailable`: Serve does not run."""
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
    return str(details.get(application, {}).get("route_prefix") or "/").removesuffix("/")


def _by_ray_client() -> bool:
    return bool(client.ray.is_connected())  # type: ignore[no-untyped-call]


def _client() -> Any:
    return context._get_global_client(raise_if_no_controller_running=False)

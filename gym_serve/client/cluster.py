"""Joins a Ray cluster, and leaves it as it was.

This process stops what it started: a local Ray, a connection, a Serve instance. Everything else stays (a
trainer's cluster, other graphs, other applications).
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import ray
from ray import serve
from ray.exceptions import AuthenticationError, RayError
from ray.serve.exceptions import RayServeException

from gym_serve.client.reaper import Reaper
from gym_serve.cluster.routing.rpc.network import uses_tls
from gym_serve.cluster.serve_compat import (
    forget_serve,
    http_address,
    require_token,
    serve_is_running,
    stop_serve,
)
from gym_serve.cluster.starting import (
    HTTP_PORT,
    START_LOG,
    check_port,
    free_port,
    haproxy_folder,
    private_files,
    ray_environment,
    ray_folder,
    try_twice,
)
from gym_serve.types.errors import BadRequest, ClusterMismatch, Unauthorized, Unavailable

_log = logging.getLogger(START_LOG)

_REFUSED = "InvalidAuthToken"
"""What Ray's GCS answers to a call without the cluster's token."""

_PING = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""What every process of Ray asks first (Ray 2.60, ``gcs_service.proto``)."""

_NOT_RAY = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNKNOWN,
)

_CONNECT_SECONDS = 5.0

_HAVE = (
    "put the cluster's token (`ray get-auth-token` prints it there) into RAY_AUTH_TOKEN, or into the "
    "file ~/.ray/auth_token"
)


class Cluster:
    """A connection to Ray with Serve running on it.

    Args:
        address: None for this process's Ray, or else a new local one; ``"auto"`` for the cluster on this
            machine; ``"host:port"`` for another one.
        dashboard: whether a new local Ray has a dashboard.

    Raises:
        ClusterMismatch: the cluster runs another version of Ray or Python.
        Unavailable: there is no cluster at the address, or Ray did not start.
        Unauthorized: the cluster needs a token that this process does not have.
        BadRequest: the address cannot be used.
    """

    def __init__(self, address: str | None = None, *, dashboard: bool = False) -> None:
        if address is not None and address.startswith("ray://"):
            raise BadRequest(
                f"{address}: Ray Client has no direct connection to replicas. Run the driver on the cluster "
                '(address="auto", or `ray job submit`), or use its HTTP ingress: Gym.connect("http://...")'
            )
        quiet_serve()
        self._started_ray = not ray.is_initialized()
        self._reaper: Reaper | None = None
        if self._started_ray and address is None:
            self._reaper = start_ray(dashboard=dashboard)
        elif self._started_ray:
            join(str(address))
        elif address not in (None, "auto", ray.get_runtime_context().gcs_address):
            raise BadRequest(
                f"this process is already connected to {ray.get_runtime_context().gcs_address}, "
                f"not to {address}; call ray.shutdown() first, or leave out the address"
            )
        self._started_serve = False
        try:
            if not serve_is_running():
                start_serve(free_port(HTTP_PORT) if self._reaper else HTTP_PORT)
                self._started_serve = True
        except BaseException:
            self.leave()
            raise

    @property
    def http(self) -> str:
        return http_address()

    def leave(self) -> None:
        """Stop what this object started. Safe to call twice."""
        if self._started_serve and not self._started_ray and ray.is_initialized():
            with suppress(RayServeException):  # the cluster may be gone already
                if not serve.status().applications:
                    stop_serve()
        self._started_serve = False
        if self._started_ray:
            forget_serve()
            ray.shutdown()
        self._started_ray = False
        if self._reaper is not None:
            self._reaper.reap()  # HAProxy outlives its Ray
            self._reaper.dismiss()
            self._reaper = None


def quiet_serve() -> None:
    """Keep what Serve does for gym_serve off the console of this process; its warnings still come."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)


def start_ray(*, dashboard: bool = False) -> Reaper:
    """Start a Ray that ends with this process.

    Args:
        dashboard: whether it has a dashboard, which is eleven processes.

    Returns:
        the process that ends Ray if this one is killed; dismiss it after ``ray.shutdown()``.

    Raises:
        Unavailable: Ray did not start.
    """

    def undo() -> None:
        ray.shutdown()
        reaper.reap()

    _log.info("Starting Ray…")
    require_token()
    files = haproxy_folder()
    reaper = Reaper(ray_environment(files), files)
    try:
        with reaper.marking(), private_files():
            folder = str(ray_folder())
            try_twice("Ray", lambda: _init("local", dashboard=dashboard, _temp_dir=folder), undo, _is_own)
    except BaseException:
        undo()
        reaper.dismiss()
        raise
    return reaper


def start_serve(port: int) -> None:
    """Start Serve on the connected cluster, with its proxies at a port of the loopback interface. Raises
    Unavailable: the port is in use, or Serve did not start."""
    check_port(port)

    def undo() -> None:
        with suppress(RayServeException, RayError, TimeoutError):  # its controller may be what failed
            stop_serve()
        forget_serve()

    def start() -> None:
        # The messages of its controller and proxies come to the console of a trainer that has started Ray.
        serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "WARNING"})

    _log.info("Starting Ray Serve…")
    try_twice("Serve", start, undo, _is_own)


def _init(address: str, *, dashboard: bool | None = None, **options: Any) -> None:
    with _own_termination():
        ray.init(
            address=address,
            include_dashboard=dashboard,
            **options,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )


@contextmanager
def _own_termination() -> Iterator[None]:
    """Keep this process's handler of SIGTERM, in whose place Ray puts one that exits with 15."""
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        yield
    except SystemExit as error:
        if error.code == signal.SIGTERM:
            handler(signal.SIGTERM, None)
        raise
    finally:
        signal.signal(signal.SIGTERM, handler)


def _is_own(error: Exception) -> bool:
    """Whether Ray itself failed. Such errors have no class of their own."""
    kinds = (RayError, RayServeException, RuntimeError, TimeoutError, ConnectionError)
    return isinstance(error, kinds) or type(error) is Exception


def join(address: str) -> None:
    """Connect this process to a Ray cluster: ``"auto"`` or ``"host:port"``. Raises ClusterMismatch,
    Unavailable, Unauthorized: as for `Cluster`."""
    _check_reachable(address)
    try:
        _init(address)
    except RuntimeError as error:
        versions = re.findall(r"(Ray|Python): ([\d.]+\w*)", str(error))
        if "mismatch" not in str(error).lower() or len(versions) < 4:
            raise
        cluster, process = versions[:2], versions[2:4]
        theirs, ours = (", ".join(f"{name} {version}" for name, version in v) for v in (cluster, process))
        raise ClusterMismatch(
            f"the cluster at {address} runs {theirs}; this process runs {ours}. Use the cluster's versions "
            f"here (a venv with its Python; pip install 'ray[serve]=={dict(cluster).get('Ray')}'), "
            "or reach the graph over HTTP: Gym.connect(url)"
        ) from None
    except AuthenticationError:
        raise Unauthorized(
            f"the Ray cluster at {address} needs a token, and this process has none: {_HAVE}"
        ) from None
    except ConnectionError as error:
        # Only the cause has the cluster's answer, as the text of a traceback.
        if _REFUSED in str(error.__cause__):
            raise Unauthorized(_refused(address)) from None
        raise Unavailable(
            f"no Ray cluster at {address!r}: {error}. Start one with `ray start --head`"
        ) from None


def _check_reachable(address: str) -> None:
    """Refuse an address where no Ray listens, which Ray itself tries for over a minute."""
    named = os.environ.get("RAY_ADDRESS") if address == "auto" else address
    is_client = (named or "").startswith("ray://")
    host, _, port = (named or "").removeprefix("ray://").rpartition(":")
    if not (host and port.isdecimal()):
        return  # Ray finds the cluster by itself, or says what is wrong with the address
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
        is_ray = is_client or uses_tls() or _is_ray(f"{host}:{port}")
        problem = None if is_ray else "what listens there is not Ray"
    except (OSError, OverflowError) as error:
        problem = str(error)
    if problem is not None:
        is_variable = os.environ.get("RAY_ADDRESS") == named
        hint = "unset RAY_ADDRESS, or correct it" if is_variable else "start one with `ray start --head`"
        raise Unavailable(f"no Ray cluster at {'RAY_ADDRESS=' * is_variable}{named}: {problem}; {hint}")


def _is_ray(address: str) -> bool:
    """Whether a Ray's GCS answers there, be it that it asks for a token."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(_PING)(b"", timeout=_CONNECT_SECONDS)
        except grpc.RpcError as error:
            return error.code() not in _NOT_RAY
    return True


def _refused(address: str) -> str:
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "token":
        return f"the Ray cluster at {address} refuses this token: {_HAVE}"
    return (
        f"the Ray cluster at {address} needs a token, which Ray sends to an explicit address only with "
        "RAY_AUTH_MODE=token: set it in the environment before Python starts"
    )

"""Joining a Ray cluster and leaving it as it was found.

What this process started, it stops: a local Ray, a connection, a Serve instance. What was there
before (a trainer's cluster, other graphs, other applications) stays.
"""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress

import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from gym_serve.routing.ports import HTTP_PORT, free_port
from gym_serve.routing.serve_compat import forget_serve, http_address, serve_is_running
from gym_serve.types.errors import BadRequest, ClusterMismatch, Unauthorized, Unavailable

__all__ = ["Cluster", "join"]

_NO_TOKEN = getattr(ray.exceptions, "AuthenticationError", ())  # Ray 2.52 and later
_REFUSED = "InvalidAuthToken"
"""What Ray's GCS answers to a call without the cluster's token."""

_HAVE = (
    "put that of the cluster (there: `ray get-auth-token`) into RAY_AUTH_TOKEN, or into the file "
    "~/.ray/auth_token"
)


class Cluster:
    """A connection to Ray with Serve running on it.

    Args:
        address: None for this process's Ray or else a new local one, without Ray's dashboard (``ray.init()``
            before starts one that has it); ``"auto"`` for the cluster on this machine; ``"host:port"`` for
            any other.

    Raises:
        ClusterMismatch: the cluster runs another version of Ray or Python.
        Unavailable: there is no cluster at the address.
        Unauthorized: the cluster asks for a token that this process does not send.
        BadRequest: the address cannot be used.
    """

    def __init__(self, address: str | None = None) -> None:
        if address is not None and address.startswith("ray://"):
            raise BadRequest(
                f"{address}: Ray Client has no direct connection to replicas. Run the driver on the cluster "
                '(address="auto", or `ray job submit`), or use its HTTP ingress: Gym.connect("http://...")'
            )
        self._started_ray = not ray.is_initialized()
        if self._started_ray:
            join(address)
        elif address not in (None, "auto", ray.get_runtime_context().gcs_address):
            raise BadRequest(
                f"this process is already connected to {ray.get_runtime_context().gcs_address}, "
                f"not to {address}; call ray.shutdown() first, or leave out the address"
            )
        self._started_serve = False
        try:
            if not serve_is_running():
                local = address is None and self._started_ray
                port = free_port(HTTP_PORT) if local else HTTP_PORT
                serve.start(http_options={"host": "127.0.0.1", "port": port})
                self._started_serve = True
        except BaseException:
            self.leave()
            raise

    @property
    def http(self) -> str:
        """Base URL of the Serve proxy, e.g. ``http://127.0.0.1:8000``."""
        return http_address()

    def leave(self) -> None:
        """Stop what this object started; safe to call twice."""
        if self._started_serve and not self._started_ray and ray.is_initialized():
            with suppress(RayServeException):  # the cluster may be gone already
                if not serve.status().applications:
                    serve.shutdown()  # type: ignore[no-untyped-call]
        self._started_serve = False
        if self._started_ray:
            forget_serve()
            ray.shutdown()
        self._started_ray = False


def join(address: str | None) -> None:
    """Connect this process to a Ray cluster, or start a local one; the arguments of `Cluster`.

    Raises:
        ClusterMismatch, Unavailable, Unauthorized: as for `Cluster`.
    """
    try:
        ray.init(
            address=address or "local",
            include_dashboard=False if address is None else None,  # it is eleven processes
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
        logging.getLogger("ray.serve").setLevel("WARNING")
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
    except _NO_TOKEN:
        raise Unauthorized(
            f"the Ray cluster at {address} asks for a token, and there is none: {_HAVE}"
        ) from None
    except ConnectionError as error:
        # The answer of the cluster is in the cause only, which holds it as the text of a traceback.
        if _REFUSED in str(error.__cause__):
            raise Unauthorized(_refused(address)) from None
        raise Unavailable(
            f"no Ray cluster at {address!r}: {error}. Start one with `ray start --head`"
        ) from None


def _refused(address: str | None) -> str:
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "token":
        return f"the Ray cluster at {address} does not take this token: {_HAVE}"
    return (
        f"the Ray cluster at {address} asks for a token, which Ray sends to an explicit address only if "
        "it is told to: set RAY_AUTH_MODE=token in the environment, before Python starts"
    )

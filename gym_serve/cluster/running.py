"""An application of Serve on its way to running: started, waited for, and changed while it runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.schema import ApplicationStatus

from gym_serve.cluster.health import reason
from gym_serve.cluster.serve_compat import RunningVersion, running_version
from gym_serve.cluster.starting import START_LOG
from gym_serve.types.errors import NotFound, Unavailable

_log = logging.getLogger(START_LOG)
_POLL_SECONDS = 0.1


def start(name: str, deploy: Callable[[], object]) -> None:
    """Deploy an application, and wait until all of its servers run; or raise `Unavailable`, with the reason.
    (`serve.run` looks once a second, and says nothing.)"""
    try:
        deploy()
        _wait(name)
    except (RuntimeError, TimeoutError, RayError) as error:
        reasons = "; ".join(_reasons(name)) or " ".join(str(error).split())[:500]
        raise Unavailable(f"the graph {name!r} did not start: {reasons}") from error


def reconfigure(name: str, server: str, changes: dict[str, Any]) -> None:
    """Change settings of a running server; its replicas keep running (Serve's ``user_config``).

    Settings that were changed before stay changed: a replica that starts later knows only this
    ``user_config``. Raises `NotFound` if no such application runs, `Unavailable` if the settings do not fit.
    """
    start(name, the_running(name).configured(server, changes).restore)


def the_running(name: str) -> RunningVersion:
    """What runs as an application now. Raises `NotFound`."""
    if (running := running_version(name)) is None:
        raise NotFound(f"no application {name!r} runs on this cluster")
    return running


def _wait(name: str) -> None:
    reported: list[str] = []
    while True:
        application = serve.status().applications.get(name)
        if application is None:
            raise RuntimeError(f"{name} was deleted while it started")
        if application.status == ApplicationStatus.RUNNING:
            return
        if application.status == ApplicationStatus.DEPLOY_FAILED:
            raise RuntimeError(application.message)
        states = {server: found.status.value for server, found in application.deployments.items()}
        waiting = sorted(server for server, state in states.items() if state != "HEALTHY")
        if waiting and waiting != reported:
            ready = len(states) - len(waiting)
            _log.info("Waiting for %s (%s of %s ready)…", ", ".join(waiting), ready, len(states))
            reported = waiting
        time.sleep(_POLL_SECONDS)


def _reasons(name: str) -> Iterator[str]:
    application = serve.status().applications.get(name)
    for server, deployment in application.deployments.items() if application else ():
        if deployment.status.value in ("DEPLOY_FAILED", "UNHEALTHY"):
            yield f"{server}: {reason(deployment.message)}"

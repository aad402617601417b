"""State of every server of the running application, for ``/health``.

A server is ready if its calls are answered now: at least one replica runs, or the deployment is scaled to
zero and starts one on a call. The replicas count, not the last deploy: if Serve cannot build a new version of
the file, it lists no deployments of the application, and those of the previous version are asked directly.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ray import serve

from gym_serve.cluster.reports import reports_of
from gym_serve.gateway.health import reached
from gym_serve.graph.spec import Node

_MESSAGE = 1000  # characters; the end of a traceback says most
_UNKNOWN = "no replica runs, and Serve starts none: the last deploy failed, or the graph is being taken down"


async def health(nodes: Mapping[str, Node]) -> dict[str, dict[str, Any]]:
    """By server: its state (``ready``, ``starting``, ``unhealthy``, ``unreachable``) and replicas."""
    remote = {name: node for name, node in nodes.items() if node.url is not None}
    own = nodes.keys() - remote.keys()
    own_health, elsewhere = await asyncio.gather(_own(own), reached(remote))
    return {name: elsewhere[name] if name in elsewhere else own_health[name] for name in nodes}


async def _own(servers: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The servers of this application, as Serve sees them, else by asking their replicas."""
    application = serve.get_replica_context().app_name
    deployments = await asyncio.to_thread(_deployments, application)
    states = {name: _state(deployments[name]) for name in servers if name in deployments}
    reports = await reports_of(application, [name for name in servers if name not in deployments])
    for name, replicas in reports.items():
        if running := sum(not replica["draining"] for replica in replicas):
            states[name] = {"state": "ready", "replicas": {"RUNNING": running}}
        else:
            states[name] = {"state": "unhealthy", "replicas": {}, "message": _UNKNOWN}
    return states


def _deployments(application: str) -> Mapping[str, Any]:
    """Serve's view of an application; empty while it is taken down, and after a file that cannot be built."""
    status = serve.status().applications.get(application)
    return status.deployments if status is not None else {}


def _state(deployment: Any) -> dict[str, Any]:
    replicas = {str(getattr(state, "value", state)): n for state, n in deployment.replica_states.items()}
    status = str(getattr(deployment.status, "value", deployment.status))
    if replicas.get("RUNNING", 0) > 0 or (status == "HEALTHY" and not replicas):
        state = "ready"
    else:
        state = "unhealthy" if status in ("UNHEALTHY", "DEPLOY_FAILED") else "starting"
    message = {"message": deployment.message[-_MESSAGE:]} if deployment.message else {}
    return {"state": state, "replicas": replicas, **message}


# An exception in a traceback stands at the beginning of a line, after frames, which are indented.
_EXCEPTION = re.compile(r"\n[ ]+[^\n]*\n(?=[^ \n])")


def reason(message: str) -> str:
    """Why a deploy failed, in one line: the exception, if the message ends in a traceback."""
    first, *problems = _EXCEPTION.split(message.strip())[-1].splitlines() or [""]
    return f"{first} {'; '.join(line.strip().removeprefix('- ') for line in problems)}".strip()

"""State of every server of the running application, for ``/health``.

A server is ready when its calls are answered now: at least one replica runs, or the deployment is
scaled to zero and starts one when it is called. Serve learns of a replica that died at its next
health check (``health_check_period_s``, 10 seconds by default).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
from ray import serve

from gym_serve.graph.spec import Node

__all__ = ["health"]

_REMOTE_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
_MESSAGE = 1000  # characters; of a traceback the end says most
_GONE = frozenset({502, 503, 504})  # what a proxy answers for a server that is not there


async def health(nodes: Mapping[str, Node]) -> dict[str, dict[str, Any]]:
    """By server: its state (``ready``, ``starting``, ``unhealthy``, ``unreachable``) and replicas."""
    remote = {name: node for name, node in nodes.items() if node.url is not None}
    deployments, reached = await asyncio.gather(asyncio.to_thread(_deployments), _reached(remote))
    return {name: reached[name] if name in reached else _state(deployments.get(name)) for name in nodes}


def _deployments() -> Mapping[str, Any]:
    """Serve's view of this replica's application; empty while it is being taken down."""
    application = serve.status().applications.get(serve.get_replica_context().app_name)
    return application.deployments if application is not None else {}


def _state(deployment: Any) -> dict[str, Any]:
    if deployment is None:
        return {"state": "starting", "replicas": {}}
    replicas = {str(getattr(state, "value", state)): n for state, n in deployment.replica_states.items()}
    status = str(getattr(deployment.status, "value", deployment.status))
    if replicas.get("RUNNING", 0) > 0 or (status == "HEALTHY" and not replicas):
        state = "ready"
    else:
        state = "unhealthy" if status in ("UNHEALTHY", "DEPLOY_FAILED") else "starting"
    message = {"message": deployment.message[-_MESSAGE:]} if deployment.message else {}
    return {"state": state, "replicas": replicas, **message}


async def _reached(remote: Mapping[str, Node]) -> dict[str, dict[str, Any]]:
    if not remote:
        return {}
    async with aiohttp.ClientSession(timeout=_REMOTE_TIMEOUT) as client:
        states = await asyncio.gather(*(_reach(client, node) for node in remote.values()))
    return dict(zip(remote, states, strict=True))


async def _reach(client: aiohttp.ClientSession, node: Node) -> dict[str, Any]:
    """Any answer will do: the base URL of a server need not be a route."""
    headers = {name: value.get_secret_value() for name, value in node.headers.items()}
    try:
        async with client.get(str(node.url), headers=headers, allow_redirects=False) as answer:
            status = answer.status
    except (aiohttp.ClientError, TimeoutError, asyncio.TimeoutError) as error:
        return {"state": "unreachable", "url": node.url, "message": f"{type(error).__name__}: {error}"}
    if status in _GONE:
        return {"state": "unreachable", "url": node.url, "message": f"HTTP {status}"}
    return {"state": "ready", "url": node.url}

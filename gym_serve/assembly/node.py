"""What a node of a graph becomes: its server, with a client for each that it calls, and its runner."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gym_serve.graph.spec import Node
from gym_serve.servers.base import Server
from gym_serve.servers.clients import CLIENTS, Client
from gym_serve.servers.model import ModelServer
from gym_serve.servers.resources import ResourcesServer
from gym_serve.servers.runner import ServerRunner
from gym_serve.servers.transport import Transport
from gym_serve.types.requests import JSON


def constructed(
    node: Node,
    client: Callable[[str], Client],
    *,
    tracing: float | None,
    replica: str | None = None,
    lasting: bool = True,
    **settings: Any,
) -> ServerRunner:
    """The runner of a node's server. It is not started. ``tracing``: see `Graph.tracing`; ``lasting``:
    whether its sessions may outlive this process, on another replica."""
    assert node.cls is not None  # a remote server runs elsewhere
    settings = {**node.connected(client), **settings}
    if replica is not None and issubclass(node.cls, ResourcesServer | ModelServer):
        settings["replica"] = replica
    server = node.cls(name=node.name, **settings)
    if isinstance(server, ResourcesServer) and not lasting:
        server.takes_snapshots = False
    return ServerRunner(server, replica, tracing=tracing)


def client_of(node: Node, transport: Transport) -> Client:
    """The client of a server, for those that call it."""
    return CLIENTS[node.kind](transport)


def remote_transport(node: Node) -> Transport:
    """The transport to a server of ``type: http``, by its URL."""
    # Imported here: its HTTP client takes longer to import than a small graph to start, and few need it.
    from gym_serve.transports import HttpTransport

    return HttpTransport(node.name, str(node.url), node.sent_headers(), node.unavailable_tools)


async def states_of(runners: Iterable[ServerRunner]) -> dict[str, JSON]:
    """State of every server of this process, by name, as in ``/health``."""
    return {runner.server.name: await _state(runner.server) for runner in runners}


async def _state(server: Server) -> JSON:
    try:
        await server.check_health()
    except Exception as error:  # a server may raise anything to say that it is broken
        return {"state": "unhealthy", "message": f"{type(error).__name__}: {error}"}
    return {"state": "ready"}

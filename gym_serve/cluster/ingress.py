"""`Ingress`: the Serve deployment that answers HTTP for a graph, by its `Gateway`.

To Serve it is an ASGI application (`application`), as Serve passes WebSockets only to those. What the gateway
asks of its host, it finds out from the replicas, from Serve and from Ray.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gym_serve.cluster.ownership import watch
from gym_serve.cluster.replica import log_of_replica, transport_to
from gym_serve.cluster.reports import AgentReplicas, health, reconfigure, reports_of
from gym_serve.cluster.serve_compat import http_host, is_leaving
from gym_serve.cluster.weights import WeightStore, check_reach, hold, release, update_weights
from gym_serve.gateway.access import exposure
from gym_serve.gateway.gateway import Gateway
from gym_serve.graph.spec import Graph
from gym_serve.servers.model import HoldMode
from gym_serve.servers.transport import Call, Reply
from gym_serve.types.errors import BadRequest, GraphError
from gym_serve.types.requests import JSON

_LOOK_SECONDS = 3.0  # between two looks whether this replica leaves


class Description(NamedTuple):
    """A running graph."""

    public: dict[str, Any]
    default_agent: str | None
    owned: bool


def application() -> ASGIApp:
    """Serve's builder of the ASGI application: the gateway of its replica answers it."""
    return _answer


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        ingress: Any = serve.get_replica_context().servable_object
        response = await ingress.gateway.answer(Request(scope, receive))
        await response(scope, receive, send)
    elif scope["type"] == "websocket":
        await _refuse_upgrade(scope, receive, send)
    else:
        await _live(receive, send)


async def _refuse_upgrade(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a WebSocket's handshake: with the reason if the server can send one, else with a bare 403."""
    await receive()  # the handshake
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008})
        return
    refusal = BadRequest("WebSockets are not supported; send an HTTP request")
    response = JSONResponse(refusal.to_body(), refusal.status)
    start = {"type": "websocket.http.response.start", "status": response.status_code}
    await send({**start, "headers": response.raw_headers})
    await send({"type": "websocket.http.response.body", "body": response.body})


async def _live(receive: Receive, send: Send) -> None:
    while True:
        event = (await receive())["type"]
        await send({"type": f"{event}.complete"})
        if event == "lifespan.shutdown":
            return


class Ingress:
    """The deployment, and the `Host` of its gateway. Raises `GraphError` where other machines reach Serve,
    and the graph has no token."""

    def __init__(self, graph: Graph, handles: Mapping[str, DeploymentHandle[Any]]) -> None:
        if problem := exposure(http_host(), graph.auth_tokens, insecure=graph.insecure):
            raise GraphError(problem)
        log_of_replica(graph.logs)
        context = serve.get_replica_context()
        self._application = context.app_name
        self._names = (context.app_name, context.deployment, context.replica_id.unique_id)
        self._graph = graph
        self._replicas = AgentReplicas(context.app_name, graph.nodes)
        self._disowned: threading.Event | None = None  # None where the graph belongs to no run
        self._leaving, self._looked = False, time.monotonic()
        transports = {name: transport_to(node, handles.get(name)) for name, node in graph.nodes.items()}
        self.gateway = Gateway(graph, transports, self)

    def reconfigure(self, config: Mapping[str, Any]) -> None:
        """Serve's hook for ``user_config``: ``graph``, the answer of ``/graph``, and whether it is
        ``owned``."""
        self.gateway.public = config["graph"]
        if config["owned"] and self._disowned is None:
            self._disowned = threading.Event()
            watched = (self._application, self._disowned)
            threading.Thread(target=watch, args=watched, name="owner", daemon=True).start()
        elif not config["owned"] and self._disowned is not None:
            self._disowned.set()
            self._disowned = None

    async def describe(self) -> Description:
        """What a client that joins the graph must know of it."""
        return Description(dict(self.gateway.public), self._graph.default_agent, self._disowned is not None)

    async def stats(self) -> JSON:
        """What all replicas have counted, and their load, for callers with a handle."""
        return await self.gateway.stats()

    async def states(self) -> dict[str, JSON]:
        """See `Host.states`; also for callers with a handle."""
        return await health(self._graph.nodes)

    async def reports(self, op: str) -> dict[str, list[JSON]]:
        servers = [name for name, node in self._graph.nodes.items() if node.url is None]
        return await reports_of(self._application, servers, op)

    async def ask(self, call: Call) -> tuple[list[tuple[str, JSON]], list[str]]:
        return await self._replicas.ask(call)

    async def tell(self, name: str, call: Call) -> Reply:
        return await self._replicas.tell(name, call)

    def leaving(self) -> bool:
        """See `Host.leaving`; as of the last look, which is a few seconds old."""
        now = time.monotonic()
        if now > self._looked + _LOOK_SECONDS:
            self._looked = now
            self._look = asyncio.ensure_future(self._look_up())
        return self._leaving

    async def _look_up(self) -> None:
        with suppress(RayError, RayServeException, RuntimeError):  # the control plane may be starting again
            self._leaving = await asyncio.to_thread(is_leaving, *self._names)

    async def updates(self, model: str) -> int | None:
        return await asyncio.to_thread(WeightStore(self._application).updates, model)

    def steering(self, model: str) -> Replicated:
        check_reach(self.gateway.public, model)
        return Replicated(self._application, model)


class Replicated(NamedTuple):
    """The `Steering` of a model on all of its replicas."""

    application: str
    model: str

    async def hold(self, mode: HoldMode) -> None:
        await hold(self.application, self.model, mode)

    async def release(self) -> None:
        await release(self.application, self.model)

    async def set_version(self, version: str) -> None:
        await update_weights(self.application, self.model, version)

    async def change(self, changes: JSON) -> None:
        await asyncio.to_thread(reconfigure, self.application, self.model, changes)

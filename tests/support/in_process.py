"""The HTTP face of graphs that run in this process, without Ray: the real `Gateway` with inline edges.

What only a cluster has is missing: Serve's proxy, and what it says of replicas (``/health``, ``/pressure``).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from gym_serve.graph import gateway
from gym_serve.graph.local import LocalGraph
from gym_serve.graph.spec import Graph

__all__ = ["InProcess", "listen"]


def listen(port: int = 0) -> socket.socket:
    """A socket of 127.0.0.1 that listens at once, so that nobody has to wait for the server behind it.

    Its protocol is named, as asyncio sets TCP_NODELAY only then. Without that each answer takes 40 ms, until
    Linux acknowledges the headers.
    """
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", port))
    listening.listen()
    return listening


class InProcess:
    """Serves graphs from the event loop that starts it.

    Args:
        graphs: by route prefix, which is empty for a graph at the root.
        listening: where it answers; a free port if none is given.
    """

    def __init__(self, graphs: Mapping[str, Graph], listening: socket.socket | None = None) -> None:
        self._listening = listening or listen()
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._running = [LocalGraph(graph) for graph in graphs.values()]
        pairs = zip(graphs.items(), self._running, strict=True)
        self._gateways = {prefix: _Gateway(graph, running) for (prefix, graph), running in pairs}

    async def start(self) -> None:
        """Start all servers, and listen."""
        for graph in self._running:
            await graph.start()
        self._server = uvicorn.Server(
            uvicorn.Config(self._serve, log_level="error", lifespan="off", interface="asgi3", ws="none")
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listening]))

    async def stop(self) -> None:
        """Stop what `start` started."""
        self._server.should_exit = True
        await self._serving
        for graph in self._running:
            await graph.stop()

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        prefix = next((p for p in self._gateways if path == p or path.startswith(f"{p}/")), None)
        response: Response = PlainTextResponse("no graph has this prefix", 404)
        if prefix is not None:
            response = await self._gateways[prefix].answer(Request({**scope, "root_path": prefix}, receive))
        await response(scope, receive, send)


class _Gateway(gateway.Gateway):
    """The gateway as a cluster has it, except for the edges."""

    def __init__(self, graph: Graph, running: LocalGraph) -> None:
        plan = gateway.GatewayPlan.of(graph)
        super().__init__(replace(plan, nodes={}), {})
        self._plan = plan
        self._agents = [name for name, node in plan.nodes.items() if node.kind == "agent"]
        self._edges.update({name: running.edge(name) for name in plan.nodes})
        self.reconfigure(graph.public())

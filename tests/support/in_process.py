"""The HTTP face of graphs that run in this process, without Ray: the real `Gateway` with inline transports.

What only a cluster has is missing: Serve's proxy, and the load of replicas (``/pressure``, ``/stats``).
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from gym_serve.assembly import LocalGraph, ThisProcess
from gym_serve.gateway.gateway import Gateway
from gym_serve.gateway.local import listen, local_gateway
from gym_serve.graph.spec import Graph

__all__ = ["InProcess", "listen", "serving"]


class InProcess:
    """Serves graphs from the event loop that starts it.

    Args:
        graphs: by route prefix, which is empty for a graph at the root.
        listening: where it answers; a free port if none is given.
        watched: whether a request is cancelled when its client leaves, as by Serve's proxy. Not for streams.
    """

    def __init__(
        self, graphs: Mapping[str, Graph], listening: socket.socket | None = None, *, watched: bool = False
    ) -> None:
        self._watched = watched
        self._listening = listening or listen()
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._running = [LocalGraph(graph) for graph in graphs.values()]
        pairs = zip(graphs.items(), self._running, strict=True)
        self._gateways = {prefix: _gateway(graph, running) for (prefix, graph), running in pairs}
        self._graphs = dict(zip(graphs, zip(graphs.values(), self._running, strict=True), strict=True))

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
        self._listening.close()
        for graph in self._running:
            await graph.stop()

    async def replace_gateways(self) -> None:
        """Put new gateways in the place of the ones that run, whose open responses end."""
        before = list(self._gateways.values())
        self._gateways = {prefix: _gateway(*graph) for prefix, graph in self._graphs.items()}
        for lost in before:
            lost._batches._leaving = lambda: True

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        prefix = next((p for p in self._gateways if path == p or path.startswith(f"{p}/")), None)
        response: Response = PlainTextResponse("no graph has this prefix", 404)
        if prefix is not None:
            request = Request({**scope, "root_path": prefix}, receive)
            gateway = self._gateways[prefix]
            found = await (_answer_watched(gateway, request) if self._watched else gateway.answer(request))
            if found is None:
                return
            response = found
            # As Serve's proxy does.
            response.headers.setdefault("x-request-id", request.headers.get("x-request-id", ""))
        await response(scope, receive, send)


@contextmanager
def serving(graphs: Callable[[str], Mapping[str, Graph]], *, watched: bool = False) -> Iterator[str]:
    """Serve graphs from a thread of their own, for a client that blocks; the base URL.

    Args:
        graphs: gives them by route prefix, for the base URL.
        watched: see `InProcess`.
    """
    with listen() as listening, _loop_of_a_thread() as loop:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"

        async def start() -> InProcess:
            served = InProcess(graphs(url), listening, watched=watched)
            await served.start()
            return served

        served = asyncio.run_coroutine_threadsafe(start(), loop).result()
        try:
            yield url
        finally:
            asyncio.run_coroutine_threadsafe(served.stop(), loop).result()


async def _answer_watched(gateway: Gateway, request: Request) -> Response | None:
    """A gateway's answer; None if the client has left before, which cancels it."""
    await request.body()  # it is kept for the gateway
    answering = asyncio.ensure_future(gateway.answer(request))
    leaving = asyncio.ensure_future(request.receive())
    await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
    if answering.done():
        leaving.cancel()
        return answering.result()
    answering.cancel()
    await asyncio.wait([answering])
    return None


@contextmanager
def _loop_of_a_thread() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _gateway(graph: Graph, running: LocalGraph) -> Gateway:
    transports = {name: running.transport(name) for name in graph.nodes}
    return local_gateway(graph, transports, ThisProcess(graph, running.runners))

"""The HTTP ingress of a graph that runs without Ray, for what an agent starts beside it.

An external harness reaches its model, and the tools of its environment, over HTTP: here on a free port of the
loopback interface, with a token that nobody else has. What only a cluster has is missing: the load of
replicas (``/pressure``, ``/stats``), and changes of the policy (`gym_serve.gateway.policy_routes`).
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NoReturn

import uvicorn
from pydantic import SecretStr
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from gym_serve.assembly.node import states_of
from gym_serve.assembly.own_episodes import GONE, answer_here
from gym_serve.gateway.gateway import Gateway
from gym_serve.gateway.health import reached
from gym_serve.graph.spec import Graph
from gym_serve.servers.runner import ServerRunner
from gym_serve.servers.transport import Call, Reply, Transport
from gym_serve.types.errors import NotFound
from gym_serve.types.requests import JSON


def listen() -> socket.socket:
    """A socket of 127.0.0.1 that listens at once, so that nobody has to wait for the server behind it.

    Its protocol is named, as asyncio sets TCP_NODELAY only then. Without that each answer takes 40 ms, until
    Linux acknowledges the headers.
    """
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    return listening


class ThisProcess:
    """The `Host` of a graph that runs in this process."""

    def __init__(self, graph: Graph, runners: Iterable[ServerRunner]) -> None:
        self._runners = list(runners)
        self._remote = {name: node for name, node in graph.nodes.items() if node.url is not None}

    async def states(self) -> dict[str, JSON]:
        return {**await states_of(self._runners), **await reached(self._remote)}

    async def reports(self, op: str) -> dict[str, list[JSON]]:
        raise NotFound(f"/{op}: only replicas tell their load, and a graph without Ray has none")

    async def ask(self, call: Call) -> tuple[list[tuple[str, JSON]], list[str]]:
        return [("local", (await answer_here(call, self._runners, None)).json())], []

    async def tell(self, name: str, call: Call) -> Reply:
        if name != "local":
            raise NotFound(GONE)
        return await answer_here(call, self._runners, None)

    def leaving(self) -> bool:
        return False

    async def updates(self, model: str) -> int | None:
        return None

    def steering(self, model: str) -> NoReturn:
        raise NotFound(
            f"only a graph on a Ray cluster lets its trainer change {model} over HTTP, and this one runs "
            "without Ray; call `pause`, `resume` or `update_weights` of its Gym, in its process"
        )


def local_gateway(
    graph: Graph, transports: Mapping[str, Transport], runners: Iterable[ServerRunner]
) -> Gateway:
    """The gateway of a graph that runs in this process."""
    gateway = Gateway(graph.outline(), transports, ThisProcess(graph, runners))
    gateway.public = graph.public()
    return gateway


class LocalIngress:
    """A `local_gateway` behind a port of its own, in the event loop that starts it. ``url``: its address;
    ``token``: what its callers authenticate with."""

    def __init__(self) -> None:
        self._listening = listen()
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.token = SecretStr(secrets.token_urlsafe(24))

    async def start(
        self, graph: Graph, transports: Mapping[str, Transport], runners: Iterable[ServerRunner]
    ) -> None:
        """Answer; until then, requests wait."""
        self._gateway = local_gateway(replace(graph, auth_tokens=(self.token,)), transports, runners)
        config = uvicorn.Config(self._answer, log_level="error", lifespan="off", interface="asgi3", ws="none")
        self._server = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listening]))

    async def stop(self) -> None:
        """Close the port; open requests are cut off. Safe to call where `start` was not."""
        if hasattr(self, "_serving"):
            self._server.should_exit = self._server.force_exit = True
            await self._serving
        self._listening.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._gateway.answer(Request(scope, receive))
        await response(scope, receive, send)

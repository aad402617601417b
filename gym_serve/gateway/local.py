"""The gateway of a graph that runs in one process, and `LocalIngress`, where its harnesses reach it: a free
port of the loopback interface, with a token that nobody else has."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Mapping
from dataclasses import replace

import uvicorn
from pydantic import SecretStr
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from gym_serve.gateway.gateway import Gateway
from gym_serve.gateway.host import Host
from gym_serve.graph.spec import Graph
from gym_serve.servers.transport import Transport


def listen() -> socket.socket:
    """A socket of 127.0.0.1 that listens at once, so that nobody has to wait for the server behind it.

    Its protocol is named, as asyncio sets TCP_NODELAY only then. Without that each answer takes 40 ms, until
    Linux acknowledges the headers.
    """
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    return listening


def local_gateway(graph: Graph, transports: Mapping[str, Transport], host: Host) -> Gateway:
    """The gateway of a graph that runs in this process."""
    gateway = Gateway(graph.outline(), transports, host)
    gateway.public = graph.public()
    return gateway


class LocalIngress:
    """A `local_gateway` behind a port of its own, in the event loop that starts it. ``url``: its address;
    ``token``: what its callers authenticate with."""

    def __init__(self) -> None:
        self._listening = listen()
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.token = SecretStr(secrets.token_urlsafe(24))

    async def start(self, graph: Graph, transports: Mapping[str, Transport], host: Host) -> None:
        """Answer; until then, requests wait."""
        self._gateway = local_gateway(replace(graph, auth_tokens=(self.token,)), transports, host)
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

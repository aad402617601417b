"""The gateway of a graph without Ray, called in this process as a server calls it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
from pydantic import SecretStr
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from gym_serve.assembly import LocalGraph, ThisProcess
from gym_serve.gateway.gateway import Gateway
from gym_serve.gateway.local import local_gateway
from gym_serve.graph import GraphSpec, resolve

ROOT = "/shown"


class LocalSite:
    """An ASGI application: the graph below `ROOT`, as Serve has it below a route prefix."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self.gateway.answer(Request({**scope, "root_path": ROOT}, receive))
        await response(scope, receive, send)


@asynccontextmanager
async def local_site(
    graph: Mapping[str, Any], tokens: Sequence[str] = ()
) -> AsyncGenerator[tuple[LocalSite, httpx.AsyncClient], None]:
    """A graph that runs, and a client of it without a token."""
    resolved = resolve(GraphSpec.model_validate(graph))
    local = LocalGraph(resolved)
    await local.start()
    secured = replace(resolved, auth_tokens=tuple(map(SecretStr, tokens)))
    transports = {name: local.transport(name) for name in resolved.nodes}
    gateway = local_gateway(secured, transports, ThisProcess(secured, local.runners))
    site = LocalSite(gateway)
    base = f"http://127.0.0.1:8000{ROOT}/"
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(site), base_url=base) as client:
            yield site, client
    finally:
        await local.stop()

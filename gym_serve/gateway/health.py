"""State of the servers of ``type: http``, for ``/health``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx

from gym_serve.graph.spec import Node

_SECONDS = 5.0
_GONE = frozenset({502, 503, 504})  # what a proxy answers for a server that is not there


async def reached(remote: Mapping[str, Node]) -> dict[str, dict[str, Any]]:
    """The states of servers of ``type: http``, by name."""
    if not remote:
        return {}
    async with httpx.AsyncClient() as client:
        states = await asyncio.gather(*(_reach(client, node) for node in remote.values()))
    return dict(zip(remote, states, strict=True))


async def _reach(client: httpx.AsyncClient, node: Node) -> dict[str, Any]:
    """The state of a remote server; any answer is fine, as its base URL need not be a route."""
    try:
        request = client.stream("GET", str(node.url), headers=node.sent_headers(), timeout=_SECONDS)
        async with request as answer:
            status = answer.status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return {"state": "unreachable", "url": node.url, "message": f"{type(error).__name__}: {error}"}
    if status in _GONE:
        return {"state": "unreachable", "url": node.url, "message": f"HTTP {status}"}
    return {"state": "ready", "url": node.url}

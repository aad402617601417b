"""`Connection`: how a `Gym` reaches its graph. There are three: on a Ray cluster, over HTTP, in this process.

The one on a cluster is in `gym_serve.client.deployed`, which imports Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import httpx
import orjson

from gym_serve.client import loop
from gym_serve.graph.local import LocalGraph
from gym_serve.graph.spec import Graph
from gym_serve.routing.http import HttpTransport
from gym_serve.servers.transport import Transport
from gym_serve.types.errors import BadRequest, Unavailable, error_from_body
from gym_serve.types.requests import JSON

__all__ = ["Connection", "HttpConnection", "LocalConnection"]


class Connection:
    """Reaches a graph. What a kind of connection cannot do raises `BadRequest`.

    Args:
        name: name of the graph.
        public: the graph without secrets, as ``/graph`` shows it.
        url: its address over HTTP; empty where it has none.
        default_agent: agent of the rows that name none.
        graph: the graph itself, where this process deployed it.
    """

    kind = "a graph that was reached otherwise"

    def __init__(
        self,
        name: str,
        public: Mapping[str, Any],
        url: str = "",
        default_agent: str | None = None,
        graph: Graph | None = None,
    ) -> None:
        self.name = name
        self.public = dict(public)
        self.url = url
        self.default_agent = default_agent
        self.graph = graph

    def transport(self, server: str) -> Transport:
        """A new transport to a server; whoever asked for it closes it."""
        raise NotImplementedError

    async def health(self) -> JSON:
        """State of every server, by name."""
        raise NotImplementedError

    async def pressure(self) -> JSON:
        """How busy the graph is; see `Gym.pressure`."""
        self._refuse("pressure")

    def handle(self, server: str) -> Any:
        """The Serve handle of a server."""
        self._refuse("handle")

    def reconfigure(self, server: str, changes: JSON) -> None:
        """Change settings of a running server."""
        self._refuse("changing the settings of a server")

    async def update_weights(
        self, model: str, version: str, *, path: str | None, tensors: bytes | None, mode: Any
    ) -> None:
        """Give all replicas of a model new weights; see `Gym.update_weights`."""
        self._refuse("update_weights")

    def close(self) -> None:
        """Leave the graph; take it down, if this connection deployed it. Safe to call twice."""

    def again(self) -> Callable[[], Connection]:
        """What reaches the same graph from another process, where it is unpickled and called."""
        raise TypeError(f"a Gym over {self.kind} cannot be pickled")

    def _refuse(self, what: str) -> NoReturn:
        raise BadRequest(f"{what} needs a graph on a Ray cluster; {self.name} is {self.kind}")


class LocalConnection(Connection):
    """A graph in this process.

    Raises:
        GraphError: it needs a cluster.
        GymError: a server did not start.
    """

    kind = "a graph in this process (ray=False)"

    def __init__(self, name: str, graph: Graph) -> None:
        super().__init__(name, graph.public(), default_agent=graph.default_agent, graph=graph)
        self._local = LocalGraph(graph)
        loop.wait(self._local.start())

    def transport(self, server: str) -> Transport:
        return self._local.transport(server)

    async def health(self) -> JSON:
        return await self._local.health()

    def close(self) -> None:
        loop.wait(self._local.stop())


class HttpConnection(Connection):
    """A graph at a URL.

    Args:
        url: its address with the route prefix.
        auth_token: its bearer token, if it has one.

    Raises:
        Unavailable: no graph answers there.
        GymError: the graph refuses.
    """

    kind = "a graph that is reached over HTTP"

    def __init__(self, url: str, auth_token: str | None = None) -> None:
        url = url.rstrip("/")
        self._token = auth_token
        self._headers = {"authorization": f"Bearer {auth_token}"} if auth_token else {}
        super().__init__(url, loop.wait(page(f"{url}/graph", self._headers)), url)

    def transport(self, server: str) -> Transport:
        return HttpTransport(server, f"{self.url}/{server}", self._headers)

    async def health(self) -> JSON:
        return await servers_health(self.url, self._headers)

    async def pressure(self) -> JSON:
        return await page(f"{self.url}/pressure", self._headers)

    def again(self) -> Callable[[], Connection]:
        return partial(HttpConnection, self.url, self._token)


async def servers_health(url: str, headers: Mapping[str, str]) -> JSON:
    """State of every server, by name, as the gateway at ``url`` tells it.

    Raises: as `page`.
    """
    answer = await page(f"{url}/health", headers, fine=(200, 503))
    if not isinstance(states := answer.get("servers"), dict):
        raise error_from_body(503, answer)
    return states


async def page(url: str, headers: Mapping[str, str], fine: tuple[int, ...] = (200,)) -> JSON:
    """The JSON object that a gateway answers at ``url``.

    Args:
        url: the page.
        headers: headers of the request.
        fine: statuses that come with one.

    Raises:
        Unavailable: nothing answers there, or something else does.
        GymError: the gateway's failure.
    """
    try:
        async with httpx.AsyncClient(timeout=30.0) as client:
            answer = await client.get(url, headers=dict(headers))
    except httpx.HTTPError as error:
        raise Unavailable(f"no graph answers at {url}: {type(error).__name__}: {error}") from error
    try:
        body = orjson.loads(answer.content)
    except orjson.JSONDecodeError:
        body = answer.text
    if answer.status_code not in fine:
        raise error_from_body(answer.status_code, body)
    if not isinstance(body, dict):
        raise Unavailable(f"{url} is no gym_serve graph: it answered {str(body)[:200]!r}")
    return body

"""How a `Gym` reaches its graph: on a Ray cluster, over HTTP, or in this process.

`ClusterConnection` is in `gym_serve.client.deployed`, which imports Ray.
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
    """A connection to a graph. Operations that a kind of connection does not support raise `BadRequest`.

    Args:
        name: name of the graph.
        public: the graph without secrets, as ``/graph`` shows it.
        url: its address over HTTP; empty if it has none.
        default_agent: agent of the rows that name none.
        graph: the resolved graph, if this process deployed it.
    """

    kind = "a graph"

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
        """A new transport to a server; the caller closes it."""
        raise NotImplementedError

    async def health(self) -> JSON:
        """State of every server, by name."""
        raise NotImplementedError

    async def pressure(self) -> JSON:
        """The load of the graph; see `Gym.pressure`."""
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
        """Disconnect, and take the graph down if this connection deployed it. Safe to call twice."""

    def again(self) -> Callable[[], Connection]:
        """A picklable function that connects another process to the same graph."""
        raise TypeError(f"a Gym over {self.kind} cannot be pickled")

    def _refuse(self, what: str) -> NoReturn:
        raise BadRequest(f"{what} needs a graph on a Ray cluster; {self.name} is {self.kind}")


class LocalConnection(Connection):
    """A graph in this process.

    Raises:
        GraphError: the graph needs a cluster.
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
        Unavailable: no gym_serve graph answers at this URL.
        GymError: the graph refuses the request, e.g. its token.
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
    """State of every server, by name, from the gateway at ``url``.

    Raises:
        Unavailable, GymError: see `page`.
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
        fine: the HTTP statuses whose body is that object.

    Raises:
        Unavailable: no gym_serve graph answers at this URL.
        GymError: the failure that the gateway answers.
    """
    try:
        async with httpx.AsyncClient(timeout=30.0) as client:
            answer = await client.get(url, headers=dict(headers))
    except httpx.HTTPError as error:
        raise Unavailable(f"no gym_serve graph answers at {url}: {type(error).__name__}: {error}") from error
    try:
        body = orjson.loads(answer.content)
    except orjson.JSONDecodeError:
        body = answer.text
    if answer.status_code not in fine:
        raise error_from_body(answer.status_code, body)
    if not isinstance(body, dict):
        raise Unavailable(f"no gym_serve graph answers at {url}; the answer there is {str(body)[:200]!r}")
    return body

"""How a `Gym` reaches its graph: on a Ray cluster, over HTTP, or in this process.

`ClusterConnection` is in `gym_serve.client.deployed`, which imports Ray.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import httpx
import orjson

from gym_serve.assembly import LocalGraph
from gym_serve.client import loop
from gym_serve.client.remote_agent import Batcher, RemoteAgent
from gym_serve.graph.spec import Graph
from gym_serve.observe.catalogue import METRICS
from gym_serve.observe.metrics import Metric, render
from gym_serve.servers.model import VERSION, HoldMode, ModelServer
from gym_serve.servers.transport import Call, Reply, Transport
from gym_serve.transports import HttpTransport
from gym_serve.types.errors import BadRequest, Unavailable, error_from_body
from gym_serve.types.requests import JSON

_PAGE_SECONDS = 30.0
_STEER_SECONDS = 600.0  # a pause may wait for the answers that are being generated


class Connection:
    """A connection to a graph. Operations that a kind of connection does not support raise `BadRequest`.
    ``public``: the graph without secrets, as ``/graph`` shows it."""

    kind = "a graph"

    def __init__(
        self,
        name: str,
        public: Mapping[str, Any],
        url: str = "",
        default_agent: str | None = None,
        graph: Graph | None = None,
        *,
        auth_token: str | None = None,
    ) -> None:
        self.name = name
        self.public = dict(public)
        self.url = url
        self.default_agent = default_agent
        self.graph = graph
        self._token = auth_token
        self._headers = bearer(auth_token)

    def transport(self, server: str) -> Transport:
        """A new transport to a server; the caller closes it."""
        raise NotImplementedError

    async def health(self) -> JSON:
        answer = await page(f"{self.url}/health", self._headers, fine=(200, 503))
        if not isinstance(states := answer.get("servers"), dict):
            raise error_from_body(503, answer)
        return states

    @property
    def dashboard_url(self) -> str | None:
        """URL of Ray's dashboard; None where there is none."""
        return None

    async def pressure(self) -> JSON:
        """The load of the graph; see `Gym.pressure`."""
        return await page(f"{self.url}/pressure", self._headers)

    async def stats(self) -> JSON:
        """What the graph has counted; see `Gym.stats`."""
        return await page(f"{self.url}/stats", self._headers)

    def handle(self, server: str) -> Any:
        self._refuse("handle")

    async def reconfigure(self, server: str, changes: JSON) -> None:
        self._refuse("changing the settings of a server")

    async def update_weights(
        self, model: str, version: str, *, path: str | None, tensors: bytes | None, mode: Any
    ) -> None:
        """Give all replicas of a model new weights; see `Policy.update_weights`."""
        self._refuse("update_weights")

    async def updates(self, model: str) -> int:
        """How often the weights of a model were replaced, by whichever process. Raises Unavailable: that is
        not known just now."""
        raise NotImplementedError

    async def hold(self, model: str, mode: HoldMode) -> None:
        """Hold the calls of a model; see `Policy.pause`."""
        self._refuse("pause")

    async def release(self, model: str) -> None:
        self._refuse("resume")

    async def policy(self, transport: Transport) -> JSON:
        """The ``weight_version`` of a model, and whether it is ``paused``."""
        state: JSON = (await transport.call(Call(VERSION))).json()
        return state

    async def replicas(self, server: str) -> Mapping[str, Callable[[Call], Awaitable[Reply]]]:
        """How to call each replica of a server that runs now, by its name."""
        self._refuse("policy.serve")

    def metrics(self) -> str:
        """The metrics of this process; see `Gym.metrics`."""
        raise BadRequest(
            f"metrics: {self.name} is {self.kind}; its nodes publish them, see docs/monitoring.md"
        )

    def publish(self, metrics: Sequence[Metric], refresh: Callable[[], None]) -> None:
        """Publish the driver's metrics from now on, where Prometheus finds those of the graph."""

    def close(self) -> None:
        """Disconnect, and take the graph down if this connection deployed it. Safe to call twice."""

    def again(self) -> Callable[[], Connection]:
        """A picklable function that connects another process to the same graph."""
        raise TypeError(f"a Gym over {self.kind} cannot be pickled")

    def _refuse(self, what: str) -> NoReturn:
        raise BadRequest(f"{what} needs a graph on a Ray cluster; {self.name} is {self.kind}")


class LocalConnection(Connection):
    """A graph in this process. Raises GraphError: the graph needs a cluster; GymError: a server did not
    start."""

    kind = "a graph in this process (ray=False)"

    def __init__(self, name: str, graph: Graph) -> None:
        super().__init__(name, graph.public(), default_agent=graph.default_agent, graph=graph)
        self._local = LocalGraph(graph)
        self._metrics: Sequence[Metric] = METRICS
        self._refresh: Callable[[], None] = lambda: None
        loop.wait(self._local.start())

    def transport(self, server: str) -> Transport:
        return self._local.transport(server)

    async def health(self) -> JSON:
        return await self._local.health()

    async def pressure(self) -> JSON:
        self._refuse("pressure")

    async def stats(self) -> JSON:
        self._refuse("stats")

    async def update_weights(
        self, model: str, version: str, *, path: str | None, tensors: bytes | None, mode: Any
    ) -> None:
        weights = tensors if path is None else Path(path)
        server = self._model(model)
        await server.update_weights(weights, version, mode)
        server.updates += 1

    async def updates(self, model: str) -> int:
        return self._model(model).updates

    async def hold(self, model: str, mode: HoldMode) -> None:
        await self._model(model).hold(mode)

    async def release(self, model: str) -> None:
        await self._model(model).release()

    async def replicas(self, server: str) -> Mapping[str, Callable[[Call], Awaitable[Reply]]]:
        return {"local": self._local.transport(server).call}

    def _model(self, name: str) -> ModelServer:
        server = self._local.server(name)
        if not isinstance(server, ModelServer):
            raise BadRequest(f"{name} is no model of this process")
        return server

    def publish(self, metrics: Sequence[Metric], refresh: Callable[[], None]) -> None:
        names = {metric.name for metric in metrics}
        self._metrics = [*(metric for metric in METRICS if metric.name not in names), *metrics]
        self._refresh = refresh

    def metrics(self) -> str:
        self._refresh()
        self._local.observe()
        return render(self._metrics, {"graph": self.name})

    def close(self) -> None:
        loop.wait(self._local.stop())


class HttpConnection(Connection):
    """A graph at a URL, with its route prefix, and its bearer token if it has one. Raises Unavailable: no
    gym_serve graph answers at this URL; GymError: the graph refuses the request, e.g. its token."""

    kind = "a graph that is reached over HTTP"

    def __init__(self, url: str, auth_token: str | None = None) -> None:
        url = url.rstrip("/")
        public = loop.wait(page(f"{url}/graph", bearer(auth_token)))
        super().__init__(url, public, url, auth_token=auth_token)
        self._batcher = Batcher(url, self._headers)

    def transport(self, server: str) -> Transport:
        if server in (self.public.get("agents") or {}):
            return RemoteAgent(server, self.url, self._headers, self._batcher)
        return HttpTransport(server, f"{self.url}/{server}", self._headers)

    async def reconfigure(self, server: str, changes: JSON) -> None:
        urls = changes["base_url"]
        body = {"base_urls": [urls] if isinstance(urls, str) else urls, "model": changes.get("model")}
        await self._steer(server, "endpoints", body)

    async def update_weights(
        self, model: str, version: str, *, path: str | None, tensors: bytes | None, mode: Any
    ) -> None:
        if path is not None or tensors is not None:
            self._refuse("update_weights with weights")
        await self._steer(model, "version", {"version": version})

    async def hold(self, model: str, mode: HoldMode) -> None:
        await self._steer(model, "pause", {"mode": mode})

    async def release(self, model: str) -> None:
        await self._steer(model, "resume", {})

    async def policy(self, transport: Transport) -> JSON:
        return await page(f"{self.url}/{transport.server}/policy/version", self._headers)

    async def updates(self, model: str) -> int:
        answer = await page(f"{self.url}/{model}/policy/version", self._headers)
        return int(answer["updates"])

    async def _steer(self, model: str, what: str, body: JSON) -> None:
        await page(f"{self.url}/{model}/policy/{what}", self._headers, body=body)

    def again(self) -> Callable[[], Connection]:
        return partial(HttpConnection, self.url, self._token)


def bearer(token: str | None) -> dict[str, str]:
    """The headers of a request with a token, if there is one."""
    return {"authorization": f"Bearer {token}"} if token else {}


async def page(
    url: str, headers: Mapping[str, str], fine: tuple[int, ...] = (200,), body: JSON | None = None
) -> JSON:
    """The JSON object that a gateway answers at ``url``, with one of the HTTP statuses ``fine``.

    Args:
        body: what to post; None for a ``GET``.

    Raises:
        Unavailable: no gym_serve graph answers at this URL.
        GymError: the failure that the gateway answers.
    """
    try:
        method, timeout = ("GET", _PAGE_SECONDS) if body is None else ("POST", _STEER_SECONDS)
        async with httpx.AsyncClient(timeout=timeout) as client:
            answer = await client.request(method, url, headers=dict(headers), json=body)
    except httpx.HTTPError as error:
        raise Unavailable(f"no gym_serve graph answers at {url}: {type(error).__name__}: {error}") from error
    try:
        content = orjson.loads(answer.content)
    except orjson.JSONDecodeError:
        content = answer.text
    if answer.status_code not in fine:
        raise error_from_body(answer.status_code, content)
    if not isinstance(content, dict):
        raise Unavailable(f"no gym_serve graph answers at {url}; the answer there is {str(content)[:200]!r}")
    return content

"""What `Gym` does with Ray: deploy a resolved graph, join a running one, change it live."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import httpx
import ray
from pydantic import ValidationError
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from gym_serve.client.cluster import Cluster
from gym_serve.client.connection import Connection, page, servers_health
from gym_serve.graph.deploy import GATEWAY, build
from gym_serve.graph.health import reason
from gym_serve.graph.loading import GraphSource
from gym_serve.graph.preflight import preflight, problems_here
from gym_serve.graph.replica import transport_to
from gym_serve.graph.spec import Graph
from gym_serve.graph.weights import WeightStore, update_weights
from gym_serve.routing.failover import FailoverTransport
from gym_serve.routing.replica import ReplicaTransport
from gym_serve.routing.serve_compat import http_address, route_prefix, running_version
from gym_serve.routing.starting import START_LOG
from gym_serve.servers.model import PauseMode
from gym_serve.servers.transport import Transport
from gym_serve.types.errors import BadRequest, Conflict, GraphError, NotFound, Unavailable
from gym_serve.types.requests import JSON

__all__ = ["ClusterConnection", "attach", "deploy", "launch", "reconfigure", "states"]

_log = logging.getLogger(START_LOG)

_DESCRIBE_SECONDS = 60.0
_STATES_SECONDS = 10.0
_ROUTE_SECONDS = 10.0
_POLL_SECONDS = 0.1


class ClusterConnection(Connection):
    """A graph on a Ray cluster.

    Args:
        cluster: the cluster; None for a copy in another process, which joins it when it is first used.
        name: name of the application.
        public, url, default_agent: see `Connection`.
        graph: the graph, where this process deployed it; `close` then takes it down.
        auth_token: the graph's bearer token, if it is known.
    """

    kind = "a graph on a Ray cluster"

    def __init__(
        self,
        cluster: Cluster | None,
        *,
        name: str,
        public: JSON,
        url: str,
        default_agent: str | None,
        auth_token: str | None = None,
        graph: Graph | None = None,
    ) -> None:
        super().__init__(name, public, url, default_agent, graph)
        self._cluster = cluster
        self._token = auth_token
        self._headers = {"authorization": f"Bearer {auth_token}"} if auth_token else {}
        self._changed: dict[str, JSON] = {}

    def transport(self, server: str) -> Transport:
        self._join()
        section = next(section for section, servers in self.public.items() if server in servers)
        if self.graph is not None and self.graph.nodes[server].url is not None:
            return transport_to(self.graph.nodes[server], None)
        reached = ReplicaTransport(server, DeploymentHandle(server, self.name))
        return FailoverTransport(reached) if section == "resources" else reached

    async def health(self) -> JSON:
        return await servers_health(self.url, self._headers)

    async def pressure(self) -> JSON:
        return await page(f"{self.url}/pressure", self._headers)

    def handle(self, server: str) -> DeploymentHandle[Any]:
        self._join()
        return DeploymentHandle(server, self.name)

    def reconfigure(self, server: str, changes: JSON) -> None:
        """Change settings of a running server.

        Raises:
            BadRequest: another process deployed the graph, or the server has no such settings.
        """
        if self.graph is None:
            raise BadRequest(f"{self.name} was deployed by another process; change its settings there")
        changed = {**self._changed, server: {**self._changed.get(server, {}), **changes}}
        reconfigure(self.name, self.graph, server, changed)
        self._changed = changed

    async def update_weights(
        self, model: str, version: str, *, path: str | None, tensors: bytes | None, mode: PauseMode
    ) -> None:
        await update_weights(self.name, model, version, path=path, tensors=tensors, mode=mode)

    def close(self) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster is None:
            return
        if self.graph is not None:
            _delete(self.name)
        cluster.leave()

    def again(self) -> Callable[[], Connection]:
        return partial(
            ClusterConnection,
            None,
            name=self.name,
            public=self.public,
            url=self.url,
            default_agent=self.default_agent,
            auth_token=self._token,
        )

    def _join(self) -> None:
        # Ray's tasks and actors run on the cluster already.
        if self._cluster is None and not ray.is_initialized():
            self._cluster = Cluster("auto")


def deploy(source: GraphSource, graph: Graph, address: str | None) -> ClusterConnection:
    """Deploy a graph, or join it where it runs already.

    Raises:
        Conflict: another graph runs under the name.
        GraphError: the cluster, or this machine, lacks what the graph needs; says what.
        Unavailable: the graph did not start.
    """
    if address is None and not ray.is_initialized() and (problems := problems_here(graph)):
        raise GraphError(problems, source=source.path)
    cluster = Cluster(address)
    ours = False
    try:
        applications = serve.status().applications
        if source.name in applications:
            if not _is_graph(applications[source.name]) or _described(source.name)[0] != graph.public():
                raise Conflict(
                    f"something else runs as {source.name!r} on this cluster; give this graph a name "
                    f'(name="..."), or join that one with Gym.attach({source.name!r})'
                )
        else:
            WeightStore(source.name).delete()  # of a graph of this name that ran before
            ours = True
            launch(graph, source.name, source.route_prefix, source=source.path)
    except BaseException:
        if ours:
            _delete(source.name)
        cluster.leave()
        raise
    return ClusterConnection(
        cluster,
        name=source.name,
        public=graph.public(),
        url=f"{cluster.http}{source.route_prefix.rstrip('/')}",
        default_agent=graph.default_agent,
        auth_token=graph.auth_tokens[0].get_secret_value() if graph.auth_tokens else None,
        graph=graph if ours else None,
    )


def attach(name: str, address: str | None) -> ClusterConnection:
    """Join a running graph by its name.

    Raises:
        NotFound: no such application, or it is no graph.
        Unavailable: it does not answer.
    """
    cluster = Cluster(address)
    try:
        applications = serve.status().applications
        if name not in applications:
            raise NotFound(
                f"no application {name!r} on this cluster; it has {', '.join(applications) or 'none'}"
            )
        if not _is_graph(applications[name]):
            raise NotFound(f"the application {name!r} is no graph of gym_serve, or is still being built")
        public, default_agent = _described(name)
        url = f"{cluster.http}{route_prefix(name).rstrip('/')}"
        return ClusterConnection(cluster, name=name, public=public, url=url, default_agent=default_agent)
    except BaseException:
        cluster.leave()
        raise


def launch(graph: Graph, name: str, prefix: str, *, source: str | None = None, checked: bool = False) -> None:
    """Deploy a graph on the connected cluster, or update it in place, and wait until it is ready.

    What can be known is looked for before anything that runs is touched. Where an update fails all the same,
    the version before it is deployed again, with the replicas of it that are left.

    Args:
        graph: the graph.
        name, prefix: name and route prefix of its application.
        source: its file, for the error.
        checked: True where the cluster is a Ray that was started on this machine for this graph, after
            `problems_here`: no worker is asked again.

    Raises:
        GraphError: the cluster lacks what it needs; says what.
        Unavailable: it did not start; says why.
    """
    if problems := preflight(graph, checked=checked):
        raise GraphError(problems, source=source)
    before = running_version(name)
    try:
        application = build(graph)
        _log.info("Deploying %s servers…", sum(node.cls is not None for node in graph.nodes.values()) + 1)
        _run(application, name, prefix)
    except Unavailable as error:
        if before is None:
            raise
        before.restore()
        raise Unavailable(f"{error.message}; the version before it serves again") from error
    _await_route(prefix)


def reconfigure(name: str, graph: Graph, server: str, changes: dict[str, JSON]) -> None:
    """Change settings of a running server of a graph that this process deployed.

    Only that deployment is touched, and its replicas keep running (Serve's ``user_config``).

    Args:
        name: of its application.
        graph: the graph as it was deployed.
        server: the server.
        changes: every setting that has been changed so far, by server: what is left out of a server's
            ``user_config`` is unknown to the replicas that it starts later.

    Raises:
        BadRequest: the server has no such settings.
    """
    node = graph.nodes[server]
    if node.cls is None:
        raise BadRequest(f"{server} is a remote server; change its settings where it runs")
    try:
        node.cls.Config(**{**node.settings, **changes[server]})
    except ValidationError as error:
        problems = "; ".join(f"{e['loc'][0]}: {e['msg']}" for e in error.errors(include_input=False))
        raise BadRequest(f"{server} ({node.type}) does not take these settings: {problems}") from None
    _run(build(graph, user_configs=changes), name, route_prefix(name))


def states(name: str) -> dict[str, JSON]:
    """The servers of a running graph, as its gateway sees them; none where no gateway answers.

    Returns:
        by server: ``status``, ``message`` and ``replicas`` by their state.
    """
    gateway: Any = DeploymentHandle(GATEWAY, name)
    try:
        found = gateway.states.remote().result(timeout_s=_STATES_SECONDS, _skip_asyncio_check=True)
    except (RayError, RayServeException, TimeoutError):
        return {}
    return {
        server: {
            "status": state["state"].upper(),
            "message": state.get("message", ""),
            "replicas": state.get("replicas", {}),
        }
        for server, state in found.items()
    }


def _run(application: serve.Application, name: str, prefix: str) -> None:
    try:
        target = serve.RunTarget(application, name, prefix, {"enable_access_log": False})
        serve.run_many([target], wait_for_applications_running=False)
        _await_running(name)
    except (RuntimeError, TimeoutError, RayError) as error:
        reasons = "; ".join(_reasons(name)) or " ".join(str(error).split())[:500]
        raise Unavailable(f"the graph {name!r} did not start: {reasons}") from error


def _await_running(name: str) -> None:
    """Wait until all servers of an application run. (`serve.run` looks once a second, and says nothing.)

    Raises:
        RuntimeError: the deploy has failed, or the application was deleted.
    """
    told: list[str] = []
    while True:
        application = serve.status().applications.get(name)
        if application is None:
            raise RuntimeError(f"{name} was deleted while it started")
        if application.status == ApplicationStatus.RUNNING:
            return
        if application.status == ApplicationStatus.DEPLOY_FAILED:
            raise RuntimeError(application.message)
        states = {server: found.status.value for server, found in application.deployments.items()}
        waiting = sorted(server for server, state in states.items() if state != "HEALTHY")
        if waiting and waiting != told:
            ready = len(states) - len(waiting)
            _log.info("Waiting for %s (%s of %s ready)…", ", ".join(waiting), ready, len(states))
            told = waiting
        time.sleep(_POLL_SECONDS)


def _await_route(prefix: str) -> None:
    """Wait until Serve's proxy knows a route, as `serve.run` does not: before that, the proxy says 404."""
    ends = time.monotonic() + _ROUTE_SECONDS
    routes = f"{http_address()}/-/routes"
    # No proxy on this machine: none that could be asked too early.
    with suppress(httpx.HTTPError), httpx.Client(trust_env=False) as client:
        while f'"{prefix}"' not in client.get(routes).text and time.monotonic() < ends:
            time.sleep(0.05)


def _reasons(name: str) -> Iterator[str]:
    """What each deployment of an application failed with."""
    application = serve.status().applications.get(name)
    for server, deployment in application.deployments.items() if application else ():
        if deployment.status.value in ("DEPLOY_FAILED", "UNHEALTHY"):
            yield f"{server}: {reason(deployment.message)}"


def _delete(name: str) -> None:
    # The cluster, or Serve on it, may be gone already: then so is the application.
    with suppress(RayServeException, RayError):
        serve.delete(name)
        WeightStore(name).delete()


def _is_graph(application: ApplicationStatusOverview) -> bool:
    return GATEWAY in application.deployments


def _described(name: str) -> tuple[JSON, str | None]:
    gateway: Any = DeploymentHandle(GATEWAY, name)
    asked = gateway.describe.remote()
    try:
        public, default_agent = asked.result(timeout_s=_DESCRIBE_SECONDS, _skip_asyncio_check=True)
    except TimeoutError:
        raise Unavailable(f"the gateway of {name!r} does not answer") from None
    return public, default_agent

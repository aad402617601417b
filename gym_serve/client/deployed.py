"""What `Gym` does with Ray: deploy a resolved graph, join a running one, change it live."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
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

from gym_serve.client import loop
from gym_serve.client.cluster import Cluster, quiet_serve
from gym_serve.client.connection import Connection
from gym_serve.cluster.code import ship
from gym_serve.cluster.deploy import GATEWAY, build
from gym_serve.cluster.ingress import Description
from gym_serve.cluster.ownership import Claim, Ownership, Terms
from gym_serve.cluster.preflight import preflight, problems_here
from gym_serve.cluster.replica import transport_to
from gym_serve.cluster.reports import reconfigure, reports_of, start, the_running
from gym_serve.cluster.routing.failover import FailoverTransport
from gym_serve.cluster.routing.replica_transport import ReplicaTransport
from gym_serve.cluster.serve_compat import (
    dashboard_url,
    http_address,
    is_being_deleted,
    route_prefix,
    running_version,
    started_ray,
)
from gym_serve.cluster.serve_metrics import RayPublisher
from gym_serve.cluster.starting import START_LOG
from gym_serve.cluster.weights import WeightStore, check_reach, hold, release, replicas, update_weights
from gym_serve.gateway.host import STATS, stats
from gym_serve.graph.loading import GraphSource
from gym_serve.graph.spec import SECTIONS, Graph
from gym_serve.observe.metrics import Metric
from gym_serve.servers.model import HoldMode, PauseMode
from gym_serve.servers.transport import Call, Reply, Transport
from gym_serve.types.errors import BadRequest, Conflict, GraphError, NotFound, Unavailable
from gym_serve.types.requests import JSON, problems_of

_log = logging.getLogger(START_LOG)

_DESCRIBE_SECONDS = 60.0
_STATES_SECONDS = 10.0
_ROUTE_SECONDS = 10.0
_ENDING_SECONDS = 60.0
_POLL_SECONDS = 0.1


class ClusterConnection(Connection):
    """A graph on a Ray cluster. ``cluster``: the cluster; None for a copy in another process, which joins it
    when it is first used; ``public``/``url``/``default_agent``: see `Connection`."""

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
        claim: Claim | None = None,
    ) -> None:
        super().__init__(name, public, url, default_agent, graph, auth_token=auth_token)
        quiet_serve()  # of a copy, too, which joins no cluster where there is one
        self._cluster = cluster
        self._ownership = Ownership(name)
        self._claim = claim
        self._publisher: RayPublisher | None = None

    def transport(self, server: str) -> Transport:
        self._join()
        is_environment = server in (self.public.get("resources") or {})
        if self.graph is not None and self.graph.nodes[server].url is not None:
            return transport_to(self.graph.nodes[server], None)
        reached = ReplicaTransport(server, DeploymentHandle(server, self.name))
        return FailoverTransport(reached) if is_environment else reached

    @property
    def dashboard_url(self) -> str | None:
        self._join()
        return dashboard_url()

    async def stats(self) -> JSON:
        """See `Connection.stats`. It asks the replicas, as a handle would wait for a graph that is gone.
        Raises NotFound: the graph does not run any more."""
        self._join()
        sections = [self.public.get(section) or {} for section in SECTIONS]
        own = [name for servers in sections for name, node in servers.items() if node["type"] != "http"]
        reports = await reports_of(self.name, own, STATS)
        if not any(reports.values()) and await is_being_deleted(self.name):
            raise NotFound(f"no graph {self.name!r} runs on this cluster any more")
        return stats(reports, self.public.get("agents") or {})

    def handle(self, server: str) -> DeploymentHandle[Any]:
        self._join()
        return DeploymentHandle(server, self.name)

    async def reconfigure(self, server: str, changes: JSON) -> None:
        """Change settings of a running server. Raises BadRequest: this process does not hold the graph, or
        the server has no such settings."""
        await asyncio.to_thread(self._reconfigure, server, changes)

    def _reconfigure(self, server: str, changes: JSON) -> None:
        present = self._ownership.claim()
        if self.graph is None or present is None or present != self._claim:
            raise BadRequest(f"{self.name} cannot be changed here: {_holder(self.name, present)}")
        check_reach(self.public, server)
        node = self.graph.nodes[server]
        if node.cls is None:
            raise BadRequest(f"{server} is a remote server; change its settings where it runs")
        try:
            node.cls.Config(**{**node.settings, **the_running(self.name).settings(server), **changes})
        except ValidationError as error:
            problems = "; ".join(problems_of(error, "settings"))
            raise BadRequest(f"{server} ({node.type}) does not take these settings: {problems}") from None
        reconfigure(self.name, server, changes)

    async def update_weights(
        self, model: str, version: str, *, path: str | None, tensors: bytes | None, mode: PauseMode
    ) -> None:
        check_reach(self.public, model)
        await update_weights(self.name, model, version, path=path, tensors=tensors, mode=mode)

    async def updates(self, model: str) -> int:
        self._join()
        try:
            return await asyncio.to_thread(WeightStore(self.name).updates, model)
        except RayError as error:
            raise Unavailable(f"the weights of {model} cannot be looked up: {error}") from None

    async def hold(self, model: str, mode: HoldMode) -> None:
        check_reach(self.public, model)
        await hold(self.name, model, mode)

    async def release(self, model: str) -> None:
        check_reach(self.public, model)
        await release(self.name, model)

    async def replicas(self, server: str) -> Mapping[str, Callable[[Call], Awaitable[Reply]]]:
        check_reach(self.public, server)
        return await replicas(self.name, server)

    def publish(self, metrics: Sequence[Metric], refresh: Callable[[], None]) -> None:
        labels = {"graph": self.name, "server": "driver", "replica": uuid.uuid4().hex[:8]}
        self._publisher = RayPublisher(labels, refresh, metrics)
        loop.wait(self._publisher.start())

    def close(self) -> None:
        cluster, self._cluster = self._cluster, None
        try:
            if self._publisher is not None:
                loop.wait(self._publisher.stop())
            # The cluster, or Serve on it, may be gone already: then so is the graph.
            with suppress(RayServeException, RayError):
                ours = cluster is not None and self._claim is not None and ray.is_initialized()
                if ours and self._ownership.claim() == self._claim:
                    _delete(self.name)
        finally:  # Ctrl-C comes at any point
            if cluster is not None:
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


def deploy(
    source: GraphSource,
    graph: Graph,
    address: str | None,
    *,
    dashboard: bool = False,
    terms: Terms = Terms(),  # noqa: B008  # a constant
) -> ClusterConnection:
    """Deploy a graph, take it over, or join it where it runs already.

    Args:
        address, dashboard: see `Cluster`.

    Raises:
        Conflict: another graph runs under the name, or the graph belongs to another run.
        GraphError: the cluster, or this machine, lacks what the graph needs; says what.
        Unavailable: the graph did not start.
    """
    if address is None and not ray.is_initialized() and (problems := problems_here(graph)):
        raise GraphError(problems, source=source.path)
    cluster = Cluster(address, dashboard=dashboard)
    claim, ours = None, False
    try:
        if (running := _running(source.name)) is not None:
            claim = _joined(running, source, graph, terms)
        else:
            WeightStore(source.name).delete()  # of a graph of this name that ran before
            claim, ours = Ownership(source.name).take(terms), True
            launch(
                graph,
                source.name,
                source.route_prefix,
                source=source.path,
                owned=True,
                with_code=not started_ray(),  # that one runs on this machine, with this process's sys.path
            )
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
        graph=None if claim is None else graph,
        claim=claim,
    )


def _running(name: str) -> ApplicationStatusOverview | None:
    """An application that runs or starts; one that is being deleted is waited for."""
    ends = time.monotonic() + _ENDING_SECONDS
    while True:
        application = serve.status().applications.get(name)
        if application is None or application.status != ApplicationStatus.DELETING:
            return application
        if time.monotonic() > ends:
            raise Conflict(f"{name!r} is being taken down, and still has requests; try again later")
        time.sleep(_POLL_SECONDS)


def _joined(
    running: ApplicationStatusOverview, source: GraphSource, graph: Graph, terms: Terms
) -> Claim | None:
    """This process's claim to a graph that runs already; None where it only joins it."""
    name = source.name
    described = _described(name) if _is_graph(running) else None
    if described is None or described.public != graph.public():
        raise Conflict(
            f"something else runs as {name!r} on this cluster; give this graph a name "
            f'(name="..."), or join that one with Gym.attach({name!r})'
        )
    ownership = Ownership(name)
    present = ownership.claim() if described.owned else None
    is_same = present is not None and present.terms.owner == terms.owner
    if present is not None and is_same and (terms.owner is not None or not present.is_alive()):
        claim = ownership.take(terms)
        if running.status in (ApplicationStatus.DEPLOYING, ApplicationStatus.DEPLOY_FAILED):
            start(name, the_running(name).restore)
            _await_route(source.route_prefix)
        return claim
    if terms.owner is not None:
        raise Conflict(
            f"{name!r} cannot belong to the run {terms.owner!r}: {_holder(name, present)}. Join it with "
            f'Gym.attach({name!r}), or give this graph another name (name="...")'
        )
    return None


def _holder(name: str, present: Claim | None) -> str:
    if present is None:
        return f"nobody owns {name!r}; `gym-serve up` or `serve` has deployed it"
    return f"it belongs to {present.holder()}"


def attach(name: str, address: str | None) -> ClusterConnection:
    """Join a running graph by its name. Raises NotFound: no such application, or it is no graph;
    Unavailable: it does not answer."""
    cluster = Cluster(address)
    try:
        applications = serve.status().applications
        if name not in applications:
            raise NotFound(
                f"no application {name!r} on this cluster; it has {', '.join(applications) or 'none'}"
            )
        if not _is_graph(applications[name]):
            raise NotFound(f"the application {name!r} is no graph of gym_serve, or is still being built")
        description = _described(name)
        url = f"{cluster.http}{route_prefix(name).rstrip('/')}"
        return ClusterConnection(
            cluster, name=name, public=description.public, url=url, default_agent=description.default_agent
        )
    except BaseException:
        cluster.leave()
        raise


def launch(
    graph: Graph,
    name: str,
    prefix: str,
    *,
    source: str | None = None,
    checked: bool = False,
    owned: bool = False,
    with_code: bool = False,
) -> None:
    """Deploy a graph on the connected cluster, or update it in place, and wait until it is ready.

    What can be known is looked for before anything that runs is touched. Where an update fails all the same,
    the version before it is deployed again, with the replicas of it that are left.

    Args:
        checked: True after `problems_here` of a Ray that was started here for this graph: no worker is asked.
        owned: whether the graph belongs to the run that claims it, and ends with it.
        with_code: whether the nodes get this machine's own code of the graph (`gym_serve.cluster.code`).

    Raises:
        GraphError: the cluster lacks what it needs; says what.
        Unavailable: it did not start; says why.
    """
    shipped = ship(graph) if with_code else {}
    if problems := preflight(graph, checked=checked, shipped=shipped):
        raise GraphError(problems, source=source)
    before = running_version(name)
    try:
        application = build(graph, owned=owned, shipped=shipped)
        _log.info("Deploying %s servers…", sum(node.cls is not None for node in graph.nodes.values()) + 1)
        _run(application, name, prefix)
    except Unavailable as error:
        if before is None:
            raise
        start(name, before.restore)
        raise Unavailable(f"{error.message}; the version before it serves again") from error
    if not owned:
        Ownership(name).forget()  # of a run whose graph this was until now
    _await_route(prefix)


def states(name: str) -> dict[str, JSON]:
    """The servers of a running graph, as its gateway sees them: ``status``, ``message`` and ``replicas`` by
    their state; none where no gateway answers."""
    gateway: Any = DeploymentHandle(GATEWAY, name)
    try:
        reported = gateway.states.remote().result(timeout_s=_STATES_SECONDS, _skip_asyncio_check=True)
    except (RayError, RayServeException, TimeoutError):
        return {}
    return {
        server: {
            "status": state["state"].upper(),
            "message": state.get("message", ""),
            "replicas": state.get("replicas", {}),
        }
        for server, state in reported.items()
    }


def _run(application: serve.Application, name: str, prefix: str) -> None:
    target = serve.RunTarget(application, name, prefix, {"enable_access_log": False})
    start(name, partial(serve.run_many, [target], wait_for_applications_running=False))


def _await_route(prefix: str) -> None:
    """Wait until Serve's proxy knows a route, as `serve.run` does not: before that, the proxy says 404."""
    ends = time.monotonic() + _ROUTE_SECONDS
    routes = f"{http_address()}/-/routes"
    # No proxy on this machine: none that could be asked too early.
    with suppress(httpx.HTTPError), httpx.Client(trust_env=False) as client:
        while f'"{prefix}"' not in client.get(routes).text and time.monotonic() < ends:
            time.sleep(0.05)


def _delete(name: str) -> None:
    # The cluster, or Serve on it, may be gone already: then so is the application.
    with suppress(RayServeException, RayError):
        serve.delete(name)
        WeightStore(name).delete()
        Ownership(name).forget()


def _is_graph(application: ApplicationStatusOverview) -> bool:
    return GATEWAY in application.deployments


def _described(name: str) -> Description:
    gateway: Any = DeploymentHandle(GATEWAY, name)
    try:
        reply = gateway.describe.remote()
        description: Description = reply.result(timeout_s=_DESCRIBE_SECONDS, _skip_asyncio_check=True)
    except TimeoutError:
        raise Unavailable(f"the gateway of {name!r} does not answer") from None
    return description

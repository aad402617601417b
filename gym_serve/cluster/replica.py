"""`Replica`: the Serve deployment class around every server of a graph, and its ``inline`` ones.

Calls arrive at the replica's own `Listener`, not through Serve. A replica that Serve stops *drains*: it takes
no new work, and ends with its calls and sessions, or after ``graceful_shutdown_timeout_s``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from gym_serve.assembly import answer_here, client_of, constructed, remote_transport
from gym_serve.cluster.autoscaling import CALLS, SESSIONS
from gym_serve.cluster.reports import report
from gym_serve.cluster.routing.admission import Admission
from gym_serve.cluster.routing.failover import FailoverTransport
from gym_serve.cluster.routing.replica_transport import ReplicaTransport
from gym_serve.cluster.routing.rpc import Directory, Listener
from gym_serve.cluster.serve_compat import (
    is_being_deleted,
    logs_directory,
    may_report_load,
    node_address,
    process_is_alive,
    request_limits,
)
from gym_serve.cluster.serve_metrics import RayPublisher, serve_metrics
from gym_serve.cluster.weights import CurrentWeights
from gym_serve.gateway.host import LIST, LOOK, PRESSURE, STATS, STOP, counts
from gym_serve.graph.spec import LogOptions, Node
from gym_serve.observe import catalogue, tracing
from gym_serve.observe.cpu import OtherCpu
from gym_serve.observe.logs import write_log
from gym_serve.servers.clients import Client
from gym_serve.servers.context import log_fields
from gym_serve.servers.model import ModelServer
from gym_serve.servers.resources import ResourcesServer
from gym_serve.servers.runner import ServerRunner, tune_process
from gym_serve.servers.transport import Call, Reply, Transport
from gym_serve.transports import InlineTransport
from gym_serve.types.errors import GraphError
from gym_serve.workers.pool import end_with_parent

_DRAIN_SECONDS = 0.5  # between two checks whether a draining replica is done


def transport_to(node: Node, handle: DeploymentHandle[Any] | None) -> Transport:
    """The transport to a server that is not inline."""
    if node.url is not None:
        return remote_transport(node)
    if handle is None:
        raise GraphError(f"{node.name}: no deployment handle")
    transport = ReplicaTransport(node.name, handle)
    return FailoverTransport(transport) if node.kind == "resources" else transport


# Seconds before each look whether a caller is dead: Ray learns of a process at once, and of a node later.
_LOOKS = (1.0, 5.0, 30.0, 60.0)


def log_of_replica(options: LogOptions) -> None:
    """Write the log of this process beside that of Serve, if it is a replica."""
    try:
        context = serve.get_replica_context()
    except RayServeException:
        return
    names = (context.app_name, context.deployment, context.replica_id.unique_id)
    write_log(
        logs_directory() / "serve",
        names,
        format=options.format,
        level=options.level,
        access=options.access,
        context=log_fields,
    )


class Replica:
    """One replica of one server; ``handles`` reach the deployments of the servers that it references."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        name: str,
        nodes: Mapping[str, Node],
        handles: Mapping[str, DeploymentHandle[Any]],
        traced: float | None = None,
        logs: LogOptions = LogOptions(),  # noqa: B008  # a constant
    ) -> None:
        self._node = nodes[name]
        self._nodes = nodes
        self._handles = handles
        context = serve.get_replica_context()
        self._application = context.app_name
        self._replica = context.replica_id.unique_id
        self._traced = traced
        log_of_replica(logs)
        if traced is not None:
            tracing.start({"service.namespace": self._application, "service.instance.id": self._replica})
        self._runners: list[ServerRunner] = []
        self._transports: list[Transport] = []
        self._started: list[ServerRunner] = []
        self._draining = False
        self._controls = 0
        if not may_report_load():  # Serve looks for the hook on the instance, once it is constructed
            self.record_autoscaling_stats = None  # type: ignore[assignment, method-assign]
        self._runner = self._construct(name)
        for runner in self._runners:  # inline servers first: the others may call them when they start
            await runner.start()
            self._started.append(runner)
        self._weights = CurrentWeights(self._application, self._runner)
        is_model = isinstance(self._runner.server, ModelServer)
        if is_model:
            await self._weights.fetch()
        self._admission = Admission(self._runner.dispatch, self._runner.stream, request_limits)
        self._partings: set[asyncio.Task[None]] = set()
        self._listener = Listener(self._dispatch, self._admission.stream, self._load, self._part_from)
        self._directory = Directory(self._application, name)
        await self._directory.put(self._replica, await self._listener.start(node_address()))
        if is_model:
            await self._weights.fetch()  # of an update that came before the address was there
            await self._weights.hold()
        self._fed = RayPublisher({}, metrics=serve_metrics(self._application, name, self._replica))
        labels = {"graph": self._application, "server": name, "replica": self._replica}
        self._publisher = RayPublisher(labels, self._refresh)
        self._other_cpu = OtherCpu(name)
        await self._publisher.start()
        self._watching = asyncio.create_task(end_with_parent(os.getppid()))
        tune_process()

    def _part_from(self, caller: str) -> None:
        """A process has no connection any more: if it is dead, nobody may go on with its sessions."""
        if isinstance(server := self._runner.server, ResourcesServer) and server.live_sessions:
            task = asyncio.create_task(self._orphan(server, caller))
            self._partings.add(task)
            task.add_done_callback(self._partings.discard)

    async def _orphan(self, server: ResourcesServer, caller: str) -> None:
        for seconds in _LOOKS:
            await asyncio.sleep(seconds)
            if self._listener.is_connected(caller):
                return  # it was the network
            with suppress(RuntimeError, RayError):
                if not await asyncio.to_thread(process_is_alive, caller):
                    server.sessions.orphan(caller)
                    return

    async def ping(self) -> None:
        """Answer, so that the caller knows that this replica runs."""

    async def check_health(self) -> None:
        """Serve's hook: a replica that raises here is replaced."""
        for runner in self._runners:
            await runner.server.check_health()

    def record_autoscaling_stats(self) -> dict[str, float]:
        return self._loads()

    def _loads(self) -> dict[str, float]:
        calls = self._admission.running + self._admission.waiting
        return {CALLS: calls, SESSIONS: self._runner.server.live_sessions + self._admission.unbound}

    def reconfigure(self, settings: dict[str, Any]) -> None:
        """Serve's hook for a changed ``user_config``: settings to change while running."""
        if settings:
            self._runner.server.reconfigure(settings)

    async def __del__(self) -> None:
        """Serve's hook for a graceful stop."""
        # The constructor may have failed half way. A server stops before those that it uses.
        if hasattr(self, "_directory"):
            self._draining = True
            await self._drain()
            # At once: a session that a caller with an old directory opens meanwhile would be lost.
            await self._listener.stop()
            await self._directory.remove(self._replica)
        if hasattr(self, "_publisher"):
            await self._publisher.stop()
        for runner in reversed(getattr(self, "_started", [])):
            await runner.stop()
        for transport in getattr(self, "_transports", []):
            await transport.close()
        await asyncio.to_thread(tracing.stop)

    def _dispatch(self, call: Call) -> Coroutine[Any, Any, Reply]:
        if call.op in (PRESSURE, STATS):  # answered at once, also when the queue is full
            return self._report(with_counts=call.op == STATS)
        if call.op in (LIST, LOOK, STOP):
            return answer_here(call, self._runners, self._admission)
        if self._weights.takes(call):
            return self._control(call)
        return self._admission.dispatch(call)

    async def _control(self, call: Call) -> Reply:
        """Answer the process that runs the graph; it may wait here for long, and is no load."""
        self._controls += 1
        try:
            return await self._weights.dispatch(call)
        finally:
            self._controls -= 1

    async def _report(self, *, with_counts: bool) -> Reply:
        load = report(
            self._node,
            self._admission,
            sessions=self._sessions,
            boxes=self._runner.server.boxes,
            limit=request_limits()[0],
            draining=self._draining,
            loads=self._loads(),
        )
        if with_counts:
            self._set_gauges()
            load["counts"] = counts()
        return Reply.of(load)

    def _refresh(self) -> None:
        """Bring the metrics up to date, and publish what Serve's own series get of them."""
        self._set_gauges()
        self._fed.publish()

    def _set_gauges(self) -> None:
        catalogue.CALLS_RUNNING.set(self._node.name, value=self._admission.running)
        catalogue.CALLS_QUEUED.set(self._node.name, value=self._admission.waiting)
        for runner in self._runners:
            runner.observe()
        self._other_cpu.refresh()

    @property
    def _sessions(self) -> int:
        return sum(runner.server.live_sessions for runner in self._runners)

    def _load(self) -> int:
        return self._listener.calls - self._controls + self._sessions

    async def _drain(self) -> None:
        while self._load():
            if await is_being_deleted(self._application):
                return  # the sessions end with the application
            await asyncio.sleep(_DRAIN_SECONDS)

    def _construct(self, name: str, *, inline: bool = False) -> ServerRunner:
        node = self._nodes[name]

        def client(target: str) -> Client:
            transport = self._transport(target, inline=target in node.inline)
            return client_of(self._nodes[target], transport)

        runner = constructed(node, client, tracing=self._traced, replica=self._replica, lasting=not inline)
        self._runners.append(runner)
        return runner

    def _transport(self, target: str, *, inline: bool) -> Transport:
        if inline:
            return InlineTransport(self._construct(target, inline=True))
        transport = transport_to(self._nodes[target], self._handles.get(target))
        self._transports.append(transport)
        return transport

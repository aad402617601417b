"""`LocalGraph`: a graph in this process, without Ray.

Every server has one `ServerRunner`, as in a replica, and is called by the inline transport; a server of
``type: http`` is called by its URL. So an episode runs the same code as on a cluster, and gives the same
trajectory. A local graph has no replicas, autoscaling or reserved GPUs. It has HTTP routes where an agent
needs them, for a harness (`gym_serve.assembly.ingress`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gym_serve.assembly.node import client_of, constructed, remote_transport, states_of
from gym_serve.graph.spec import Graph, Node
from gym_serve.servers.base import Server
from gym_serve.servers.clients import Client
from gym_serve.servers.runner import ServerRunner
from gym_serve.servers.transport import Transport
from gym_serve.transports import InlineTransport
from gym_serve.types.errors import GraphError, GymError, Unavailable
from gym_serve.types.requests import JSON

if TYPE_CHECKING:
    from gym_serve.assembly.ingress import LocalIngress

_CLUSTER_ONLY = ("num_gpus", "accelerator_type", "resources", "runtime_env", "placement_group_bundles")
"""Options that only a cluster can fulfil. The others set the number and size of replicas."""


class LocalGraph:
    """Runs a graph in this process. ``graph``: the graph; ``around``: wraps the transport to each server,
    e.g. to watch the calls. Raises GraphError: options of servers need a cluster; names all of them."""

    def __init__(
        self, graph: Graph, around: Callable[[Transport], Transport] = lambda transport: transport
    ) -> None:
        problems = [p for node in graph.nodes.values() if (p := _needs_cluster(node)) is not None]
        if problems:
            raise GraphError(problems)
        self._graph = graph
        self._runners: dict[str, ServerRunner] = {}
        self._transports: dict[str, Transport] = {}
        self._started: list[ServerRunner] = []
        self._ingress: LocalIngress | None = None  # where an agent needs one
        for name in graph.order():  # each after those that it calls
            self._transports[name] = around(self._construct(graph.nodes[name]))

    def transport(self, server: str) -> Transport:
        return self._transports[server]

    @property
    def runners(self) -> list[ServerRunner]:
        return list(self._runners.values())

    def server(self, name: str) -> Server | None:
        """A server of this process, by its name; None for one that is reached by its URL."""
        runner = self._runners.get(name)
        return None if runner is None else runner.server

    async def start(self) -> None:
        """Start the servers, each after those that it calls. Raises GymError: a server did not start; those
        before it are stopped."""
        try:
            for name, runner in self._runners.items():
                try:
                    await runner.start()
                except GymError:
                    raise
                except Exception as error:  # an author's code
                    message = f"{name} did not start: {type(error).__name__}: {error}"
                    raise Unavailable(message, server=name) from error
                self._started.append(runner)
            if self._ingress is not None:
                await self._ingress.start(self._graph, self._transports, self.runners)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop the servers, each before those that it calls, and close the connections."""
        if self._ingress is not None:
            await self._ingress.stop()
        while self._started:
            await self._started.pop().stop()
        for transport in self._transports.values():
            await transport.close()

    def observe(self) -> None:
        """Set the gauges of all servers; see `gym_serve.observe.catalogue`."""
        for runner in self._runners.values():
            runner.observe()

    async def health(self) -> JSON:
        elsewhere = {"state": "unknown", "message": "it runs elsewhere; ask it there"}
        states = await states_of(self._runners.values())
        return {name: states.get(name, elsewhere) for name in self._transports}

    def _construct(self, node: Node) -> Transport:
        if node.cls is None:
            return remote_transport(node)
        settings = self._gateway() if "gateway_url" in node.cls.Config.model_fields else {}
        runner = constructed(node, self._client, tracing=self._graph.tracing, lasting=False, **settings)
        self._runners[node.name] = runner
        return InlineTransport(runner)

    def _gateway(self) -> JSON:
        """Settings of an agent whose harness calls this graph over HTTP: an address that answers here."""
        if self._ingress is None:
            # Imported here: few graphs need it, and it imports Serve.
            from gym_serve.assembly.ingress import LocalIngress

            self._ingress = LocalIngress()
        return {"gateway_url": self._ingress.url, "gateway_token": self._ingress.token}

    def _client(self, target: str) -> Client:
        return client_of(self._graph.nodes[target], self._transports[target])


def _needs_cluster(node: Node) -> str | None:
    given = node.options.model_dump(exclude_none=True)
    if node.cls is not None:
        given |= node.cls.deployment_options(node.settings, given)
    options = [name for name in _CLUSTER_ONLY if given.get(name)]
    if not options:
        return None
    return f"{node.name}: {', '.join(options)} needs a cluster; run this graph on Ray (without ray=False)"

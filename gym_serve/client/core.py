"""`Core`: one graph, how it is reached, and what runs on it. `Gym` and `AsyncGym` are its two faces."""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakSet

from gym_serve.client import loop
from gym_serve.client.connection import Connection
from gym_serve.client.policy_service import PolicyService
from gym_serve.client.rollout_client import RolloutClient
from gym_serve.client.stream import GroupStream
from gym_serve.graph.spec import SECTIONS
from gym_serve.observe import tracing
from gym_serve.observe.catalogue import DRIVER_IN_FLIGHT, STALENESS, WEIGHTS_UPDATE_SECONDS
from gym_serve.rollouts import Group, RolloutTracking
from gym_serve.servers.transport import Call, Transport, encode
from gym_serve.types.errors import NotFound

logger = logging.getLogger("gym_serve")


class Core:
    """The state that both faces share. Its coroutines run on the event loop of this package (`loop`)."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.name = connection.name
        self.graph = connection.public
        self.servers = [name for section in SECTIONS for name in self.graph.get(section) or {}]
        agents = list(self.graph.get("agents") or {})
        self.default_agent = connection.default_agent or (agents[0] if len(agents) == 1 else None)
        self.services: dict[str, PolicyService] = {}
        self.trackings: list[RolloutTracking] = []
        self.streams: WeakSet[GroupStream] = WeakSet()
        self._transports: dict[str, Transport] = {}
        if self.graph.get("tracing") is not None:
            try:
                tracing.start()
            except ModuleNotFoundError as error:  # the graph's servers record their part all the same
                logger.warning("this process records no traces: %s", error)
        self.client = RolloutClient(
            self.graph, self.default_agent, self.transport, connection.graph, self.name
        )
        # Its own, as a process may have several Gyms.
        self._in_flight, self._staleness = DRIVER_IN_FLIGHT.fresh(), STALENESS.fresh()
        self.update_seconds = WEIGHTS_UPDATE_SECONDS.fresh()
        connection.publish((self._in_flight, self.update_seconds, self._staleness), self._set_gauges)

    def _set_gauges(self) -> None:
        self._in_flight.set(value=self.client.activity.in_flight)

    def taken(self, group: Group) -> None:
        if group.usable and group.staleness is not None:
            self._staleness.observe(value=group.staleness)

    def check(self, server: str) -> None:
        """Refuse a server that the graph lacks (`NotFound`)."""
        if server not in self.servers:
            raise NotFound(f"no server {server!r} in {self.name}; it has {', '.join(self.servers)}")

    def transport(self, server: str) -> Transport:
        if server not in self._transports:
            self.check(server)
            # Of two threads, both have the same one.
            self._transports.setdefault(server, self.connection.transport(server))
        return self._transports[server]

    def models(self, model: str | None) -> list[str]:
        """The named model, or the models of all agents."""
        models = self.graph.get("models") or {}
        if model is not None:
            if model not in models:
                raise NotFound(f"no model {model!r} in {self.name}; it has {', '.join(models)}")
            return [model]
        names = (agent.get("model") for agent in (self.graph.get("agents") or {}).values())
        return list(dict.fromkeys(name for name in names if name in models))

    async def policy_updates(self) -> int:
        """How often the weights of the policy were replaced."""
        return max([await self.connection.updates(name) for name in self.models(None)], default=0)

    async def call(self, server: str, op: str, body: Any, timeout: float | None) -> Any:
        content = b"" if body is None else encode(body)
        return (await self.transport(server).call(Call(op, content, timeout=timeout))).json()

    def shutdown(self) -> None:
        try:
            while self.trackings:
                self.trackings[-1].close()
            loop.wait(self._close_edges())
        finally:
            self.connection.close()
            tracing.flush()

    async def _close_edges(self) -> None:
        for stream in list(self.streams):
            await stream.aclose()
        while self.services:
            await self.services.popitem()[1].stop()
        while self._transports:
            await self._transports.popitem()[1].close()

"""What replicas tell of themselves to whoever asks them: their load, their counts, their episodes.

A replica answers such a call at once, also when its queue is full. Each has some seconds; one that does not
answer holds up nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from gym_serve.assembly.own_episodes import GONE
from gym_serve.cluster.autoscaling import CALLS, SESSIONS
from gym_serve.cluster.routing.admission import Admission
from gym_serve.cluster.routing.rpc import (
    Address,
    Channel,
    ConnectError,
    ConnectionLostError,
    ConnectTimeoutError,
    Directory,
    NotDeliveredError,
    QueueFullError,
)
from gym_serve.gateway.stats import PRESSURE
from gym_serve.graph.spec import Node
from gym_serve.servers.transport import Call, Reply
from gym_serve.types.errors import DeadlineExceeded, NotFound
from gym_serve.types.requests import JSON

_SECONDS = 2.0  # for a replica to answer about its episodes
_REPORT_SECONDS = 5.0


def report(
    node: Node,
    admission: Admission,
    *,
    sessions: int,
    boxes: Mapping[str, int] | None,
    limit: int,
    draining: bool,
    loads: Mapping[str, float],
) -> JSON:
    """The counts of one replica: of its calls, of live sessions and boxes, and the limit of calls at the same
    time."""
    scaling = node.options.autoscaling
    target = None if scaling is None else scaling.sessions or scaling.target_ongoing_requests
    by_sessions = scaling is not None and scaling.sessions is not None and node.kind == "resources"
    return {
        "draining": draining,
        "running": admission.running,
        "waiting": admission.waiting,
        "limit": limit if target is None or by_sessions else min(limit, target),
        "sessions": sessions,
        "boxes": boxes,
        "target_sessions": target if by_sessions else None,
        "max_replicas": 0 if scaling is None else scaling.max_replicas,
        "autoscaling": None
        if scaling is None
        else {
            "measure": "sessions" if scaling.sessions else "calls",
            "load": loads[SESSIONS if scaling.sessions else CALLS],
            "target": target or 1.0,
            "min": scaling.fewest,
            "max": scaling.max_replicas,
        },
        "cpu": admission.meter.cpu(),
        "refused": admission.meter.refused(),
    }


async def reports_of(application: str, servers: Iterable[str], op: str = PRESSURE) -> dict[str, list[JSON]]:
    """What all replicas answer, by server; a replica that does not answer is left out."""
    names = list(servers)
    reports = await asyncio.gather(*(_server(application, name, Call(op, b"")) for name in names))
    return dict(zip(names, reports, strict=True))


async def _server(application: str, server: str, call: Call) -> list[JSON]:
    addresses = (await Directory(application, server).all()).values()
    answers = await asyncio.gather(*(_replica(address, call) for address in addresses))
    return [report for report in answers if report is not None]


async def _replica(address: Address, call: Call) -> JSON | None:
    try:
        async with Channel.opened(address) as channel:
            reply = await asyncio.wait_for(channel.call(call), _REPORT_SECONDS)
    except (ConnectError, NotDeliveredError, QueueFullError, ConnectionLostError, asyncio.TimeoutError):
        return None
    counts: JSON = reply.json()
    return counts


class AgentReplicas:
    """The replicas of an application that may run agents."""

    def __init__(self, application: str, nodes: Mapping[str, Node]) -> None:
        self._application = application
        agents = {name for name, node in nodes.items() if node.kind == "agent"}
        # A server may have the agents that it calls in its own replicas.
        self._servers = [
            name
            for name, node in nodes.items()
            if node.url is None and (name in agents or agents & set(node.references.values()))
        ]

    async def ask(self, call: Call) -> tuple[list[tuple[str, JSON]], list[str]]:
        replicas = await asyncio.gather(*map(self._addresses, self._servers))
        places = {f"{server}.{replica}": a for server, all in replicas for replica, a in all.items()}
        answers = await asyncio.gather(*(self._answer(address, call) for address in places.values()))
        named = list(zip(places, answers, strict=True))
        told = [(name, reply.json()) for name, reply in named if reply.status]
        return told, [name for name, reply in named if reply == _SILENT]

    async def tell(self, name: str, call: Call) -> Reply:
        server, _, replica = name.partition(".")
        address = await self._directory(server).get(replica) if server in self._servers else None
        reply = _LEFT if address is None else await self._answer(address, call)
        if reply == _LEFT:
            raise NotFound(GONE)
        if reply == _SILENT:
            problem = f"a replica of {server} did not answer within {_SECONDS:g} s"
            raise DeadlineExceeded(problem, server=server)
        return reply

    def _directory(self, server: str) -> Directory:
        return Directory(self._application, server)

    async def _addresses(self, server: str) -> tuple[str, dict[str, Address]]:
        return server, await self._directory(server).all()

    async def _answer(self, address: Address, call: Call) -> Reply:
        try:
            return await asyncio.wait_for(self._call(address, call), _SECONDS)
        except (asyncio.TimeoutError, ConnectTimeoutError):
            return _SILENT
        except (ConnectError, NotDeliveredError, ConnectionLostError):
            return _LEFT

    async def _call(self, address: Address, call: Call) -> Reply:
        async with Channel.opened(address) as channel:
            return await channel.call(call)


_SILENT, _LEFT = Reply(0, b"silent"), Reply(0, b"left")

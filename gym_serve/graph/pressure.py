"""Pressure: how loaded each server of the running application is, and how many rollouts suit the graph.

A server's *load* is 1 if it is fully used, with all the replicas that it may get. It is the highest of these
ratios, and its *reason* names that one:

- ``calls``: running and waiting calls, to those that may run (``max_ongoing_requests``), or to the
  ``target_ongoing_requests`` of its autoscaling;
- ``sessions``: live sessions, to the ``target_sessions`` of its autoscaling;
- ``cpu``: CPU time of its replicas, to one core each, as a replica is one event loop;
- ``overloaded``: 1 or more, if it or its backend (a model's endpoint) refused calls in the last seconds.

The server with the highest load is the *bottleneck* of the graph. Load grows with the rollouts in flight, so
the graph can take about as many as run now, divided by the load.

For a server that scales by its load, its *autoscaling* says which load asks for how many replicas. Serve
follows what this was on average over ``look_back_period_s``, after its delays and with its factors.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence

from gym_serve.graph.spec import Node
from gym_serve.routing.admission import Admission
from gym_serve.routing.autoscaling import CALLS, SESSIONS
from gym_serve.routing.rpc import (
    Address,
    Channel,
    ConnectError,
    ConnectionLostError,
    Directory,
    NotDeliveredError,
    QueueFullError,
)
from gym_serve.servers.transport import Call, encode
from gym_serve.types.requests import JSON

PRESSURE = "pressure"
"""The operation that every replica answers at once, with its counts."""

_MOST = 100.0  # a server that refuses everything


def report(
    node: Node,
    admission: Admission,
    *,
    sessions: int,
    limit: int,
    draining: bool,
    loads: Mapping[str, float],
) -> JSON:
    """The counts of one replica: of its calls, of live sessions, and the limit of calls at the same time.

    Args:
        loads: its loads as Serve's autoscaling gets them.
    """
    scaling = node.options.autoscaling
    target = None if scaling is None else scaling.sessions or scaling.target_ongoing_requests
    by_sessions = scaling is not None and scaling.sessions is not None and node.kind == "resources"
    return {
        "draining": draining,
        "running": admission.running,
        "waiting": admission.waiting,
        "limit": limit if target is None or by_sessions else min(limit, target),
        "sessions": sessions,
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


async def reports_of(
    application: str,
    servers: Iterable[str],
    op: str = PRESSURE,
    body: JSON | None = None,
    seconds: float = 5.0,
) -> dict[str, list[JSON]]:
    """What all replicas answer, by server; a replica that does not answer is left out.

    Args:
        application: name of the application.
        servers: names of its servers.
        op: what they are asked: an operation that a replica answers itself.
        body: with it.
        seconds: how long to wait for each.
    """
    names = list(servers)
    call = Call(op, b"" if body is None else encode(body))
    reports = await asyncio.gather(*(_server(application, name, call, seconds) for name in names))
    return dict(zip(names, reports, strict=True))


async def _server(application: str, server: str, call: Call, seconds: float) -> list[JSON]:
    addresses = (await Directory(application, server).all()).values()
    asked = await asyncio.gather(*(_replica(address, call, seconds) for address in addresses))
    return [report for report in asked if report is not None]


async def _replica(address: Address, call: Call, seconds: float) -> JSON | None:
    try:
        channel = await Channel.open(address)
    except ConnectError:
        return None
    try:
        reply = await asyncio.wait_for(channel.call(call), seconds)
    except (NotDeliveredError, QueueFullError, ConnectionLostError, asyncio.TimeoutError):
        return None
    finally:
        await channel.close()
    counts: JSON = reply.json()
    return counts


def pressure(reports: Mapping[str, Sequence[JSON]], agents: Iterable[str]) -> JSON:
    """The bottleneck of the graph, by the counts of its replicas.

    Args:
        reports: counts by server.
        agents: names of the agents: their calls are the rollouts in flight.

    Returns:
        ``servers`` with their sums, loads and autoscaling; the ``bottleneck`` with its ``load`` and
        ``reason``; ``rollouts`` in flight; and a recommended ``concurrency``, None while nothing runs.
    """
    servers = {name: _summed(server) for name, server in reports.items()}
    rollouts = sum(servers[name]["running"] + servers[name]["waiting"] for name in agents if name in servers)
    bottleneck = max(servers, key=lambda name: float(servers[name]["load"]), default=None)
    load = 0.0 if bottleneck is None else servers[bottleneck]["load"]
    busy = bottleneck is not None and load > 0
    return {
        "bottleneck": bottleneck if busy else None,
        "reason": servers[bottleneck]["reason"] if bottleneck is not None and busy else None,
        "load": load,
        "rollouts": rollouts,
        "concurrency": max(1, int(rollouts / load)) if busy and rollouts else None,
        "servers": servers,
    }


def _summed(replicas: Sequence[JSON]) -> JSON:
    """One server: counts of all its replicas, loads by those that take new work."""
    able = [replica for replica in replicas if not replica["draining"]]
    counts = {key: sum(replica[key] for replica in replicas) for key in ("running", "waiting", "sessions")}
    summed = {
        "replicas": len(able),
        "draining": len(replicas) - len(able),
        **counts,
        "cpu": round(sum(replica["cpu"] for replica in able), 3),
        "refused": round(max((replica["refused"] for replica in able), default=0.0), 3),
        "autoscaling": _autoscaling(able),
    }
    shares = _shares(able)
    reason = max(shares, key=lambda kind: shares[kind], default=None)
    return {**summed, "load": 0.0 if reason is None else round(shares[reason], 3), "reason": reason}


def _autoscaling(replicas: Sequence[JSON]) -> JSON | None:
    """Which load asks for how many replicas; None for a fixed number."""
    reports = [replica["autoscaling"] for replica in replicas]
    if not reports or reports[-1] is None:
        return None
    rule = reports[-1]
    load = sum(report["load"] for report in reports if report is not None)
    asks = min(max(math.ceil(load / rule["target"]), rule["min"]), rule["max"])
    return {**rule, "load": load, "asks": asks}


def _shares(replicas: Sequence[JSON]) -> dict[str, float]:
    if not replicas:
        return {}
    most = max(len(replicas), replicas[-1]["max_replicas"])
    shares = {
        "calls": sum(r["running"] + r["waiting"] for r in replicas) / (most * replicas[-1]["limit"]),
        "cpu": sum(r["cpu"] for r in replicas) / most,
    }
    if target := replicas[-1]["target_sessions"]:
        shares["sessions"] = sum(r["sessions"] for r in replicas) / (most * target)
    if refused := sum(r["refused"] for r in replicas) / len(replicas):
        shares["overloaded"] = min(_MOST, 1 / max(1 - refused, 1 / _MOST))
    return shares

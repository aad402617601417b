"""`Host`: the process that a gateway answers in, and what that one knows of the graph around it.

A gateway itself is HTTP over transports. What runs, how loaded it is, and how a policy is changed, it asks
its host: a replica on a cluster (`gym_serve.cluster.ingress`), or a process with a graph of its own
(`gym_serve.assembly`).

``/episodes``: the episodes that run on a graph, and the last ones that have ended (docs/http.md).

The replicas know their episodes (`gym_serve.servers.live`), and are asked when somebody looks. Each has some
seconds to answer; one that does not is named, and holds up nobody. An id names the replica, so any gateway of
the graph finds the episode.

Load and counts of the running application: what ``/pressure`` and ``/stats`` answer.

A server's *load* is 1 if it is fully used, with all the replicas that it may get. It is the highest of these
ratios, and its *reason* names that one:

- ``calls``: running and waiting calls, to those that may run (``max_ongoing_requests``), or to the
  ``target_ongoing_requests`` of its autoscaling;
- ``sessions``: live sessions, to the ``target_sessions`` of its autoscaling;
- ``boxes``: live boxes and takes that wait for one, to those that there may be (`BoxPool`);
- ``cpu``: CPU time of its replicas, to one core each, as a replica is one event loop;
- ``overloaded``: 1 or more, if it or its backend (a model's endpoint) refused calls in the last seconds.

The server with the highest load is the *bottleneck* of the graph. Load grows with the rollouts in flight, so
the graph can take about as many as run now, divided by the load.

For a server that scales by its load, its *autoscaling* says which load asks for how many replicas. Serve
follows what this was on average over ``look_back_period_s``, after its delays and with its factors.

The numbers of ``/stats`` are for people and programs without a Prometheus (`gym-serve top`), and are those of
`gym_serve.observe.catalogue`. Counters and histograms are added up over the replicas; a gauge keeps one value
for each. What a replica counted is gone with it, so a sum falls when a replica ends.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import httpx
from starlette.requests import Request
from starlette.responses import Response

from gym_serve.gateway import wire
from gym_serve.graph.spec import Node
from gym_serve.observe.catalogue import CPU_SECONDS, METRICS
from gym_serve.servers.model import HoldMode
from gym_serve.servers.transport import Call, Reply, encode
from gym_serve.types.requests import JSON

PRESSURE = "pressure"
"""The operation that every replica answers at once, with its counts."""

_MOST = 100.0  # a server that refuses everything


def pressure(reports: Mapping[str, Sequence[JSON]], agents: Iterable[str]) -> JSON:
    """The bottleneck of the graph, by the counts of its replicas. Returns ``servers`` with their sums, loads
    and autoscaling; the ``bottleneck`` with its ``load`` and ``reason``; ``rollouts`` in flight; and a
    recommended ``concurrency``, None while nothing runs."""
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
    able = [replica for replica in replicas if not replica["draining"]]
    counts = {key: sum(replica[key] for replica in replicas) for key in ("running", "waiting", "sessions")}
    summed = {
        "replicas": len(able),
        "draining": len(replicas) - len(able),
        **counts,
        "cpu": round(sum(replica["cpu"] for replica in able), 3),
        "refused": round(max((replica["refused"] for replica in able), default=0.0), 3),
        "boxes": _boxes(able),
        "autoscaling": _autoscaling(able),
    }
    shares = _shares(able)
    reason = max(shares, key=lambda kind: shares[kind], default=None)
    return {**summed, "load": 0.0 if reason is None else round(shares[reason], 3), "reason": reason}


def _boxes(replicas: Sequence[JSON]) -> dict[str, int] | None:
    """The boxes of all replicas, by state; None for a server without any."""
    counts = [boxes for replica in replicas if (boxes := replica["boxes"]) is not None]
    return {state: sum(each[state] for each in counts) for state in counts[0]} if counts else None


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
    if boxes := _boxes(replicas):
        shares["boxes"] = (boxes["live"] + boxes["waiting"]) / boxes["most"] * len(replicas) / most
    if refused := sum(r["refused"] for r in replicas) / len(replicas):
        shares["overloaded"] = min(_MOST, 1 / max(1 - refused, 1 / _MOST))
    return shares


STATS = "stats"
"""The operation that every replica answers at once, with `counts` beside its load."""


def counts() -> list[JSON]:
    """The numbers of this process: the kind of metric, the series, its labels, its value."""
    return [
        {"kind": metric.kind, "name": point.name, "labels": point.labels, "value": point.value}
        for metric in METRICS
        for point in metric.points()
    ]


def stats(reports: Mapping[str, Sequence[JSON]], agents: Iterable[str]) -> JSON:
    """The answer of ``/stats``. ``reports``: by server, the answer of each of its replicas to `STATS`.
    Returns the keys of `pressure`, and those of `merged`."""
    points = merged(report["counts"] for replicas in reports.values() for report in replicas)
    loads = pressure(reports, agents)
    seconds: dict[str, dict[str, float]] = {}
    for point in points.get(CPU_SECONDS.name, ()):
        labels = point["labels"]
        seconds.setdefault(labels["server"], {})[labels["stage"]] = round(point["value"], 3)
    for server, load in loads["servers"].items():
        load["cpu_seconds"] = seconds.get(server, {})
    return {**loads, "metrics": points}


def merged(replicas: Iterable[Sequence[JSON]]) -> dict[str, list[JSON]]:
    """The numbers of several processes together. Returns by series: a list of ``labels`` and ``value``."""
    metrics: dict[str, dict[frozenset[tuple[str, str]], JSON]] = {}
    for position, replica in enumerate(replicas):
        for point in replica:
            labels = dict(point["labels"])
            if point["kind"] == "gauge":
                labels["replica"] = str(position)
            series = metrics.setdefault(point["name"], {})
            total = series.setdefault(frozenset(labels.items()), {"labels": labels, "value": 0})
            total["value"] += point["value"]
    return {name: list(series.values()) for name, series in metrics.items()}


class Processes(Protocol):
    """The processes of a graph that may run agents."""

    async def ask(self, call: Call) -> tuple[list[tuple[str, JSON]], list[str]]:
        """What all of them answer, each after its name, and the names of silent ones.

        A name has the form ``{server}.{replica}``.
        """
        ...

    async def tell(self, name: str, call: Call) -> Reply:
        """What one of them answers. Raises NotFound: there is no such process; DeadlineExceeded: it does not
        answer."""
        ...


class Steering(Protocol):
    """Changes the policy of a graph: one model."""

    async def hold(self, mode: HoldMode) -> None:
        """Hold its calls."""
        ...

    async def release(self) -> None:
        """Let them begin again."""
        ...

    async def set_version(self, version: str) -> None:
        """Tell all of its replicas the version of the weights that they have."""
        ...

    async def change(self, changes: JSON) -> None:
        """Change settings of it while it runs."""
        ...


class Host(Processes, Protocol):
    """See the module. What a host cannot do raises `NotFound`."""

    async def states(self) -> dict[str, JSON]:
        """State of every server, by name, as in ``/health``."""
        ...

    async def reports(self, op: str) -> dict[str, list[JSON]]:
        """What the replicas of each server answer to ``pressure`` or ``stats``."""
        ...

    def leaving(self) -> bool:
        """Whether this gateway is being stopped. That waits for open responses, so they must end."""
        ...

    async def updates(self, model: str) -> int | None:
        """How often the weights of a model were replaced; None where the model has counted them itself."""
        ...

    def steering(self, model: str) -> Steering:
        """Changes a policy. Raises NotFound, BadRequest: it cannot be changed here; says why."""
        ...


_SECONDS = 5.0
_GONE = frozenset({502, 503, 504})  # what a proxy answers for a server that is not there


async def reached(remote: Mapping[str, Node]) -> dict[str, dict[str, Any]]:
    """The states of servers of ``type: http``, by name."""
    if not remote:
        return {}
    async with httpx.AsyncClient() as client:
        states = await asyncio.gather(*(_reach(client, node) for node in remote.values()))
    return dict(zip(remote, states, strict=True))


async def _reach(client: httpx.AsyncClient, node: Node) -> dict[str, Any]:
    """The state of a remote server; any answer is fine, as its base URL need not be a route."""
    try:
        request = client.stream("GET", str(node.url), headers=node.sent_headers(), timeout=_SECONDS)
        async with request as answer:
            status = answer.status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return {"state": "unreachable", "url": node.url, "message": f"{type(error).__name__}: {error}"}
    if status in _GONE:
        return {"state": "unreachable", "url": node.url, "message": f"HTTP {status}"}
    return {"state": "ready", "url": node.url}


EPISODES = "episodes"
"""The route, and the first part of the names of its operations."""

LIST, LOOK, STOP = (f"{EPISODES}/{op}" for op in ("list", "look", "stop"))
"""Operations that every replica answers at once."""

MOST = 500  # episodes in an answer, and of a process
_MOST_ENDED = 100  # in an answer
_FRESH_SECONDS = 0.5  # for which the list is remembered: many may look


class LiveEpisodesOfGraph:
    """All episodes of a graph."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._listing: asyncio.Task[JSON] | None = None
        self._listed = 0.0

    async def answer(self, request: Request, path: str) -> Response:
        """Answer a request. ``path``: its path below the graph's, which begins with ``episodes``. Raises
        GymError: it is refused."""
        _, _, id = path.partition("/")
        if not id:
            return wire.wrong_method(request, "GET") or wire.answer(Reply.of(await self.list()))
        if wrong := wire.wrong_method(request, "GET", "DELETE"):
            return wrong
        if request.method == "DELETE":
            return wire.answer(Reply.of(await self.stop(id)))
        known = request.query_params.get("known")
        return wire.answer(Reply.of(await self.look(id, known)))

    async def list(self) -> JSON:
        """The episodes that run and those that wait, the oldest first, and those that have ended lately.

        The replicas are asked twice a second at most.
        """
        old = time.monotonic() > self._listed + _FRESH_SECONDS
        if self._listing is None or (self._listing.done() and old):
            self._listing, self._listed = asyncio.create_task(self._list()), time.monotonic()
        return await asyncio.shield(self._listing)

    async def look(self, id: str, known: str | None = None) -> JSON:
        """One episode: what it is doing, and under ``rollout`` what there is of it, with a ``version``.
        Raises NotFound: it is gone; DeadlineExceeded: its replica does not answer."""
        episode: JSON = (await self._tell(id, LOOK, known=known)).json()
        return {"id": id, **episode}

    async def stop(self, id: str) -> JSON:
        """Stop an episode. Raises NotFound: it is gone; Conflict: it has ended, or waits no more;
        DeadlineExceeded: its replica does not answer."""
        episode: JSON = (await self._tell(id, STOP)).json()
        self._listed = 0.0
        return {"id": id, **episode}

    async def _tell(self, id: str, op: str, **more: Any) -> Reply:
        name, _, number = id.rpartition(".")
        return await self._processes.tell(name, Call(op, encode({"number": number, **more})))

    async def _list(self) -> JSON:
        answers, silent = await self._processes.ask(Call(LIST))
        listing: JSON = {"running": 0, "queued": 0, "episodes": [], "ended": [], "silent": silent}
        for name, listed in answers:
            listing["running"] += listed["running"]
            listing["queued"] += listed["queued"]
            for kind in ("episodes", "ended"):
                listing[kind] += [{"id": f"{name}.{one.pop('number')}", **one} for one in listed[kind]]
        listing["episodes"].sort(key=lambda one: -one["seconds"])
        listing["ended"].sort(key=lambda one: one["ended_seconds"])
        del listing["episodes"][MOST:], listing["ended"][_MOST_ENDED:]
        return listing

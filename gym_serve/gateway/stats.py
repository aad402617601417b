"""Load and counts of the running application: what ``/pressure`` and ``/stats`` answer.

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

import math
from collections.abc import Iterable, Mapping, Sequence

from gym_serve.observe.catalogue import CPU_SECONDS, METRICS
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

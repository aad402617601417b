"""Stats: what every replica of the running application has counted, and its load, as one JSON object.

It is what ``/stats`` answers, for people and programs without a Prometheus (`gym-serve top`). The numbers are
those of `gym_serve.observe.catalogue`. Counters and histograms are added up over the replicas; a gauge keeps
one value for each. What a replica counted is gone with it, so a sum falls when a replica ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gym_serve.gateway.pressure import pressure
from gym_serve.observe.catalogue import CPU_SECONDS, METRICS
from gym_serve.types.requests import JSON

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
    """The answer of ``/stats``.

    Args:
        reports: by server, the answer of each of its replicas to `STATS`.

    Returns:
        the keys of `pressure`, and those of `merged`.
    """
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
    """The numbers of several processes together.

    Returns:
        by series: a list of ``labels`` and ``value``.
    """
    found: dict[str, dict[frozenset[tuple[str, str]], JSON]] = {}
    for position, replica in enumerate(replicas):
        for point in replica:
            labels = dict(point["labels"])
            if point["kind"] == "gauge":
                labels["replica"] = str(position)
            series = found.setdefault(point["name"], {})
            total = series.setdefault(frozenset(labels.items()), {"labels": labels, "value": 0})
            total["value"] += point["value"]
    return {name: list(series.values()) for name, series in found.items()}

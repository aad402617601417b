"""Feeds Serve's own series, so that its dashboards show the calls that do not pass through Serve.

Each replica adds the numbers of `gym_serve.observe.catalogue` to them, once per publication: counters and
latencies under an operation as ``route``, which Serve's own requests never have; running and queued calls
under another handle or with one label more, as the boards add up all series of a deployment.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from gym_serve.cluster.serve_compat import latency_bounds
from gym_serve.observe import catalogue
from gym_serve.observe.metrics import Metric, Point

_ERROR = 500

_Labels = dict[str, str]


class _Derived(Metric):
    """A series of Serve's, calculated from ours."""

    def __init__(
        self, kind: str, name: str, help: str, points: Callable[[], Iterable[tuple[_Labels, float]]]
    ) -> None:
        super().__init__(name, help)
        self.kind = kind
        self.name = name
        self._points = points

    def points(self) -> Iterator[Point]:
        for labels, value in self._points():
            yield Point(self.name, labels, value)

    def clear(self) -> None:
        """It has no values of its own."""


def serve_metrics(application: str, deployment: str, replica: str) -> tuple[Metric, ...]:
    """Serve's series of a deployment, for the process of one of its replicas."""
    bounds = latency_bounds()
    here = {"deployment": deployment, "replica": replica, "application": application}
    queue = {"deployment": deployment, "application": application, "handle": "gym_serve", "actor_id": replica}
    return (
        _Derived(
            "counter",
            "serve_deployment_request_counter",
            "The number of queries that have been processed in this replica.",
            lambda: _counts(deployment, here),
        ),
        _Derived(
            "counter",
            "serve_deployment_error_counter",
            "The number of exceptions that have occurred in this replica.",
            lambda: _errors(deployment, here),
        ),
        _Derived(
            "gauge",
            "serve_deployment_processing_latency_ms_bucket",
            "The latency for queries to be processed.",
            lambda: _latencies(deployment, here, bounds),
        ),
        _Derived(
            "gauge",
            "serve_deployment_queued_queries",
            "The current number of queries to this deployment waiting to be assigned to a replica.",
            lambda: _gauge(catalogue.CALLS_QUEUED, deployment, queue),
        ),
        _Derived(
            "gauge",
            "serve_replica_processing_queries",
            "The current number of queries being processed.",
            lambda: _gauge(catalogue.CALLS_RUNNING, deployment, {**here, "source": "gym_serve"}),
        ),
    )


def rebucketed(
    counts: Sequence[tuple[float, float]], total: float, bounds: Sequence[float]
) -> Iterator[float]:
    """A histogram's cumulative counts at other bounds, interpolated in a bucket as Prometheus does."""
    bounds_there = [bound for bound, _ in counts]
    for bound in bounds:
        at = bisect.bisect_left(bounds_there, bound)
        if at == len(counts):
            yield total if not counts or bound > bounds_there[-1] else counts[-1][1]
            continue
        upper, most = counts[at]
        lower, least = counts[at - 1] if at else (0.0, 0.0)
        yield least + (most - least) * (bound - lower) / (upper - lower)


def _counts(deployment: str, here: _Labels) -> Iterator[tuple[_Labels, float]]:
    counted: defaultdict[str, float] = defaultdict(float)
    for labels, value in _of(catalogue.CALLS, deployment):
        counted[labels["op"]] += value
    for op, value in counted.items():
        yield {**here, "route": op}, value


def _errors(deployment: str, here: _Labels) -> Iterator[tuple[_Labels, float]]:
    for labels, value in _of(catalogue.CALLS, deployment):
        if int(labels["status"]) >= _ERROR:
            yield {**here, "route": labels["op"], "exception_type": labels["status"]}, value


def _latencies(deployment: str, here: _Labels, bounds: Sequence[float]) -> Iterator[tuple[_Labels, float]]:
    """Cumulative buckets by operation; ``bounds`` are Serve's, in milliseconds."""
    counted: defaultdict[str, defaultdict[float, float]] = defaultdict(lambda: defaultdict(float))
    for labels, value in _of(catalogue.CALL_SECONDS, deployment):
        if "le" in labels:
            counted[labels["op"]][float(labels["le"])] += value
    for op, buckets in counted.items():
        total = buckets.pop(float("inf"))
        counts = rebucketed(sorted(buckets.items()), total, [bound / 1000 for bound in bounds])
        for bound, count in zip(bounds, counts, strict=True):
            yield {**here, "route": op, "le": str(float(bound))}, count
        yield {**here, "route": op, "le": "+Inf"}, total


def _gauge(metric: Metric, deployment: str, here: _Labels) -> Iterator[tuple[_Labels, float]]:
    for _, value in _of(metric, deployment):
        yield here, value


def _of(metric: Metric, deployment: str) -> Iterator[tuple[_Labels, float]]:
    for point in metric.points():
        if point.labels["server"] == deployment:
            yield point.labels, point.value

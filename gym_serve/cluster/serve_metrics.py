"""Feeds Serve's own series, so that its dashboards show the calls that do not pass through Serve.

Each replica adds the numbers of `gym_serve.observe.catalogue` to them, once per publication: counters and
latencies under an operation as ``route``, which Serve's own requests never have; running and queued calls
under another handle or with one label more, as the boards add up all series of a deployment.

Publishes the metrics of this process through Ray, for Prometheus, as ``ray_gym_serve_...``.

A histogram is published as its cumulative buckets (gauges with the label ``le``, as Prometheus's own series):
Ray's Histogram takes one value at a time, which would cost more than everything else that is recorded. Ray
forgets a gauge that nobody sets for a while, so all of them are set each time.
"""

from __future__ import annotations

import asyncio
import bisect
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import ray
from ray.util import metrics

from gym_serve.cluster.serve_compat import latency_bounds
from gym_serve.observe import catalogue
from gym_serve.observe.catalogue import METRICS
from gym_serve.observe.metrics import Metric, Point

PUBLISH_SECONDS = 5.0  # how often a replica publishes: one that is killed loses what it recorded since

logger = logging.getLogger("gym_serve")


class RayPublisher:
    """Publishes metrics until it is stopped, after ``refresh`` has set the gauges. Every series has the
    labels of ``constant``; a ``server`` that a metric names itself holds."""

    def __init__(
        self,
        constant: dict[str, str],
        refresh: Callable[[], None] = lambda: None,
        metrics: Sequence[Metric] = METRICS,
    ) -> None:
        self._constant = constant
        self._refresh = refresh
        self._metrics = metrics
        self._published: dict[str, Any] = {}
        self._counted: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._publish_for_ever())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self.publish()

    def publish(self) -> None:
        """Publish what counters have grown by since the last time, and what gauges are."""
        if not ray.is_initialized():
            return  # a driver that has not joined the cluster yet, or has left it
        self._refresh()
        for metric in self._metrics:
            for point in metric.points():
                labels = {**self._constant, **point.labels}
                series = self._series(metric, point.name, tuple(labels))
                if metric.kind != "counter":
                    series.set(point.value, labels)
                    continue
                key = (point.name, frozenset(labels.items()))
                if grown := point.value - self._counted.get(key, 0):
                    series.inc(grown, labels)
                    self._counted[key] = point.value

    def _series(self, metric: Metric, name: str, labels: tuple[str, ...]) -> Any:
        if name not in self._published:
            kind = metrics.Counter if metric.kind == "counter" else metrics.Gauge
            self._published[name] = kind(name, metric.help, labels)
        return self._published[name]

    async def _publish_for_ever(self) -> None:
        while True:
            await asyncio.sleep(PUBLISH_SECONDS)
            try:
                self.publish()
            except Exception:  # metrics must never end a replica
                logger.exception("metrics were not published")


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

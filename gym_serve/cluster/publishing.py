"""Publishes the metrics of this process through Ray, for Prometheus, as ``ray_gym_serve_...``.

A histogram is published as its cumulative buckets (gauges with the label ``le``, as Prometheus's own series):
Ray's Histogram takes one value at a time, which would cost more than everything else that is recorded. Ray
forgets a gauge that nobody sets for a while, so all of them are set each time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.util import metrics

from gym_serve.observe.catalogue import METRICS
from gym_serve.observe.metrics import Metric

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

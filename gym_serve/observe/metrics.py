"""The metrics of gym_serve, recorded as plain numbers in the process where something happens.

Recording must cost next to nothing, because a rollout records a dozen values and takes half a millisecond. So
a metric is a dict of numbers, and whoever publishes them reads the dict once in a while
(`gym_serve.routing.metrics` gives them to Ray, which gives them to Prometheus). Nothing here knows Ray, a
clock or a task. The client library of Prometheus has the same classes; a record costs it two to three times
as much, with a lock for every value.

Rules of all metrics:

- Names begin with ``gym_serve_`` and end with their unit, as Prometheus recommends
  (https://prometheus.io/docs/practices/naming/): ``_seconds``, ``_total`` for what only grows.
- Labels have few values. What a model or a client wrote (the name of a tool that does not exist, an unknown
  path) is counted as ``unknown``, or a model could fill the memory of Prometheus.
- Everything is cumulative: a publisher that misses a moment loses nothing.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

__all__ = ["SECONDS", "Count", "Counter", "Gauge", "Histogram", "Metric", "Point", "render"]

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3600.0)
"""Upper bounds of the buckets of durations: from 1 ms to 1 h, two per decade."""


class Point(NamedTuple):
    """One published value."""

    name: str
    """Name of the series: that of the metric, with ``_bucket``, ``_sum`` or ``_count`` for a histogram."""
    labels: dict[str, str]
    value: float


class Metric:
    """A named family of numbers, one for each set of label values.

    Args:
        name: name without the prefix ``gym_serve_``.
        help: what it counts, one sentence, with the unit.
        labels: names of its labels.
    """

    kind = "untyped"

    def __init__(self, name: str, help: str, labels: Sequence[str] = ()) -> None:
        self.name = f"gym_serve_{name}"
        self.help = help
        self.labels = tuple(labels)

    def points(self) -> Iterator[Point]:
        """The present values."""
        raise NotImplementedError

    def clear(self) -> None:
        """Forget all values (for tests: a metric lives as long as its process)."""
        raise NotImplementedError

    def _labelled(self, values: tuple[str, ...]) -> dict[str, str]:
        return dict(zip(self.labels, values, strict=True))


class _Numbers(Metric):
    """One number for each set of label values."""

    def __init__(self, name: str, help: str, labels: Sequence[str] = ()) -> None:
        super().__init__(name, help, labels)
        self._values: dict[tuple[str, ...], float] = {}

    def points(self) -> Iterator[Point]:
        for labels, value in list(self._values.items()):
            yield Point(self.name, self._labelled(labels), value)

    def clear(self) -> None:
        self._values.clear()


class Counter(_Numbers):
    """A number that only grows."""

    kind = "counter"

    def add(self, *labels: str, value: float = 1) -> None:
        """Add ``value`` (at least 0) to the number of these label values, given in the order of `labels`."""
        values = self._values
        values[labels] = values.get(labels, 0) + value


class Gauge(_Numbers):
    """A number that goes up and down."""

    kind = "gauge"

    def set(self, *labels: str, value: float) -> None:
        """Replace the number of these label values."""
        self._values[labels] = value


class Histogram(Metric):
    """How many values fell below each of some bounds.

    Args:
        bounds: inclusive upper bounds, ascending; a bucket without a bound follows them.
    """

    kind = "histogram"

    def __init__(
        self, name: str, help: str, labels: Sequence[str] = (), bounds: Sequence[float] = SECONDS
    ) -> None:
        super().__init__(name, help, labels)
        self.bounds = tuple(bounds)
        # For each set of labels: the count of each bucket, then the sum of the values.
        self._values: dict[tuple[str, ...], list[float]] = {}

    def observe(self, *labels: str, value: float) -> None:
        """Count a value under these label values."""
        numbers = self._values.get(labels)
        if numbers is None:
            numbers = self._values[labels] = [0] * (len(self.bounds) + 1) + [0.0]
        numbers[bisect.bisect_left(self.bounds, value)] += 1
        numbers[-1] += value

    def points(self) -> Iterator[Point]:
        for labels, numbers in list(self._values.items()):
            named = self._labelled(labels)
            count = 0.0
            for bound, inside in zip((*map(_bound, self.bounds), "+Inf"), numbers[:-1], strict=True):
                count += inside
                yield Point(f"{self.name}_bucket", {**named, "le": bound}, count)
            yield Point(f"{self.name}_sum", named, numbers[-1])
            yield Point(f"{self.name}_count", named, count)

    def counts(self) -> Iterator[tuple[tuple[str, ...], float]]:
        """How many values each set of label values has seen."""
        for labels, numbers in list(self._values.items()):
            yield labels, sum(numbers[:-1])

    def clear(self) -> None:
        self._values.clear()


class Count(Metric):
    """How many values a histogram has seen, as a counter of its own: the values are recorded once.

    Args:
        source: the histogram.
        select: the labels of this metric for labels of the histogram; None for those that do not count.
    """

    kind = "counter"

    def __init__(
        self,
        name: str,
        help: str,
        labels: Sequence[str],
        source: Histogram,
        select: Callable[[tuple[str, ...]], tuple[str, ...] | None],
    ) -> None:
        super().__init__(name, help, labels)
        self._source = source
        self._select = select

    def points(self) -> Iterator[Point]:
        counts: dict[tuple[str, ...], float] = {}
        for labels, count in self._source.counts():
            selected = self._select(labels)
            if selected is not None:
                counts[selected] = counts.get(selected, 0) + count
        for labels, count in counts.items():
            yield Point(self.name, self._labelled(labels), count)

    def clear(self) -> None:
        self._source.clear()


def render(metrics: Sequence[Metric], constant: dict[str, str] | None = None) -> str:
    """Metrics in Prometheus's text format (https://prometheus.io/docs/instrumenting/exposition_formats/).

    Args:
        metrics: what to render.
        constant: labels that every series gets, such as the graph's name.
    """
    lines: list[str] = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
        for point in metric.points():
            labels = {**(constant or {}), **point.labels}
            text = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
            lines.append(
                f"{point.name}{{{text}}} {point.value:g}" if text else f"{point.name} {point.value:g}"
            )
    return "\n".join([*lines, ""])


def _bound(value: float) -> str:
    return f"{value:g}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')

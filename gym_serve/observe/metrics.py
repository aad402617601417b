"""The metrics of gym_serve, recorded as plain numbers in the process where something happens.

Recording must cost next to nothing, because a rollout records a dozen values and takes half a millisecond. So
a metric is a dict of numbers, and whoever publishes them reads the dict once in a while
(`gym_serve.cluster.serve_metrics` hands them to Ray, and Ray to Prometheus). Nothing here knows Ray, a
clock or a task. The client library of Prometheus has the same classes; a record costs it two to three times
as much, with a lock for every value.

Names end with their unit, as Prometheus recommends (https://prometheus.io/docs/practices/naming/). Labels
have few values: what a model or a client wrote is counted as ``unknown``, or it could fill the memory of
Prometheus.
"""

from __future__ import annotations

import bisect
import copy
import operator
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple
from weakref import WeakSet

from typing_extensions import Self

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3600.0)
"""Upper bounds of the buckets of durations: from 1 ms to 1 h, two per decade."""


class Point(NamedTuple):
    """One published value."""

    name: str
    """Name of the series: that of the metric, with ``_bucket``, ``_sum`` or ``_count`` for a histogram."""
    labels: dict[str, str]
    value: float


class Metric:
    """A named family of numbers, one for each set of label values. ``name``: name without the prefix
    ``gym_serve_``."""

    kind = "untyped"

    def __init__(self, name: str, help: str, labels: Sequence[str] = ()) -> None:
        self.name = f"gym_serve_{name}"
        self.help = help
        self.labels = tuple(labels)

    def points(self) -> Iterator[Point]:
        raise NotImplementedError

    def clear(self) -> None:
        """Forget all values (for tests: a metric lives as long as its process)."""
        raise NotImplementedError

    def fresh(self) -> Self:
        metric = copy.copy(self)
        metric.clear()
        return metric

    def _labelled(self, values: tuple[str, ...]) -> dict[str, str]:
        return dict(zip(self.labels, values, strict=True))


class _Numbers(Metric):
    """One number for each set of label values."""

    def __init__(self, name: str, help: str, labels: Sequence[str] = ()) -> None:
        super().__init__(name, help, labels)
        self._cells: dict[tuple[str, ...], list[float]] = {}

    def cell(self, *labels: str) -> list[float]:
        """A list whose only item is the number of these label values.

        Whoever records often keeps the cell, and adds to it: ``cell[0] += 1``.
        """
        cell = self._cells.get(labels)
        if cell is None:
            cell = self._cells[labels] = [0]
        return cell

    def add(self, *labels: str, value: float = 1) -> None:
        """Add ``value`` to the number of these label values, given in the order of `labels`."""
        self.cell(*labels)[0] += value

    def remove(self, *labels: str) -> None:
        """Forget the number of these label values, of something that is no more."""
        self._cells.pop(labels, None)

    def points(self) -> Iterator[Point]:
        for labels, (value,) in list(self._cells.items()):
            yield Point(self.name, self._labelled(labels), value)

    def clear(self) -> None:
        self._cells = {}


class Counter(_Numbers):
    """A number that only grows."""

    kind = "counter"


class Gauge(_Numbers):
    """A number that goes up and down."""

    kind = "gauge"

    def set(self, *labels: str, value: float) -> None:
        self.cell(*labels)[0] = value


_TOGETHER = 256
"""Values that are counted at once."""


class Values:
    """The values of a histogram under one set of label values. Any thread may add and read.

    A value waits in a list until somebody reads, or there are `_TOGETHER` (`settle`): to sort a value and
    count it with its neighbours costs a third of looking for its bucket.

    Attributes:
        add: records a value. It is the method of the list, which costs a third of a function.
    """

    __slots__ = ("__weakref__", "_bounds", "_lock", "_numbers", "_waiting", "add")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._numbers: list[float] = [0] * (len(bounds) + 1) + [0.0]
        self._waiting = array("d")
        self._lock = threading.Lock()
        self.add: Callable[[float], None] = self._waiting.append
        _ALL_VALUES.add(self)

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def numbers(self) -> list[float]:
        """The count of each bucket, then the sum of the values."""
        with self._lock:
            taken = self._waiting[:]
            del self._waiting[: len(taken)]  # not all: another one may have come
            numbers = self._numbers.copy()
            numbers[-1] = sum(taken, numbers[-1])
            values = sorted(taken)
            below = 0
            for bucket, bound in enumerate(self._bounds):
                below, before = bisect.bisect_right(values, bound, below), below
                numbers[bucket] += below - before
            numbers[-2] += len(values) - below
            self._numbers = numbers  # replaced, as somebody may be reading the old ones
            return numbers

    def settle(self) -> None:
        """Count what waits, if it is much."""
        if len(self) >= _TOGETHER:
            self.numbers()


_ALL_VALUES: WeakSet[Values] = WeakSet()


def settle() -> None:
    """Count what waits in this process, where it is much: for who runs now and then."""
    for values in list(_ALL_VALUES):
        values.settle()


class Histogram(Metric):
    """How many values fell below each of some bounds. ``bounds``: inclusive upper bounds, ascending; a bucket
    without a bound follows them."""

    kind = "histogram"

    def __init__(
        self, name: str, help: str, labels: Sequence[str] = (), bounds: Sequence[float] = SECONDS
    ) -> None:
        super().__init__(name, help, labels)
        self.bounds = tuple(bounds)
        self._values: dict[tuple[str, ...], Values] = {}

    def values(self, *labels: str) -> Values:
        """The values under these label values. Whoever records often keeps them, and adds to them."""
        values = self._values.get(labels)
        if values is None:
            values = self._values[labels] = Values(self.bounds)
        return values

    def observe(self, *labels: str, value: float) -> None:
        values = self.values(*labels)
        values.add(value)
        values.settle()

    def points(self) -> Iterator[Point]:
        for labels, numbers in self.numbers():
            named = self._labelled(labels)
            count = 0.0
            for bound, inside in zip(
                (*(f"{bound:g}" for bound in self.bounds), "+Inf"), numbers[:-1], strict=True
            ):
                count += inside
                yield Point(f"{self.name}_bucket", {**named, "le": bound}, count)
            yield Point(f"{self.name}_sum", named, numbers[-1])
            yield Point(f"{self.name}_count", named, count)

    def numbers(self) -> list[tuple[tuple[str, ...], list[float]]]:
        """For each set of label values that has a value: the count of each bucket, then the sum."""
        snapshot = [(labels, values.numbers()) for labels, values in list(self._values.items())]
        return [(labels, numbers) for labels, numbers in snapshot if any(numbers[:-1])]

    def clear(self) -> None:
        self._values = {}


Select = Callable[[tuple[str, ...]], "tuple[str, ...] | None"]
"""The labels of a view for those of its source; None for values that the view leaves out."""


class HistogramView(Histogram):
    """A histogram of the values of another one under other labels: each value is recorded once."""

    def __init__(
        self, name: str, help: str, labels: Sequence[str], source: Histogram, select: Select
    ) -> None:
        super().__init__(name, help, labels, source.bounds)
        self._source = source
        self._select = select

    def numbers(self) -> list[tuple[tuple[str, ...], list[float]]]:
        sums: dict[tuple[str, ...], list[float]] = {}
        for labels, numbers in self._source.numbers():
            if (selected := self._select(labels)) is not None:
                before = sums.get(selected) or [0.0] * len(numbers)
                sums[selected] = [*map(operator.add, before, numbers)]
        return list(sums.items())

    def clear(self) -> None:
        self._source.clear()


class Tally(Counter):
    """How many values a histogram has seen, as a counter under labels of its own.

    What happens without such a value is added, as to any counter.

    Args:
        source, select: see `HistogramView`.
    """

    def __init__(
        self, name: str, help: str, labels: Sequence[str], source: Histogram, select: Select
    ) -> None:
        super().__init__(name, help, labels)
        self._view = HistogramView(name, help, labels, source, select)

    def points(self) -> Iterator[Point]:
        counts = {labels: sum(numbers[:-1]) for labels, numbers in self._view.numbers()}
        for labels, (value,) in list(self._cells.items()):
            counts[labels] = counts.get(labels, 0) + value
        for labels, value in counts.items():
            yield Point(self.name, self._labelled(labels), value)

    def clear(self) -> None:
        super().clear()
        self._view.clear()


def render(metrics: Sequence[Metric], constant: dict[str, str] | None = None) -> str:
    """Metrics in Prometheus's text format (https://prometheus.io/docs/instrumenting/exposition_formats/)."""
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


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')

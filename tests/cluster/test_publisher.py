"""What is handed to Ray: growth of counters; and all gauges each time, as Ray forgets those not set."""

from typing import Any

import pytest

from gym_serve.cluster.serve_metrics import RayPublisher
from gym_serve.observe.metrics import Counter, Gauge, Histogram


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, float, dict[str, str]]]:
    """(kind, name, value, labels) of everything that Ray's metrics are told."""
    told: list[tuple[str, str, float, dict[str, str]]] = []

    class Series:
        def __init__(self, name: str, help: str, labels: tuple[str, ...]) -> None:
            self.name = name

        def inc(self, value: float, labels: dict[str, str]) -> None:
            told.append(("counter", self.name, value, labels))

        def set(self, value: float, labels: dict[str, str]) -> None:
            told.append(("gauge", self.name, value, labels))

    import ray.util.metrics

    monkeypatch.setattr(ray, "is_initialized", lambda: True)

    for kind in ("Counter", "Gauge"):
        monkeypatch.setattr(ray.util.metrics, kind, Series)
    return told


def test_counters_grow_and_gauges_are_set_again(handed: list[Any]) -> None:
    counter, gauge = Counter("n_total", "n", ("a",)), Gauge("g", "g")
    publisher = RayPublisher({"graph": "math"}, metrics=(counter, gauge))
    counter.add("x", value=3)
    gauge.set(value=8)
    publisher.publish()
    counter.add("x")
    publisher.publish()
    publisher.publish()
    counters = [(value, labels) for kind, _, value, labels in handed if kind == "counter"]
    assert counters == [(3, {"graph": "math", "a": "x"}), (1, {"graph": "math", "a": "x"})]
    assert [value for kind, _, value, _ in handed if kind == "gauge"] == [8, 8, 8]


def test_the_buckets_of_a_histogram_are_set_again(handed: list[Any]) -> None:
    histogram = Histogram("seconds", "s", bounds=(1.0,))
    publisher = RayPublisher({}, metrics=(histogram,))
    histogram.observe(value=0.5)
    publisher.publish()
    first = list(handed)
    publisher.publish()
    assert handed == first * 2
    assert len(first) == 4

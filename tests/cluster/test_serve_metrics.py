"""What Serve's own series get: the calls of a deployment, as they were."""

from collections.abc import Iterator

import pytest
from ray.serve._private import constants

from gym_serve.cluster.serve_compat import latency_bounds
from gym_serve.cluster.serve_metrics import rebucketed, serve_metrics
from gym_serve.observe import catalogue
from gym_serve.observe.cpu import CallMeter

APPLICATION, REPLICA = "math", "r1"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    for metric in catalogue.METRICS:
        metric.clear()
    yield
    for metric in catalogue.METRICS:
        metric.clear()


def published(deployment: str) -> dict[str, dict[tuple[str, ...], float]]:
    return {
        metric.name: {
            tuple(
                v for v in point.labels.values() if v not in (APPLICATION, deployment, REPLICA)
            ): point.value
            for point in metric.points()
        }
        for metric in serve_metrics(APPLICATION, deployment, REPLICA)
    }


def test_calls_and_errors_are_counted_by_operation() -> None:
    for status, count in {200: 5, 422: 2, 503: 1}.items():
        for _ in range(count):
            CallMeter("weather", "verify").record(status, 0.02)
    CallMeter("inline", "verify").record(500, 0.02)
    found = published("weather")
    assert found["serve_deployment_request_counter"] == {("verify",): 8}
    assert found["serve_deployment_error_counter"] == {("verify", "503"): 1}


def test_latencies_have_serves_buckets() -> None:
    for milliseconds in (0.5, 2, 20, 20, 200, 5_000_000):
        CallMeter("weather", "verify").record(200, milliseconds / 1000)
    buckets = published("weather")["serve_deployment_processing_latency_ms_bucket"]
    bounds = [float(bound) for _, bound in buckets]
    assert bounds == [*latency_bounds(), float("inf")]
    assert latency_bounds() == [float(b) for b in constants.REQUEST_LATENCY_BUCKETS_MS]
    counts = list(buckets.values())
    assert counts == sorted(counts)
    assert buckets["verify", "1.0"] == 1
    assert buckets["verify", "10.0"] == 2
    assert buckets["verify", "100.0"] == 4
    assert buckets["verify", "600000.0"] == 5
    assert buckets["verify", "+Inf"] == 6


def test_gauges_stand_beside_serves_own() -> None:
    catalogue.CALLS_RUNNING.set("weather", value=3)
    catalogue.CALLS_QUEUED.set("weather", value=7)
    catalogue.CALLS_QUEUED.set("inline", value=9)
    found = published("weather")
    assert found["serve_replica_processing_queries"] == {("gym_serve",): 3}
    assert found["serve_deployment_queued_queries"] == {("gym_serve",): 7}


def test_counts_between_two_bounds_are_interpolated() -> None:
    counts = [(1.0, 10.0), (3.0, 30.0), (10.0, 30.0)]
    assert list(rebucketed(counts, 35, [0.5, 1, 2, 3, 5, 10, 11])) == [5, 10, 20, 30, 30, 30, 35]
    assert list(rebucketed([], 2, [1.0])) == [2]


def test_labels_stand_in_serves_order() -> None:
    """Before OpenTelemetry, Ray takes the labels of a second metric of one name by their place."""
    CallMeter("weather", "verify").record(503, 0.02)
    catalogue.CALLS_QUEUED.set("weather", value=7)
    orders = {
        metric.name: tuple(next(iter(metric.points())).labels)
        for metric in serve_metrics(APPLICATION, "weather", REPLICA)
        if metric.name != "serve_replica_processing_queries"
    }
    serves = ("deployment", "replica", "application", "route")
    assert orders == {
        "serve_deployment_request_counter": serves,
        "serve_deployment_error_counter": (*serves, "exception_type"),
        "serve_deployment_processing_latency_ms_bucket": (*serves, "le"),
        "serve_deployment_queued_queries": ("deployment", "application", "handle", "actor_id"),
    }

"""What the metrics need of the libraries of Ray's node agent."""

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import CollectorRegistry

SERIES = 2_500


def test_the_agents_exporter_keeps_every_label_set() -> None:
    """Its classes, made as `ray._private.telemetry.open_telemetry_metric_recorder` makes them.

    Replicas come and go, and each has label sets of its own. An SDK that keeps only the first 2,000 of a
    metric would hide all later replicas of a long run (see opentelemetry-sdk in pyproject.toml).
    """

    def observed(options: CallbackOptions) -> list[Observation]:
        return [Observation(1, {"replica": f"r{number}"}) for number in range(SERIES)]

    registry = CollectorRegistry()
    provider = MeterProvider(metric_readers=[PrometheusMetricReader(registry=registry)])
    try:
        meter = provider.get_meter("ray")
        meter.create_observable_counter("ray_calls_total", [observed], unit="1")
        meter.create_observable_gauge("ray_sessions", [observed], unit="1")
        samples = [sample for family in registry.collect() for sample in family.samples]
    finally:
        provider.shutdown()
    for name in ("ray_calls_total", "ray_sessions"):
        assert len({s.labels.get("replica") for s in samples if s.name == name}) == SERIES

"""The numbers behind the metrics, and their text form as Prometheus's own parser reads it."""

import threading
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gym_serve.observe.catalogue import METRICS
from gym_serve.observe.metrics import Counter, Gauge, Histogram, HistogramView, Tally, render, settle


def samples_of(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_counters_gauges_and_histograms_render_as_prometheus_reads_them() -> None:
    calls = Counter("calls_total", "Calls.", ("server",))
    calls.add("math")
    calls.add("math", value=2)
    sessions = Gauge("sessions", "Sessions.", ())
    sessions.set(value=7)
    seconds = Histogram("call_seconds", "Durations.", ("server",), (1.0, 10.0))
    for value in (0.5, 1.0, 5.0, 50.0):
        seconds.observe("math", value=value)
    found = samples_of(render([calls, sessions, seconds], {"graph": "g"}))
    graph, math = ("graph", "g"), ("server", "math")
    assert found == {
        ("gym_serve_calls_total", (graph, math)): 3,
        ("gym_serve_sessions", (graph,)): 7,
        ("gym_serve_call_seconds_bucket", (graph, ("le", "1"), math)): 2,
        ("gym_serve_call_seconds_bucket", (graph, ("le", "10"), math)): 3,
        ("gym_serve_call_seconds_bucket", (graph, ("le", "+Inf"), math)): 4,
        ("gym_serve_call_seconds_sum", (graph, math)): 56.5,
        ("gym_serve_call_seconds_count", (graph, math)): 4,
    }


@given(st.lists(st.floats(0, 5000)), st.text())
def test_a_histogram_counts_every_value_once_and_labels_survive_any_text(
    values: list[float], label: str
) -> None:
    seconds = Histogram("s_seconds", "S.", ("what",))
    for value in values:
        seconds.observe(label, value=value)
    points = {(point.name, point.labels.get("le")): point.value for point in seconds.points()}
    if not values:
        assert points == {}
        return
    for bound in seconds.bounds:
        assert points["gym_serve_s_seconds_bucket", f"{bound:g}"] == sum(value <= bound for value in values)
    assert points["gym_serve_s_seconds_count", None] == len(values)
    assert points["gym_serve_s_seconds_sum", None] == sum(values)


def test_a_reader_in_another_thread_sees_every_value_once_while_others_are_recorded() -> None:
    seconds, total = Histogram("s_seconds", "S.", (), (0.5,)), 20_000
    values = seconds.values()
    ended, seen = threading.Event(), list[tuple[float, float]]()

    def read() -> None:
        while not ended.is_set():
            numbers = values.numbers()
            seen.append((sum(numbers[:-1]), numbers[-1]))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(total):
        values.add(number % 2)
    ended.set()
    reader.join()
    assert seconds.numbers() == [((), [total / 2, total / 2, total / 2])]
    assert seen == sorted(seen)  # nothing that was counted is missed for a moment
    assert all(below == count // 2 for count, below in seen)


def test_what_waits_is_counted_before_it_is_much() -> None:
    seconds = Histogram("s_seconds", "S.", (), (0.5,))
    values = seconds.values()
    waiting = list[int]()
    for number in range(3000):
        values.add(number % 2)
        if number % 100 == 0:
            settle()  # as a server does now and then
            waiting.append(len(values))
    assert max(waiting) < 256
    assert seconds.numbers() == [((), [1500, 1500, 1500])]


def test_the_catalogue_has_names_with_units_and_no_name_twice() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names)) > 10
    for metric in METRICS:
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert metric.help.endswith(".")
        assert {"graph", "replica"}.isdisjoint(metric.labels)


def test_a_view_has_the_values_of_its_source_under_other_labels() -> None:
    answers = Histogram("answers", "A.", ("server", "op", "status"), (1.0,))
    view = HistogramView("seconds", "S.", ("server",), answers, lambda labels: labels[:1])
    tally = Tally("ok_total", "O.", ("op",), answers, lambda at: at[1:2] if at[2] == "200" else None)
    for op, status, value in [("run", "200", 0.5), ("run", "500", 3.0), ("stop", "200", 0.25)]:
        answers.observe("a", op, status, value=value)
    assert {point.name + point.labels.get("le", ""): point.value for point in view.points()} == {
        "gym_serve_seconds_bucket1": 2,
        "gym_serve_seconds_bucket+Inf": 3,
        "gym_serve_seconds_sum": 3.75,
        "gym_serve_seconds_count": 3,
    }
    tally.add("stop", value=3)
    tally.add("never")
    assert [(point.labels, point.value) for point in tally.points()] == [
        ({"op": "run"}, 1),
        ({"op": "stop"}, 4),
        ({"op": "never"}, 1),
    ]


def test_the_number_of_what_is_no_more_is_removed() -> None:
    up = Gauge("up", "U.", ("endpoint",))
    up.set("a", value=1)
    up.set("b", value=0)
    up.remove("a")
    up.remove("never")
    assert [point.labels for point in up.points()] == [{"endpoint": "b"}]


def test_the_page_lists_all_metrics() -> None:
    page = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `gym_serve_")]
    assert rows == [
        f"| `{metric.name}` | {', '.join(f'`{label}`' for label in metric.labels)} | {metric.help} |"
        for metric in METRICS
    ]

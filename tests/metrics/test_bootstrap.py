"""The confidence interval against the central limit theorem, and its guarantees."""

from __future__ import annotations

import math
import random

import pytest

from gym_serve.metrics.bootstrap import MAX_CLUSTERS, Clusters, Figure


def _figure(values: list[float], scale: float = 1.0) -> Figure:
    clusters = Clusters(len(values))
    figure = Figure(clusters, scale)
    for position, value in enumerate(values):
        figure.add(clusters.of(position), value)
    return figure


@pytest.mark.parametrize("num_tasks", [60, 400, 5000])
def test_interval_of_a_share_is_near_the_normal_one(num_tasks: int) -> None:
    values = [float(i % 10 < 3) for i in range(num_tasks)]
    figure = _figure(values, scale=100.0)
    half_width = 1.96 * 100 * math.sqrt(0.3 * 0.7 / num_tasks)
    confidence = figure.confidence()
    assert figure.value == pytest.approx(30.0)
    assert confidence["num_tasks"] == num_tasks
    assert (confidence["high"] - confidence["low"]) / 2 == pytest.approx(half_width, rel=0.15)
    assert (confidence["high"] + confidence["low"]) / 2 == pytest.approx(30.0, abs=0.2 * half_width)


def test_rollouts_of_a_task_are_one_cluster() -> None:
    """Ten equal rollouts a task tell no more than one: the interval must not narrow."""
    clusters = Clusters(100)
    one, ten = Figure(clusters), Figure(clusters)
    for position in range(100):
        value = float(position % 2)
        one.add(clusters.of(position), value)
        ten.add(clusters.of(position), 10 * value, 10)
    assert ten.confidence() == one.confidence()


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = random.Random(3)
    covered = 0
    for _ in range(60):
        confidence = _figure([rng.gauss(5.0, 2.0) for _ in range(40)]).confidence()
        covered += confidence["low"] <= 5.0 <= confidence["high"]
    assert covered >= 51  # 95% of 60 is 57; fewer than 51 has a chance of about 1 in 500


def test_interval_is_reproducible() -> None:
    values = [random.Random(1).random() for _ in range(30)]
    assert _figure(values).confidence() == _figure(values).confidence()


def test_equal_tasks_have_an_interval_of_no_width() -> None:
    assert _figure([0.5] * 8, scale=100.0).confidence() == {"num_tasks": 8, "low": 50.0, "high": 50.0}


def test_one_task_has_no_interval() -> None:
    assert _figure([1.0]).confidence() == {"num_tasks": 1}


def test_tasks_are_dealt_evenly() -> None:
    num_tasks = 3 * MAX_CLUSTERS + 7
    clusters = Clusters(num_tasks)
    sizes = [0] * clusters.size
    for position in range(num_tasks):
        sizes[clusters.of(position)] += 1
    assert clusters.size == MAX_CLUSTERS
    assert set(sizes) == {3, 4}

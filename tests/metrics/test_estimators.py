"""Curves over k against brute force (every subset, every prefix), confidence intervals against the CLT."""

import math
import random
import statistics
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_serve.metrics.aggregator import mean_over_tasks
from gym_serve.metrics.estimators import (
    MAX_CLUSTERS,
    Clusters,
    Figure,
    average_curve,
    describe,
    majority_curve,
    pass_at_k,
    pass_curve,
    spread_curve,
    stdev,
)

binary = st.lists(st.sampled_from([0, 1, 0.0, 1.0]), min_size=1, max_size=8)
reals = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=12)
maybe_scores = st.lists(st.none() | st.integers(-4, 4).map(float), max_size=8)


@settings(deadline=None)
@given(binary)
def test_binary_pass_at_k_is_the_share_of_k_subsets_with_a_pass(scores: list[float]) -> None:
    curve = pass_curve(scores)
    assert len(curve) == len(scores)
    for k in range(1, len(scores) + 1):
        subsets = list(combinations(scores, k))
        assert curve[k - 1] == pytest.approx(sum(1 for s in subsets if any(s)) / len(subsets))


@settings(deadline=None)
@given(binary)
def test_binary_pass_at_k_starts_at_the_mean_and_never_falls(scores: list[float]) -> None:
    curve = pass_curve(scores)
    assert curve[0] == pytest.approx(statistics.fmean(scores))
    assert list(curve) == sorted(curve)
    assert curve[-1] == max(scores)


@settings(deadline=None)
@given(reals.filter(lambda scores: any(s not in (0, 1) for s in scores)))
def test_pass_at_k_of_other_scores_is_the_best_of_the_first_k(scores: list[float]) -> None:
    assert list(pass_curve(scores)) == [max(scores[:k]) for k in range(1, len(scores) + 1)]


@pytest.mark.parametrize("k", [0, -1, 3])
def test_pass_at_k_needs_k_rollouts(k: int) -> None:
    assert pass_at_k([0.0, 1.0], k) is None


def test_pass_at_k_of_a_large_group_is_exact_at_both_ends() -> None:
    scores = [1.0] + [0.0] * 1999
    assert pass_at_k(scores, 1) == pytest.approx(1 / 2000)
    assert pass_at_k(scores, 1000) == pytest.approx(0.5)
    assert pass_at_k(scores, 2000) == 1.0


@settings(deadline=None)
@given(maybe_scores, st.integers(0, 10))
def test_average_and_spread_take_the_first_k_that_have_a_score(
    scores: list[float | None], max_k: int
) -> None:
    averages, spreads = average_curve(scores, max_k), spread_curve(scores, max_k)
    assert len(averages) == len(spreads) == max_k
    for k in range(1, max_k + 1):
        first = [s for s in scores[:k] if s is not None]
        expected_average = statistics.fmean(first) if first else None
        expected_spread = statistics.stdev(first) if len(first) > 1 else None
        assert averages[k - 1] == pytest.approx(expected_average, abs=1e-12)
        assert spreads[k - 1] == pytest.approx(expected_spread, abs=1e-12)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([None, "a", "b", "c", 1]), st.sampled_from([0.0, 1.0])), max_size=8),
    st.integers(0, 10),
)
def test_majority_is_the_mean_score_of_the_most_common_votes(
    votes: list[tuple[object, float]], max_k: int
) -> None:
    curve = majority_curve(votes, max_k)
    assert len(curve) == max_k
    for k in range(1, max_k + 1):
        valid = [vote for vote in votes[:k] if vote[0] is not None]
        most = max((valid.count(vote) for vote in valid), default=0)
        winners = {vote for vote in valid if valid.count(vote) == most}
        expected = sum(score for _, score in winners) / len(winners) if winners else 0.0
        assert curve[k - 1] == pytest.approx(expected)


def test_majority_by_hand() -> None:
    votes = [("7", 0.0), ("5", 1.0), (None, 0.0), ("5", 1.0), ("7", 0.0), ("7", 0.0)]
    assert majority_curve(votes, 7) == [0.0, 0.5, 0.5, 1.0, 0.5, 0.0, 0.0]


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30))
def test_statistics_agree_with_the_standard_library(values: list[float]) -> None:
    stats = describe({"f": values}, len(values))
    assert stats == {
        "mean/f": pytest.approx(statistics.fmean(values), rel=1e-12, abs=1e-9),
        "max/f": max(values),
        "min/f": min(values),
        "median/f": pytest.approx(statistics.median(values)),
        "std/f": pytest.approx(statistics.stdev(values), rel=1e-9, abs=1e-7),
    }


@settings(deadline=None)
@given(st.floats(-1e9, 1e9), st.integers(2, 40))
def test_equal_values_have_no_spread_at_all(value: float, count: int) -> None:
    assert stdev([value] * count) <= 1e-22 * abs(value)
    assert describe({"f": [value] * count}, count)["median/f"] == value


def test_std_of_one_value_depends_on_how_many_rollouts_there_are() -> None:
    assert describe({"f": [3.0]}, 1)["std/f"] == 0.0
    assert "std/f" not in describe({"f": [3.0]}, 2)
    assert math.isclose(describe({"f": [3.0, 5.0]}, 9)["std/f"], math.sqrt(2))


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
    expected = {"num_tasks": 8, "low": 50.0, "high": 50.0, "method": "bootstrap"}
    assert _figure([0.5] * 8, scale=100.0).confidence() == expected


@pytest.mark.parametrize(
    ("rewards", "low", "high"),
    [
        # Of one rollout a task: Wilson's interval of so many trials.
        ([[1]] * 10, 0.722467, 1.0),
        ([[0]] * 10, 0.0, 0.277533),
        ([[1]] * 7 + [[0]] * 3, 0.396778, 0.892209),
        # Rollouts of a task that always agree are as good as one.
        ([[1, 1, 1, 1]] * 10, 0.722467, 1.0),
        ([[1, 1, 1, 1]] * 7 + [[0, 0, 0, 0]] * 3, 0.396778, 0.892209),
        # Those that agree no more than chance are as good as so many tasks.
        ([[1, 0]] * 10, 0.299298, 0.700702),
    ],
)
def test_shares_have_wilsons_interval(rewards: list[list[int]], low: float, high: float) -> None:
    values = [[float(reward) for reward in of_task] for of_task in rewards]
    found = mean_over_tasks(values, binary=True).confidence()
    assert (found["low"], found["high"]) == (pytest.approx(low, abs=1e-6), pytest.approx(high, abs=1e-6))
    assert (found["num_tasks"], found["method"]) == (10, "wilson")


@pytest.mark.parametrize(("repeats", "alike"), [(1, 0.0), (4, 0.0), (4, 0.7), (8, 1.0)])
def test_wilsons_interval_covers_the_truth_however_alike_the_rollouts_of_a_task_are(
    repeats: int, alike: float
) -> None:
    rng = random.Random(5)
    covered = 0
    for _ in range(300):
        tasks = [float(rng.random() < 0.9) for _ in range(40)]
        values = [
            [of if rng.random() < alike else float(rng.random() < 0.9) for _ in range(repeats)]
            for of in tasks
        ]
        found = mean_over_tasks(values, binary=True).confidence()
        covered += found["low"] <= 0.9 <= found["high"]
    assert covered >= 270  # 95% of 300 is 285


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

"""An overloaded graph slows a run down; nothing is dropped, and no rollout pays for it with an attempt."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rollouts import JSON, rows, scored

from gym_serve.rollouts import Backoff, Expansion, RunnerOptions, expand, jobs_of, stream
from gym_serve.rollouts.scheduling import Failure, Job, Pace, Scheduler
from gym_serve.types.errors import Overloaded, VerifierFailed
from gym_serve.types.rows import failed_rollout

PUSHED = Failure(retryable=True, overloaded=True)


@settings(deadline=None)
@given(
    ceiling=st.integers(1, 5000),
    events=st.lists(st.tuples(st.booleans(), st.floats(0, 10), st.floats(0, 10)), max_size=200),
)
def test_places_stay_between_one_and_the_ceiling(
    ceiling: int, events: list[tuple[bool, float, float]]
) -> None:
    pace, now = Pace(ceiling), 0.0
    assert pace.places == ceiling
    for overloaded, passed, took in events:
        now += passed
        before = pace.places
        if overloaded:
            pace.overloaded(now - took, now)
            assert pace.places <= before
        else:
            pace.answered()
            assert pace.places >= before
        assert 1 <= pace.places <= ceiling


@settings(deadline=None)
@given(burst=st.integers(1, 300), ceiling=st.integers(2, 1000))
def test_a_burst_of_refusals_halves_once(burst: int, ceiling: int) -> None:
    pace = Pace(ceiling)
    for number in range(burst):
        pace.overloaded(started=0.0, now=1.0 + number / 1000)
    assert pace.places == ceiling // 2


@settings(deadline=None)
@given(ceiling=st.integers(1, 1000))
def test_it_comes_back_in_a_few_rounds(ceiling: int) -> None:
    pace = Pace(ceiling)
    for round in range(20):
        pace.overloaded(float(round), float(round))
    assert pace.places == 1
    rounds = 0
    while pace.places < ceiling:
        for _ in range(pace.places):
            pace.answered()
        rounds += 1
    assert rounds <= 45


def test_a_job_that_is_pushed_back_keeps_its_attempts() -> None:
    scheduler = Scheduler(4, 1, Backoff(first=1.0, largest=8.0, spread=lambda: 1.0), patience=30.0)
    scheduler.add(Job(0, 0, {}))
    now, waits = 0.0, []
    while True:
        assert scheduler.start(now) is not None
        if (verdict := scheduler.finish(0, 0, now, PUSHED)) != "again":
            break
        waits.append(scheduler.next_due() - now)
        now = scheduler.next_due()
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0, 7.0]  # until its patience of 30 s is over
    assert verdict == "open"
    assert scheduler.open == 0


def test_what_the_server_asks_for_is_waited_for() -> None:
    scheduler = Scheduler(4, 3, Backoff(first=1.0, spread=lambda: 1.0), patience=30.0)
    scheduler.add(Job(0, 0, {}))
    scheduler.start(0.0)
    asked = Failure(retryable=True, overloaded=True, retry_after=12.0)
    assert scheduler.finish(0, 0, 0.0, asked) == "again"
    assert scheduler.next_due() == scheduler.waits_until(0.0) == 12.0
    scheduler.start(12.0)
    assert scheduler.waits_until(12.0) is None
    assert scheduler.finish(0, 0, 12.0, replace(asked, retry_after=18.5)) == "open"
    assert (scheduler.open, scheduler.waits_until(12.0)) == (0, None)


@pytest.mark.parametrize("as_value", [False, True])
@pytest.mark.parametrize("attempts", [1, 3])
async def test_the_run_slows_down_to_what_the_graph_takes(as_value: bool, attempts: int) -> None:
    """It takes 6 at a time and refuses all others at once."""
    running, most, refused = 0, 0, 0
    tries: Counter[str] = Counter()

    async def busy(row: JSON) -> JSON:
        nonlocal running, most, refused
        tries[row["_ng_rollout_id"]] += 1
        await asyncio.sleep(0)
        if running >= 6:
            refused += 1
            error = Overloaded("too many", retry_after=0.001)
            if as_value:
                return failed_rollout(row, error)
            raise error
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        running -= 1
        return scored(row)

    backoff = Backoff(first=0.002, largest=0.02)
    options = RunnerOptions(concurrency=64, attempts=attempts, backoff=backoff)
    jobs = jobs_of(expand(rows(300), Expansion(), problem=pytest.fail))
    found = [rollout async for _, rollout in stream(jobs, busy, options)]
    assert len(found) == 300
    assert all("failure" not in rollout for rollout in found)
    assert {rollout["_ng_rollout_id"] for rollout in found} == {f"{n}-0" for n in range(300)}
    assert most == 6
    assert 0 < refused < 300 * 5


async def test_another_failure_is_an_attempt_as_ever() -> None:
    ran = 0

    async def broken(row: JSON) -> JSON:
        nonlocal ran
        ran += 1
        raise VerifierFailed("no judge")

    options = RunnerOptions(concurrency=8, attempts=3, backoff=Backoff(first=0.0))
    jobs = jobs_of(expand(rows(5), Expansion(), problem=pytest.fail))
    assert len([pair async for pair in stream(jobs, broken, options)]) == 5
    assert ran == 15

"""While the graph is away, attempts are not used up; when it stays away, the run still ends."""

import asyncio
import time

import pytest
from support.rollouts import JSON, rows, scored

from gym_serve.rollouts import Backoff, Expansion, RunnerOptions, expand, jobs_of, stream
from gym_serve.rollouts.scheduling import Outage
from gym_serve.types.errors import Unavailable, VerifierFailed

BACKOFF = Backoff(first=1.0, largest=8.0, spread=lambda: 1.0)


def away(concurrency: int = 4) -> Outage:
    """An outage that was noticed at the time 10, with a pause of a second."""
    outage = Outage(concurrency, BACKOFF)
    for _ in range(max(4, concurrency)):
        assert outage.places(10.0) == concurrency
        outage.unavailable(started=9.0, now=10.0, jobs=100)
    return outage


def test_a_pause_then_one_probe_at_a_time() -> None:
    outage = away()
    assert (outage.until, outage.places(10.9), outage.places(11.0)) == (11.0, 0, 1)
    assert outage.unavailable(started=9.5, now=11.2, jobs=100) == "attempt"  # it had started before
    assert outage.until == 11.0
    assert outage.unavailable(started=11.0, now=11.5, jobs=100) == "probe"
    assert (outage.until, outage.places(13.4), outage.places(13.5)) == (13.5, 0, 1)
    outage.answered()
    assert (outage.until, outage.places(13.4)) == (None, 4)


def test_one_answer_in_between_is_no_outage() -> None:
    outage = Outage(4, BACKOFF)
    for _ in range(10):
        for _ in range(3):
            outage.unavailable(started=0.0, now=0.0, jobs=100)
        outage.answered()
    assert outage.places(0.0) == 4


def test_patience_ends() -> None:
    outage = away(concurrency=20)
    probes = 0
    while outage.places(outage.until or 0.0) == 1:
        assert outage.until is not None
        outage.unavailable(started=outage.until, now=outage.until, jobs=100)
        probes += 1
    assert probes == 8
    assert outage.places(0.0) == 20
    assert outage.unavailable(started=300.0, now=300.0, jobs=100) == "away"
    assert (outage.until or 0.0) < 10 + 200


async def run_through(run: object, count: int, concurrency: int = 8) -> list[JSON]:
    options = RunnerOptions(
        concurrency=concurrency, attempts=3, backoff=Backoff(first=0.02, largest=0.05, spread=lambda: 1.0)
    )
    jobs = jobs_of(expand(rows(count), Expansion(), problem=pytest.fail))
    return [rollout async for _, rollout in stream(jobs, run, options)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "concurrency", "most"), [(200, 8, 40), (30, 128, 60), (2, 8, 15), (1, 8, 15)]
)
async def test_no_rollout_is_lost_while_the_graph_restarts(count: int, concurrency: int, most: int) -> None:
    """It is away for longer than three attempts take; small runs wait as large ones do."""
    back = time.monotonic() + 0.15
    refused = 0

    async def restarting(row: JSON) -> JSON:
        nonlocal refused
        await asyncio.sleep(0)
        if time.monotonic() < back:
            refused += 1
            raise Unavailable("connection refused")
        return scored(row)

    found = await run_through(restarting, count, concurrency)
    assert len(found) == count
    assert all("failure" not in rollout for rollout in found)
    assert refused < most


async def test_with_one_attempt_each_nothing_is_held_back() -> None:
    async def never(row: JSON) -> JSON:
        raise Unavailable("gone")

    options = RunnerOptions(concurrency=8, attempts=1, backoff=Backoff(first=1e6))
    jobs = jobs_of(expand(rows(40), Expansion(), problem=pytest.fail))
    assert len([pair async for pair in stream(jobs, never, options)]) == 40


async def test_a_verifier_that_fails_for_good_is_no_outage() -> None:
    async def never(row: JSON) -> JSON:
        raise VerifierFailed("no judge")

    found = await run_through(never, 40)
    assert len(found) == 40
    assert all(rollout["failure"]["detail"] == "no judge" for rollout in found)

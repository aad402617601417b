"""What groups use: rollouts and comparisons count, and a spent budget ends the run at a good place."""

import asyncio
from typing import Any

import pytest
from support.rollouts import AT_ONCE, JSON, rows

from gym_serve.rollouts import (
    Budget,
    Expansion,
    Group,
    GroupOptions,
    RunnerOptions,
    Spending,
    expand,
    groups,
    jobs_of,
)
from gym_serve.servers.usage import USAGE_FIELD, Prices, UsageMeter
from gym_serve.types.errors import Unavailable

PRICES = {"policy": Prices(input=1.0, output=1.0), "genrm": Prices(input=10.0, output=10.0)}


async def run(row: JSON) -> JSON:
    """An episode of 100 tokens."""
    meter = UsageMeter()
    meter.record("model", "policy", {"input_tokens": 90, "output_tokens": 10})
    return {**row, "response": {"output": []}, "reward": 1.0, USAGE_FIELD: meter.to_json()}


class GenRM:
    """Comparisons of 10 tokens; the first ``failing`` ones fail after they have used them."""

    def __init__(self, failing: int = 0) -> None:
        self.failing = failing
        self.calls = 0

    async def __call__(self, row: JSON, body: JSON, meter: UsageMeter) -> JSON:
        self.calls += 1
        meter.record("compare", "genrm", {"input_tokens": 9, "output_tokens": 1})
        if self.calls <= self.failing:
            raise Unavailable("busy")
        return {"rewards": [0.5] * len(body["response_objs"])}


async def grouped(
    count: int, spending: Spending, compare: Any = None, concurrency: int = 2, **options: Any
) -> list[Group]:
    wanted = GroupOptions(**options)
    runner_options = RunnerOptions(concurrency, attempts=3, backoff=AT_ONCE)
    expanded = expand(rows(count), Expansion(repeats=wanted.size + wanted.oversample), problem=pytest.fail)
    return [
        group
        async for group in groups(jobs_of(expanded), run, wanted, runner_options, compare, spending=spending)
    ]


async def test_rollouts_and_comparisons_count() -> None:
    spending = Spending(PRICES)
    await grouped(3, spending, GenRM(failing=2), size=2)
    spent = spending.spent()
    assert (spent.usage["model"]["policy"]["calls"], spent.usage["compare"]["genrm"]["calls"]) == (6, 5)
    assert spent.tokens == 6 * 100 + 5 * 10
    assert spent.cost == pytest.approx((600 * 1.0 + 50 * 10.0) / 1e6)


@pytest.mark.parametrize("budget", [Budget(max_tokens=400), Budget(max_tokens=330), Budget(max_cost=500e-6)])
async def test_a_spent_budget_ends_the_run_with_whole_groups(budget: Budget) -> None:
    genrm, spending = GenRM(), Spending(PRICES, budget)
    found = await grouped(20, spending, genrm, size=2)
    assert spending.exhausted
    assert 2 <= len(found) <= 4
    assert all(group.usable and len(group.rollouts) == 2 for group in found)
    assert all(group.comparison is not None for group in found)
    assert genrm.calls == len(found)
    assert spending.spent().tokens == 210 * len(found)
    assert await grouped(20, spending, genrm, size=2) == []  # one budget for many calls


async def test_comparisons_alone_can_spend_a_budget() -> None:
    spending = Spending(PRICES, Budget(max_cost=700e-6))  # 3 rollouts cost as much as a comparison does
    found = await grouped(20, spending, GenRM(), size=2, concurrency=1)
    assert 2 <= len(found) <= 3


async def test_a_group_that_can_no_longer_be_filled_says_so() -> None:
    spending = Spending(PRICES, Budget(max_tokens=100))
    (group,) = await grouped(20, spending, GenRM(), size=4, concurrency=1)
    assert not group.usable
    assert group.comparison is None
    assert group.reason == "1 of 4 rollouts: 3 not started because the run ended"
    (group,) = await grouped(20, Spending(PRICES, Budget(max_tokens=100)), size=4, quorum=1, concurrency=1)
    assert group.usable


async def test_what_runs_for_a_group_out_of_reach_is_cancelled() -> None:
    cancelled = asyncio.Event()
    spending = Spending(PRICES, Budget(max_tokens=100))

    async def second_hangs(row: JSON) -> JSON:
        if row["_ng_rollout_index"] == 1:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
        return await run(row)

    jobs = jobs_of(expand(rows(5), Expansion(repeats=3), problem=pytest.fail))
    settled = groups(jobs, second_hangs, GroupOptions(3), RunnerOptions(2), spending=spending)
    (group,) = [group async for group in settled]
    assert cancelled.is_set()
    assert (
        group.reason
        == "1 of 3 rollouts: 1 not started because the run ended; 1 cancelled because 3 could not be reached"
    )

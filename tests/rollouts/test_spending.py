"""What runs use and cost: counts by stage and server, and budgets that stop a run and let it go on."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.rollouts import FakeBackend

from gym_serve.rollouts import Budget, Collection, Report, RunnerOptions, collect, prices_of
from gym_serve.rollouts.files import read_records
from gym_serve.servers.usage import COUNTS, USAGE_FIELD, Prices, UsageMeter, metering, record_answer
from gym_serve.types.errors import InvalidRequest, Unavailable, VerifierFailed
from gym_serve.view.view import View

PRICES = {"policy": Prices(input=2.0, cached_input=0.5, output=10.0), "judge": Prices(input=1.0, output=4.0)}
USED = {
    "model": {
        "policy": {
            "calls": 2,
            "unreported": 0,
            "input_tokens": 1000,
            "cached_tokens": 400,
            "output_tokens": 100,
        }
    },
    "verify": {
        "judge": {"calls": 1, "unreported": 0, "input_tokens": 200, "cached_tokens": 0, "output_tokens": 50}
    },
}
TOKENS = 1350
COST = (600 * 2.0 + 400 * 0.5 + 100 * 10.0 + 200 * 1.0 + 50 * 4.0) / 1e6


async def run(row: dict[str, Any]) -> dict[str, Any]:
    if row.get("fails") and row["_ng_attempt_index"] == 0:
        raise Unavailable("down")
    return {**row, "reward": 1.0, USAGE_FIELD: USED}


async def collected(folder: Path, rows: int, budget: Budget | None = None, **options: Any) -> Report:
    collection = Collection(
        FakeBackend(options.pop("run", run), costs=options.pop("prices", PRICES)),
        options=RunnerOptions(concurrency=1, attempts=3),
        budget=budget or Budget(),
    )
    given_ = [{"responses_create_params": {"input": str(n)}, "agent_ref": {"name": "a"}} for n in range(rows)]
    return await collect(given_, folder / "out.jsonl", collection, **options)


def cost_in_the_viewer(folder: Path) -> Any:
    """By the prices in the header of the run."""
    with View([folder / "out.jsonl"], folder / "cache") as view:
        view.index()
        return view.summary()["runs"][0]["cost"]


async def test_a_run_tells_what_it_used_and_cost(tmp_path: Path) -> None:
    report = await collected(tmp_path, 3)
    assert cost_in_the_viewer(tmp_path)["total"] == pytest.approx(3 * COST)
    assert report.complete
    assert report.exhausted is None
    assert report.spent.tokens == 3 * TOKENS
    assert report.spent.cost == pytest.approx(3 * COST)
    rows = [(stage, server, counts["calls"], cost) for stage, server, counts, cost in report.spent.rows()]
    assert rows == [
        ("model", "policy", 6, pytest.approx(3 * 2400 / 1e6)),
        ("verify", "judge", 3, pytest.approx(3 * 400 / 1e6)),
    ]
    (metrics,) = report.metrics
    assert metrics[USAGE_FIELD]["verify"]["judge"]["input_tokens"] == 600


@pytest.mark.parametrize(
    "budget",
    [Budget(max_tokens=2 * TOKENS), Budget(max_cost=1.5 * COST), Budget(max_cost=2.0 * COST - 1e-12)],
)
async def test_a_budget_stops_a_run_and_a_higher_one_goes_on(tmp_path: Path, budget: Budget) -> None:
    report = await collected(tmp_path, 5, budget)
    assert not report.complete
    assert report.exhausted
    assert report.progress.scored == 2
    again = await collected(tmp_path, 5, budget, resume=True)  # what was spent before counts
    assert (again.progress.scored, again.exhausted) == (2, report.exhausted)
    report = await collected(tmp_path, 5, Budget(max_tokens=100 * TOKENS), resume=True)
    assert report.complete
    assert report.exhausted is None
    assert report.spent.tokens == 5 * TOKENS
    assert len(list(read_records(tmp_path / "out.jsonl"))) == 5


async def test_the_time_of_a_run_may_be_over(tmp_path: Path) -> None:
    report = await collected(tmp_path, 5, Budget(max_seconds=1e-9))
    assert (report.complete, report.progress.scored) == (False, 0)
    assert report.exhausted == "the run has lasted 1e-09 seconds, which is the most it may"
    report = await collected(tmp_path, 5, Budget(max_seconds=600), resume=True)
    assert report.complete


async def test_the_time_ends_a_run_that_waits(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def slow(row: dict[str, Any]) -> dict[str, Any]:
        begun.set()
        await asyncio.sleep(0.3)
        return {**row, "reward": 1.0, "response": {"output": []}}

    report = await collected(tmp_path, 200, Budget(max_seconds=0.2), run=slow)
    assert begun.is_set()
    assert not report.complete
    assert report.exhausted


async def test_the_last_rollout_may_use_up_the_budget(tmp_path: Path) -> None:
    report = await collected(tmp_path, 2, Budget(max_tokens=2 * TOKENS))
    assert report.complete
    assert report.exhausted is None


async def test_failed_attempts_count(tmp_path: Path) -> None:
    async def failing(row: dict[str, Any]) -> dict[str, Any]:
        from gym_serve.types.rows import failed_rollout

        return {**failed_rollout(row, VerifierFailed("down", stage="verify")), USAGE_FIELD: USED}

    report = await collected(tmp_path, 1, run=failing)
    assert report.spent.tokens == 3 * TOKENS
    seen = cost_in_the_viewer(tmp_path)
    assert (seen["total"], seen["per_solved_task"]) == (pytest.approx(3 * COST), None)


async def test_an_agent_that_tells_no_servers_counts_by_its_response(tmp_path: Path) -> None:
    async def foreign(row: dict[str, Any]) -> dict[str, Any]:
        return {
            **row,
            "reward": 1.0,
            "response": {"output": [], "usage": {"input_tokens": 7, "output_tokens": 3}},
        }

    report = await collected(tmp_path, 2, Budget(max_tokens=20), run=foreign)
    assert report.spent.tokens == 20
    assert report.spent.cost == 0.0


@pytest.mark.parametrize(
    "budget",
    [Budget(max_cost=1.0), Budget(max_tokens=0), Budget(max_cost=float("nan")), Budget(max_seconds=-1.0)],
)
async def test_budgets_that_cannot_be_kept(tmp_path: Path, budget: Budget) -> None:
    with pytest.raises(InvalidRequest, match=r"`max_(cost|tokens|seconds)`"):
        await collected(tmp_path, 1, budget, prices={})
    assert not (tmp_path / "out.jsonl").exists()


def test_prices_of_a_graph() -> None:
    price = {"input": 1.0, "cached_input": None, "output": 2.0}
    models = {
        "policy": {"type": "x", "prices": price},
        "free": {"type": "x", "prices": None},
        "away": {"type": "http"},
    }
    assert prices_of({"models": models}) == {"policy": Prices(input=1.0, output=2.0)}
    assert prices_of({}) == {}


def test_models_are_counted_where_they_are_called() -> None:
    meter = UsageMeter()
    record_answer(
        "policy", {}, {"usage": {"input_tokens": 1, "output_tokens": 1}}, 0.0, None
    )  # nobody counts
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    with metering(meter, "model"):
        record_answer("policy", {}, {"usage": usage}, 0.0, None)
        record_answer("policy", {}, "no object", 0.0, None)
    assert meter.to_json() == {
        "model": {
            "policy": {"calls": 2, "unreported": 1, "input_tokens": 5, "cached_tokens": 4, "output_tokens": 2}
        }
    }


json_values = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.dictionaries(st.sampled_from(["model", "policy", *COUNTS]), inner, max_size=3),
    max_leaves=8,
)


@given(json_values, json_values)
def test_no_foreign_usage_breaks_a_meter(merged: Any, usage: Any) -> None:
    meter = UsageMeter()
    meter.merge(merged)
    meter.record("model", "policy", usage)
    for _, server, counts in meter:
        assert all(type(count) is int and count >= 0 for count in counts.values())
        assert PRICES.get(server, PRICES["judge"]).cost(counts) >= 0


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xy"), st.integers(0, 99), st.integers(0, 99)))
)
def test_merged_meters_count_as_one(calls: list[tuple[str, str, int, int]]) -> None:
    whole, merged = UsageMeter(), UsageMeter()
    for stage, server, given_, made in calls:
        part = UsageMeter()
        for meter in (whole, part):
            meter.record(stage, server, {"input_tokens": given_, "output_tokens": made})
        merged.merge(part.to_json())
    assert merged.to_json() == whole.to_json()

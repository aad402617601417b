"""What only the operator can mend ends a run and burns no row; failed rollouts can be made again."""

import asyncio
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rollouts import (
    AT_ONCE,
    JSON,
    FakeAgent,
    collection,
    keys,
    read_jsonl,
    row,
    rows,
    scored,
    with_backend,
)

from gym_serve.rollouts import (
    Expansion,
    GroupOptions,
    Progress,
    Report,
    RunnerOptions,
    collect,
    expand,
    groups,
    jobs_of,
    merge,
    stream,
)
from gym_serve.rollouts.scheduling import OperatorErrors
from gym_serve.types.errors import (
    BadRequest,
    EndpointAccessDenied,
    EndpointMisconfigured,
    GymError,
    InvalidRequest,
    OperatorError,
    Unauthorized,
    Unavailable,
    VerifierFailed,
)
from gym_serve.types.rows import failed_rollout, operator_error

REFUSED = EndpointAccessDenied("https://api/v1: HTTP 401: expired", server="policy", stage="model")
NOWHERE = EndpointMisconfigured("https://api/v1: HTTP 404: no such model", server="policy", stage="model")


def options(**given: Any) -> RunnerOptions:
    return RunnerOptions(backoff=AT_ONCE, **given)


class Endpoint:
    """Fails from one call on, until it is mended."""

    def __init__(self, error: GymError, after: int, *, as_value: bool = True) -> None:
        self.calls = 0
        self.mended = False
        self._error = error
        self._after = after
        self._as_value = as_value

    async def __call__(self, row: JSON) -> JSON:
        await asyncio.sleep(0)
        self.calls += 1
        if self.mended or self.calls <= self._after:
            return scored(row)
        if self._as_value:
            return failed_rollout(row, self._error)
        raise self._error


def test_when_a_run_ends() -> None:
    errors = OperatorErrors(3)
    for _ in range(2):
        errors.add(NOWHERE)
    errors.scored()
    for _ in range(2):
        errors.add(NOWHERE)
    assert errors.fatal is None
    errors.add(NOWHERE)
    assert errors.fatal is NOWHERE
    for error in (REFUSED, Unauthorized("token")):
        errors = OperatorErrors(3)
        errors.add(error)
        assert (errors.fatal, errors.last) == (error, error)


def test_the_error_of_a_rollout() -> None:
    for error in (REFUSED, NOWHERE, Unauthorized("token"), OperatorError("x", server="a", stage="seed")):
        found = operator_error(failed_rollout(row(0), error))
        assert found is not None
        assert (type(found), found.message) == (type(error), error.message)
        assert (found.server, found.stage) == (error.server, error.stage or "episode")
    assert operator_error(failed_rollout(row(0), BadRequest("x"))) is None
    assert operator_error(scored(row(0))) is None
    assert operator_error({"_ng_failure_class": "endpoint_access_denied", "failure": [1]}) is not None
    assert operator_error({"_ng_failure_class": ["x"]}) is None


@pytest.mark.parametrize("as_value", [True, False])
@pytest.mark.parametrize(("error", "in_a_row"), [(REFUSED, 1), (NOWHERE, 3)])
async def test_a_run_that_stops_and_goes_on(
    tmp_path: Path, error: GymError, in_a_row: int, as_value: bool
) -> None:
    endpoint = Endpoint(error, 20, as_value=as_value)
    told: list[Progress] = []
    work = collection(endpoint, concurrency=4)
    runner_options = options(concurrency=4, attempts=3, max_failures=3)
    work = replace(work, options=runner_options)
    report = await collect(rows(100), tmp_path / "out.jsonl", work, progress=told.append)
    assert not report.complete
    assert type(report.operator_error) is type(error)
    assert report.operator_error.message == error.message
    assert told[-1].stopping == error.message
    assert (report.progress.scored, report.progress.failed, report.progress.remaining) == (20, 0, 80)
    assert 20 + in_a_row <= endpoint.calls <= 20 + in_a_row + 4  # what ran could end
    assert len(read_jsonl(tmp_path / "out.jsonl")) == 20
    assert read_jsonl(tmp_path / "out_failures.jsonl") == []
    again = await collect(rows(100), tmp_path / "out.jsonl", work, resume=True)  # not mended yet
    assert (again.progress.scored, again.progress.remaining) == (20, 80)
    endpoint.mended = True
    report = await collect(rows(100), tmp_path / "out.jsonl", work, resume=True)
    assert report.complete
    assert report.operator_error is None
    assert keys(read_jsonl(tmp_path / "out.jsonl")) == [(task, 0) for task in range(100)]
    assert not any("_ng_attempt_index" in rollout for rollout in read_jsonl(tmp_path / "out.jsonl"))


async def test_one_wrong_agent_of_several_leaves_its_rows_open(tmp_path: Path) -> None:
    """The others are scored in between, so the run goes on to its end."""
    agent = FakeAgent(errors={(task, 0): [NOWHERE] for task in range(0, 40, 4)})
    work = collection(agent, concurrency=2)
    report = await collect(rows(40), tmp_path / "out.jsonl", work)
    assert (report.progress.scored, report.progress.remaining, report.complete) == (30, 10, False)
    assert isinstance(report.operator_error, EndpointMisconfigured)
    report = await collect(rows(40), tmp_path / "out.jsonl", work, resume=True)
    assert report.complete
    assert report.progress.scored == 40


async def test_what_an_open_rollout_used_counts_for_the_budget(tmp_path: Path) -> None:
    async def run(row: JSON) -> JSON:
        usage = {"model": {"policy": {"calls": 1, "input_tokens": 7, "output_tokens": 2}}}
        return {**failed_rollout(row, REFUSED), "model_usage": usage}

    report = await collect(rows(1), tmp_path / "out.jsonl", collection(run))
    assert report.spent.tokens == 9


@pytest.mark.parametrize("order", ["completion", "row"])
async def test_an_iteration_raises(order: Any) -> None:
    endpoint = Endpoint(REFUSED, 6)
    found = []
    expanded = expand(rows(50), Expansion(), problem=pytest.fail)

    async def draw() -> None:
        async for _, rollout in stream(jobs_of(expanded), endpoint, options(concurrency=2), order):
            found.append(rollout)

    with pytest.raises(EndpointAccessDenied, match="expired") as caught:
        await draw()
    assert (caught.value.server, caught.value.stage) == ("policy", "model")
    assert keys(r for r in found if "failure" not in r) == [(task, 0) for task in range(6)]
    assert endpoint.calls <= 8


async def test_an_iteration_takes_a_few_that_may_pass() -> None:
    agent = FakeAgent(errors={(task, 0): [NOWHERE] for task in (3, 4, 8, 9)})
    expanded = expand(rows(12), Expansion(), problem=pytest.fail)
    run = stream(jobs_of(expanded), agent, options(concurrency=1, max_failures=3))
    found = [rollout async for _, rollout in run]
    failures = [r for r in found if "failure" in r]
    assert [r["number"] for r in failures] == [3, 4, 8, 9]
    assert all(r["mask_sample"] for r in failures)
    assert len(found) == 12


async def test_groups_raise() -> None:
    endpoint = Endpoint(NOWHERE, 8)
    expanded = expand(rows(50), Expansion(repeats=2), problem=pytest.fail)
    found = []

    async def draw() -> None:
        async for group in groups(jobs_of(expanded), endpoint, GroupOptions(2), options(concurrency=2)):
            found.append(group)

    with pytest.raises(EndpointMisconfigured):
        await draw()
    assert [group.usable for group in found[:4]] == [True] * 4


async def test_groups_raise_what_a_comparison_meets() -> None:
    async def compare(row: JSON, body: JSON, meter: Any) -> JSON | None:
        raise REFUSED

    expanded = expand(rows(50), Expansion(repeats=2), problem=pytest.fail)
    run = groups(jobs_of(expanded), FakeAgent(), GroupOptions(2), options(concurrency=2), compare)
    with pytest.raises(EndpointAccessDenied):
        await anext(run)


async def test_comparisons_that_are_refused_are_made_later(tmp_path: Path) -> None:
    asked = 0
    refused = True

    async def compare(row: JSON, body: JSON, meter: Any) -> JSON | None:
        nonlocal asked
        asked += 1
        if refused:
            raise REFUSED
        return {"rewards": [0.25] * len(body["response_objs"])}

    async def comparing() -> Any:
        return compare

    work = collection(FakeAgent(), repeats=2, concurrency=1)
    work = with_backend(work, comparing=comparing)
    report = await collect(rows(10), tmp_path / "out.jsonl", work)
    assert isinstance(report.operator_error, EndpointAccessDenied)
    assert (report.complete, report.progress.remaining, asked) == (False, 0, 1)
    refused = False
    report = await collect(rows(10), tmp_path / "out.jsonl", work, resume=True)
    assert (report.complete, asked) == (True, 11)
    assert {rollout["reward"] for rollout in read_jsonl(tmp_path / "out.jsonl")} == {0.25}


@pytest.mark.parametrize("name", ["max_failures", "attempts", "concurrency"])
def test_a_limit_below_one_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"`{name}` must be at least 1, got 0"):
        RunnerOptions(**{name: 0})


async def test_failed_rollouts_are_made_again(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    errors: dict[tuple[int, int], list[GymError]] = {
        (1, 0): [Unavailable("gone")] * 5,
        (2, 0): [BadRequest("never")] * 2,
        (3, 0): [Unavailable("gone")],
        (4, 0): [BadRequest("never")],
    }
    agent = FakeAgent(errors=errors)
    work = collection(agent)
    report = await collect(rows(6), output, work)
    assert (report.progress.scored, report.progress.failed) == (3, 3)
    report = await collect(rows(6), output, work, resume=True)
    assert len(agent.ran) == 1 + 3 + 1 + 2 + 1 + 1  # nothing was left to do
    report = await collect(rows(6), output, work, retry_failed=True)
    assert (report.complete, report.progress.scored, report.progress.failed) == (True, 5, 1)
    assert report.progress.earlier == 3
    assert [agent.attempts[task, 0] for task in range(6)] == [1, 6, 2, 2, 2, 1]
    report = await collect(rows(6), output, work, retry_failed=True)
    assert (report.progress.scored, report.progress.failed) == (6, 0)
    stored = {r["_ng_task_index"]: r for r in read_jsonl(output)}
    assert [stored[task].get("_ng_attempt_index", 0) for task in range(6)] == [0, 5, 2, 1, 1, 0]
    assert stored[1]["_ng_rollout_id"] == "1-0-a5"
    assert not any("failure" in rollout for rollout in stored.values())
    failures = Counter(r["_ng_task_index"] for r in read_jsonl(tmp_path / "out_failures.jsonl"))
    assert failures == {1: 5, 2: 2, 3: 1, 4: 1}
    with pytest.raises(GymError, match="holds a run"):
        await collect(rows(6), output, work)


async def test_retries_of_shards_survive_a_merge(tmp_path: Path) -> None:
    outputs = []
    for shard in (1, 2):
        agent = FakeAgent(errors={(task, 0): [BadRequest("never")] * 2 for task in (0, 1)})
        output = tmp_path / f"part{shard}.jsonl"
        work = collection(agent, shard=(shard, 2))
        await collect(rows(8), output, work)
        await collect(rows(8), output, work, retry_failed=shard == 1, resume=True)
        outputs.append(output)
    await merge(outputs, tmp_path / "out.jsonl")
    work = collection(agent := FakeAgent())
    report = await collect(rows(8), tmp_path / "out.jsonl", work, resume=True)
    assert (report.progress.scored, report.progress.failed, agent.ran) == (6, 2, [])
    report = await collect(rows(8), tmp_path / "out.jsonl", work, retry_failed=True)
    assert (report.progress.scored, len(agent.ran)) == (8, 2)


OUTCOMES: dict[str, GymError | None] = {
    "scored": None,
    "gone": VerifierFailed("gone"),
    "hopeless": BadRequest("never"),
    "refused": REFUSED,
    "nowhere": NOWHERE,
}


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(sorted(OUTCOMES)), max_size=6), min_size=1, max_size=7),
    st.lists(st.booleans(), max_size=6),
    st.integers(1, 4),
)
async def test_whatever_happens_each_rollout_is_stored_once(
    plans: list[list[str]], retries: list[bool], concurrency: int
) -> None:
    """Each row meets its outcomes one after the other, over any number of resumes, and then is scored."""
    left = [list(plan) for plan in plans]
    failed: Counter[int] = Counter()

    async def run(row: JSON) -> JSON:
        await asyncio.sleep(0)
        plan = left[row["number"]]
        error = OUTCOMES[plan.pop(0)] if plan else None
        if error is None:
            return scored(row)
        if not isinstance(error, OperatorError):
            failed[row["number"]] += 1
        raise error

    def check(report: Report, output: Path) -> None:
        stored = read_jsonl(output)
        assert len({r["number"] for r in stored}) == len(stored) == report.progress.scored
        failures = read_jsonl(output.with_name("out_failures.jsonl"))
        assert Counter(r["number"] for r in failures) == failed
        assert not any(operator_error(r) for r in failures)
        ids = [r["_ng_rollout_id"] for r in (*stored, *failures)]
        assert len(set(ids)) == len(ids)  # every attempt has a name of its own
        assert report.complete == (report.progress.remaining == 0)
        if not report.complete:
            assert report.operator_error is not None

    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out.jsonl"
        work = collection(run, concurrency=concurrency)
        for retry in (False, *retries):
            check(await collect(rows(len(plans)), output, work, resume=True, retry_failed=retry), output)
        for _ in range(sum(map(len, plans)) + 1):
            report = await collect(rows(len(plans)), output, work, retry_failed=True)
            check(report, output)
        assert report.complete
        assert report.progress.scored == len(plans)

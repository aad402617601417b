"""The runner as an iterator: bounded, in order, retrying, and cancelled when it is left."""

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest
from support.rollouts import AT_ONCE, JSON, FakeAgent, keys, row, rows, scored

from gym_serve.observe import logs
from gym_serve.rollouts import Expansion, Order, RunnerOptions, expand, jobs_of, stream
from gym_serve.types.errors import BadRequest, InvalidRequest, Unavailable, VerifierFailed
from gym_serve.types.rows import failed_rollout


async def streamed(
    run: Any, count: int, order: Order = "completion", repeats: int = 1, **options: Any
) -> list[JSON]:
    groups = expand(rows(count), Expansion(repeats=repeats), problem=pytest.fail)
    runner_options = RunnerOptions(backoff=AT_ONCE, **options)
    return [rollout async for _, rollout in stream(jobs_of(groups), run, runner_options, order)]


async def test_every_row_has_its_rollout() -> None:
    agent = FakeAgent()
    found = await streamed(agent, 50, repeats=3, concurrency=7)
    assert keys(found) == [(task, rollout) for task in range(50) for rollout in range(3)]
    assert agent.most_running == 7
    assert all(r["_ng_latency_s"] >= 0 for r in found)


async def test_an_unexpected_error_is_logged_a_few_times(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_kinds", {})

    async def breaks(row: JSON) -> JSON:
        raise ZeroDivisionError(f"in row {row['number']}")

    found = await streamed(breaks, 19, attempts=1)
    assert all("ZeroDivisionError: in row" in rollout["error"] for rollout in found)
    told = [record for record in caplog.records if "unexpected error" in record.message]
    assert [record.exc_info is not None for record in told] == [True] * 5


async def backwards(row: JSON) -> JSON:
    """Later rollouts of a group are done before earlier ones, and odd tasks before even ones."""
    await asyncio.sleep(0.02 * (2 - row["_ng_rollout_index"]) + 0.005 * (1 - row["_ng_task_index"] % 2))
    return scored(row)


async def test_row_order() -> None:
    found = await streamed(backwards, 8, "row", repeats=2, concurrency=4)
    assert [r["_ng_rollout_id"] for r in found] == [f"{task}-{n}" for task in range(8) for n in range(2)]


async def test_group_order() -> None:
    found = await streamed(backwards, 8, "group", repeats=2, concurrency=16)
    assert [r["_ng_rollout_index"] for r in found] == [0, 1] * 8
    assert [r["_ng_task_index"] for r in found[::2]] == [r["_ng_task_index"] for r in found[1::2]]


async def test_a_group_larger_than_the_concurrency_is_held_together() -> None:
    found = await streamed(FakeAgent(), 3, "group", repeats=40, concurrency=2)
    assert [r["_ng_task_index"] for r in found] == [task for task in range(3) for _ in range(40)]


@pytest.mark.parametrize("order", ["completion", "row"])
async def test_rows_are_drawn_no_further_ahead_than_needed(order: Order) -> None:
    drawn = 0
    release = asyncio.Event()

    def groups() -> Iterator[list[JSON]]:
        nonlocal drawn
        for group in expand(rows(1000), Expansion(), problem=pytest.fail):
            drawn += 1
            yield group

    async def first_one_hangs(row: JSON) -> JSON:
        if row["number"] == 0:
            await release.wait()
        return scored(row)

    results = stream(jobs_of(groups()), first_one_hangs, RunnerOptions(concurrency=4), order)
    async with aclosing(results):
        if order == "completion":
            for _ in range(10):
                await anext(results)
            assert drawn <= 10 + 4
        else:
            waiting = asyncio.ensure_future(anext(results))
            await asyncio.sleep(0.1)
            assert drawn <= 4 * 4 + 4  # what waits for its turn is bounded too
            release.set()
            _, rollout = await waiting
            assert rollout["number"] == 0


async def test_leaving_cancels_what_runs() -> None:
    async def hang_but_one(row: JSON) -> None:
        if row["number"]:
            await asyncio.Event().wait()

    agent = FakeAgent(hang_but_one)
    results = stream(
        jobs_of(expand(rows(9), Expansion(), problem=pytest.fail)), agent, RunnerOptions(concurrency=5)
    )
    async with aclosing(results):
        await anext(results)
    assert agent.running == 0
    assert len(agent.cancelled) == 4


async def test_retryable_failures_are_tried_again_and_marked() -> None:
    agent = FakeAgent(errors={(0, 0): [VerifierFailed("gone"), VerifierFailed("gone")]})
    (found,) = await streamed(agent, 1, attempts=3)
    assert found["reward"] == 1.0
    assert (found["_ng_attempt_index"], found["_ng_rollout_id"]) == (2, "0-0-a2")
    assert [row["_ng_rollout_id"] for row in agent.ran] == ["0-0", "0-0-a1", "0-0-a2"]


async def test_the_last_failure_is_the_result() -> None:
    agent = FakeAgent(errors={(0, 0): [VerifierFailed(f"gone {n}", stage="verify") for n in range(9)]})
    (found,) = await streamed(agent, 1, attempts=3)
    assert agent.attempts == {(0, 0): 3}
    assert found["failure"]["detail"] == "gone 2"
    assert (found["_ng_failure_class"], found["_ng_failure_terminal"]) == ("verifier_failed", False)


async def test_terminal_failures_are_not_tried_again() -> None:
    agent = FakeAgent(errors={(0, 0): [BadRequest("never")]})
    (found,) = await streamed(agent, 1, attempts=3)
    assert agent.attempts == {(0, 0): 1}
    assert found["_ng_failure_terminal"] is True


async def test_an_attempt_that_takes_too_long() -> None:
    async def hang_once(row: JSON) -> None:
        if "_ng_attempt_index" not in row:
            await asyncio.Event().wait()

    agent = FakeAgent(hang_once)
    (found,) = await streamed(agent, 1, attempts=2, timeout=0.01)
    assert found["reward"] == 1.0
    assert len(agent.cancelled) == 1
    (failed,) = await streamed(FakeAgent(hang_once), 1, attempts=1, timeout=0.01)
    assert failed["failure"]["kind"] == "episode_timeout"
    assert (
        failed["failure"]["detail"] == "the rollout did not end within 0.02 s (timeout, and time to verify)"
    )


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "the agent's answer must be a rollout, got None"),
        ([1], "the agent's answer must be a rollout, got [1]"),
        ({"detail": "Not Found"}, "must have a reward: reward: a number is missing, got None"),
        ({"reward": "1"}, "must have a reward: reward: a number is missing, got 1"),
        ({"reward": True}, "must have a reward: reward: a number is missing, got True"),
        ({"reward": 1e101}, "must have a reward: reward: out of range"),
        ({"reward": float("nan")}, "must have a reward: reward: out of range, nan"),
    ],
)
async def test_an_answer_that_is_no_rollout_is_a_failure(answer: Any, said: str) -> None:
    async def odd(row: JSON) -> Any:
        return answer

    (found,) = await streamed(odd, 1)
    assert said in found["failure"]["detail"]
    assert found["mask_sample"] is True


@pytest.mark.parametrize("error", [ZeroDivisionError("oops"), asyncio.CancelledError()])
async def test_a_bug_ends_one_rollout_and_not_the_run(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(row: JSON) -> JSON:
        if row["number"] == 1:
            raise error
        return scored(row)

    found = await streamed(broken, 3)
    assert sorted(r["number"] for r in found if "failure" in r) == [1]
    assert len(found) == 3


async def test_a_row_from_a_file_of_failures_leaves_its_failure_behind() -> None:
    """What the agent is given, and what comes of it, say nothing of the attempt before."""
    asked: list[JSON] = []

    async def echo(row: JSON) -> JSON:
        asked.append(row)
        return {**row, "reward": 0.5}

    error = Unavailable("the model was away", stage="model")
    given = {**row(0), "instance_config": {"mine": 1}}
    failed = failed_rollout({**given, "_ng_attempt_index": 2}, error, {"output": []})
    groups = expand([failed], Expansion(), problem=pytest.fail)
    ((_, found),) = [pair async for pair in stream(jobs_of(groups), echo, RunnerOptions())]
    assert {key: asked[0].get(key) for key in failed} == {**dict.fromkeys(failed), **given}
    assert found["reward"] == 0.5
    assert not found.keys() & {"failure", "error", "mask_sample", "_ng_failure_class", "response"}
    assert found["instance_config"] == {"mine": 1}


async def test_the_row_and_its_metadata_survive_an_agent_that_forgets_them() -> None:
    async def forgetful(row: JSON) -> JSON:
        return {"reward": 0.5, "_ng_task_index": 99}

    (found,) = await streamed(forgetful, 1)
    assert (found["_ng_task_index"], found["_ng_rollout_id"], found["number"]) == (0, "0-0", 0)


async def test_groups_finish_one_after_the_other() -> None:
    """Retries of early groups come before the start of later ones."""
    errors = {(0, 1): [Unavailable("x"), Unavailable("x")]}
    agent = FakeAgent(errors=errors)
    found = await streamed(agent, 6, repeats=2, concurrency=2, attempts=3)
    position = {key: n for n, key in enumerate((r["_ng_task_index"], r["_ng_rollout_index"]) for r in found)}
    assert position[0, 1] <= 4


@pytest.mark.parametrize("options", [{"concurrency": 0}, {"attempts": 0}])
def test_options_out_of_range(options: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest):
        RunnerOptions(**options)

"""Groups with fake agents: stragglers are cancelled, what cannot be filled says why, compare is asked."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from support.rollouts import AT_ONCE, JSON, FakeAgent, row, rows

from gym_serve.rollouts import Expansion, Group, GroupOptions, RunnerOptions, expand, groups, jobs_of
from gym_serve.rollouts.scheduling import MAX_PROBES
from gym_serve.servers.usage import UsageMeter
from gym_serve.types.errors import BadRequest, Unavailable


async def grouped(
    run: Any, source: list[JSON], compare: Any = None, concurrency: int = 64, **options: Any
) -> list[Group]:
    wanted = GroupOptions(**options)
    runner_options = RunnerOptions(concurrency, attempts=3, backoff=AT_ONCE)
    expanded = expand(source, Expansion(repeats=wanted.size + wanted.oversample), problem=pytest.fail)
    return [group async for group in groups(jobs_of(expanded), run, wanted, runner_options, compare)]


async def last_two_hang(row: JSON) -> None:
    if row["_ng_rollout_index"] >= 3:
        await asyncio.Event().wait()


async def test_stragglers_are_cancelled() -> None:
    agent = FakeAgent(last_two_hang)
    found = await grouped(agent, rows(10), size=3, oversample=2, concurrency=7)
    assert sorted(group.task_index for group in found) == list(range(10))
    assert all([r["_ng_rollout_index"] for r in group.rollouts] == [0, 1, 2] for group in found)
    assert all(group.usable and group.reason is None for group in found)
    assert agent.running == 0
    assert {row["_ng_rollout_index"] for row in agent.cancelled} <= {3, 4}


async def test_a_deadline_settles_a_group() -> None:
    agent = FakeAgent(last_two_hang)
    found = await grouped(agent, rows(3), size=5, deadline=0.05)
    assert [len(group.rollouts) for group in found] == [3, 3, 3]
    assert not any(group.usable for group in found)
    assert all("deadline of 0.05 s passed with 2 unfinished" in (group.reason or "") for group in found)
    assert agent.running == 0


async def test_a_failed_rollout_is_retried_then_missing() -> None:
    agent = FakeAgent(errors={(0, 0): [Unavailable("once")], (1, 0): [BadRequest("never")]})
    found = sorted(await grouped(agent, rows(2), size=2), key=lambda group: group.task_index)
    assert (found[0].usable, len(found[0].rollouts)) == (True, 2)
    assert not found[1].usable
    assert (found[1].reason or "").startswith("0 of 2 rollouts: 1 failed with bad_request: never")
    assert [failure["_ng_rollout_index"] for failure in found[1].failures] == [0]


async def test_leaving_cancels_everything() -> None:
    agent = FakeAgent(last_two_hang)
    expanded = expand(rows(50), Expansion(repeats=5), problem=pytest.fail)
    settled = groups(jobs_of(expanded), agent, GroupOptions(3, oversample=2), RunnerOptions(concurrency=10))
    async with aclosing(settled):
        await anext(settled)
    assert agent.running == 0


class Judge:
    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[JSON] = []

    async def __call__(self, row: JSON, body: JSON, meter: UsageMeter) -> Any:
        self.asked.append(body)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_compare_gives_the_rewards() -> None:
    judge = Judge({"rewards": [0.25, 1], "why": "better"})
    (group,) = await grouped(FakeAgent(), [row(0, principle="be brief")], judge, size=2)
    assert [r["reward"] for r in group.rollouts] == [0.25, 1.0]
    assert [r["verify_reward"] for r in group.rollouts] == [1.0, 1.0]
    assert group.comparison == {"rewards": [0.25, 1], "why": "better"}
    assert judge.asked == [
        {
            "conversation_history": [{"role": "user", "content": "question 0"}],
            "response_objs": [r["response"] for r in group.rollouts],
            "principle": "be brief",
        }
    ]


async def test_an_environment_without_compare() -> None:
    (group,) = await grouped(FakeAgent(), rows(1), Judge(None), size=2)
    assert [r["reward"] for r in group.rollouts] == [1.0, 1.0]
    assert group.comparison is None


async def test_compare_is_tried_again() -> None:
    judge = Judge(Unavailable("busy"), {"rewards": [1]}, {"rewards": [0.5, 0.5]})
    (group,) = await grouped(FakeAgent(), rows(1), judge, size=2)
    assert [r["reward"] for r in group.rollouts] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([Unavailable("busy")] * (3 + MAX_PROBES), "compare failed: busy"),
        ([BadRequest("no")], "compare failed: no"),
        ([{"rewards": [1, float("inf")]}] * 3, "of `compare` must be finite numbers, got"),
        ([{"rewards": [1, None]}] * 3, "of `compare` must be finite numbers, got"),
        (["text"] * 3, "`compare` must answer 2 rewards, got text"),
        ([KeyError("rewards")], "KeyError: 'rewards'"),
    ],
)
async def test_a_group_that_cannot_be_compared_is_not_usable(answers: list[Any], said: str) -> None:
    (group,) = await grouped(FakeAgent(), rows(1), Judge(*answers), size=2)
    assert not group.usable
    assert said in (group.reason or "")


async def test_a_compare_that_never_answers_is_given_up() -> None:
    async def compare(row: JSON, body: JSON, meter: UsageMeter) -> JSON:
        await asyncio.Event().wait()
        raise AssertionError

    expanded = expand(rows(1), Expansion(repeats=2), problem=pytest.fail)
    runner_options = RunnerOptions(attempts=2, timeout=0.05, backoff=AT_ONCE)
    (group,) = [
        g async for g in groups(jobs_of(expanded), FakeAgent(), GroupOptions(2), runner_options, compare)
    ]
    assert not group.usable
    assert "compare failed: compare did not answer within 0.05 s" in (group.reason or "")


async def test_a_group_that_is_too_small_is_not_compared() -> None:
    judge = Judge()
    errors = {(0, 0): [BadRequest("never")]}
    (group,) = await grouped(FakeAgent(errors=errors), rows(1), judge, size=2)
    assert judge.asked == []
    assert not group.usable


async def test_a_slow_compare_holds_up_nothing_else() -> None:
    last = asyncio.Event()

    async def compare(row: JSON, body: JSON, meter: UsageMeter) -> JSON:
        if row["number"] == 0:
            await last.wait()
        elif row["number"] == 4:
            last.set()
        return {"rewards": [0.0] * len(body["response_objs"])}

    found = await grouped(FakeAgent(), rows(5), compare, size=2, concurrency=2)
    assert found[-1].row["number"] == 0
    assert len(found) == 5

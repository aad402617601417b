"""`GroupFeed` with fake agents and a policy that changes: what is cancelled, begun again, and counted."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from support.rollouts import AT_ONCE, JSON, FakeAgent, row, rows
from support.waiting import until

from gym_serve.rollouts import (
    Expansion,
    Group,
    GroupFeed,
    GroupOptions,
    Handover,
    Job,
    RunnerOptions,
    StreamOptions,
    expand,
    jobs_of,
)
from gym_serve.servers.usage import UsageMeter
from gym_serve.types.errors import BadRequest, EndpointMisconfigured, Unauthorized, Unavailable


class Trainer:
    """Takes groups, and changes the policy."""

    def __init__(
        self,
        agent: Any,
        source: Any,
        *,
        size: int = 2,
        k: int = 1,
        batch: int | None = 2,
        straddle: Any = "continue",
        concurrency: int = 64,
        compare: Any = None,
        **options: Any,
    ) -> None:
        self.version = 10  # a count may begin anywhere
        self.errors: list[Exception] = []
        wanted = GroupOptions(size, **options)
        expansion = Expansion(repeats=wanted.size + wanted.oversample)

        async def draw() -> Iterator[list[Job]]:
            return jobs_of(expand(source, expansion, problem=pytest.fail))

        self.feed = GroupFeed(
            draw,
            agent,
            options=wanted,
            stream=StreamOptions(k, straddle, batch),
            runner_options=RunnerOptions(concurrency, attempts=3, backoff=AT_ONCE, max_failures=2),
            version=self.tell,
            compare=compare,
        )

    async def tell(self) -> int:
        if self.errors:
            raise self.errors.pop(0)
        return self.version

    def update(self, by: int = 1) -> None:
        self.version += by
        self.feed.look()

    async def take(self) -> Group | None:
        return await self.feed.take(Handover())

    async def all(self) -> list[Group]:
        found = []
        while (group := await self.take()) is not None:
            found.append(group)
        return found

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Trainer]:
        task = asyncio.ensure_future(self.feed.run())
        try:
            yield self
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


class Held:
    """Holds rows until they are let go.

    Args:
        tasks: numbers of the rows that are held.
    """

    def __init__(self, *tasks: int) -> None:
        self.tasks = set(tasks)
        self.free = asyncio.Event()

    async def __call__(self, row: JSON) -> None:
        if row["number"] in self.tasks:
            await self.free.wait()

    def let(self, *tasks: int) -> None:
        """Hold only these from now on."""
        self.tasks = set(tasks)
        self.free.set()
        self.free = asyncio.Event()


def task_of(group: Group | None) -> int:
    assert group is not None
    number: int = group.row["number"]
    return number


async def test_every_row_is_taken_once_and_fresh() -> None:
    agent = FakeAgent()
    async with Trainer(agent, rows(50), k=2, batch=4).running() as trainer:
        found = []
        while (group := await trainer.take()) is not None:
            found.append(group)
            if len(found) % 4 == 0:
                trainer.update()
    assert sorted(map(task_of, found)) == list(range(50))
    assert all(group.usable and len(group.rollouts) == 2 for group in found)
    assert {group.staleness for group in found} <= {0, 1, 2}
    assert max(agent.attempts.values()) == 1
    assert (trainer.feed.counts.begun, trainer.feed.counts.taken) == (50, 50)
    assert trainer.feed.counts.dropped == {}


async def test_no_more_is_made_than_will_be_fresh() -> None:
    drawn = 0

    def source() -> Iterator[JSON]:
        nonlocal drawn
        for number in range(100):
            drawn += 1
            yield row(number)

    async with Trainer(FakeAgent(), source(), k=1, batch=3).running() as trainer:
        await until(lambda: trainer.feed.counts.ready == 6)
        await asyncio.sleep(0.02)
        assert drawn == trainer.feed.counts.begun == 6
        for _ in range(3):
            await trainer.take()
        await asyncio.sleep(0.02)
        assert drawn == 6  # 3 for the next version; for the one after it, a row may begin only then
        trainer.update()
        await until(lambda: trainer.feed.counts.ready == 6)
        assert drawn == 9


async def test_a_slow_group_is_waited_for_before_it_is_too_old() -> None:
    held = Held(0)
    agent = FakeAgent(held)
    async with Trainer(agent, rows(20), k=1, batch=2).running() as trainer:
        assert [task_of(await trainer.take()) for _ in range(2)] == [1, 2]
        trainer.update()
        assert task_of(await trainer.take()) == 3
        waiting = asyncio.ensure_future(trainer.take())
        await until(lambda: trainer.feed.counts.ready == 2)
        await asyncio.sleep(0.02)
        assert not waiting.done()
        held.let()
        group = await waiting
        assert (task_of(group), group and group.staleness) == (0, 1)
    assert not trainer.feed.counts.dropped
    assert agent.attempts[0, 0] == 1


async def test_what_is_too_old_is_cancelled_and_begins_again_before_later_rows() -> None:
    held = Held(0, 2)
    agent = FakeAgent(held)
    async with Trainer(agent, rows(8), k=1, batch=2, concurrency=8).running() as trainer:
        await until(lambda: trainer.feed.counts.ready == 2)
        trainer.update(2)  # without taking anything
        await until(lambda: len(agent.cancelled) == 4)
        assert {row["number"] for row in agent.cancelled} == {0, 2}
        assert trainer.feed.counts.dropped == {"stale": 8}
        held.let()
        found = await trainer.all()
    assert sorted(map(task_of, found[:4])) == [0, 1, 2, 3]
    assert sorted(map(task_of, found)) == list(range(8))
    assert {group.staleness for group in found} == {0}
    again = next(group for group in found if task_of(group) == 0).rollouts[0]
    assert (again["_ng_attempt_index"], again.rollout_id) == (1, "0-0-a1")


async def test_continue_lets_rollouts_go_on() -> None:
    held = Held(0)
    agent = FakeAgent(held)
    async with Trainer(agent, rows(1), k=2).running() as trainer:
        await until(lambda: agent.running == 2)
        trainer.update(2)
        await asyncio.sleep(0.02)
        held.let()
        group = await trainer.take()
    assert agent.cancelled == []
    assert group is not None
    assert group.staleness == 2


async def one_of_two_hangs(row: JSON) -> None:
    if row["_ng_rollout_index"] == 1 and row.get("_ng_attempt_index", 0) < 2:
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("straddle", "reason", "ran", "staleness"),
    [("restart", "restarted", {(0, 0): 1, (0, 1): 3}, 2), ("cancel", "cancelled", {(0, 0): 3, (0, 1): 3}, 0)],
)
async def test_restart_and_cancel(
    straddle: str, reason: str, ran: dict[tuple[int, int], int], staleness: int
) -> None:
    agent = FakeAgent(one_of_two_hangs)
    async with Trainer(agent, rows(1), k=2, straddle=straddle).running() as trainer:
        for number in (1, 2):
            await until(lambda: agent.running == 1)  # the other one has ended
            trainer.update()
            await until(lambda number=number: len(agent.cancelled) == number)
        group = await trainer.take()
    assert agent.attempts == ran
    assert group is not None
    assert group.staleness == staleness
    assert [len(group.rollouts), len(group.failures)] == [2, 0]
    assert trainer.feed.counts.dropped == {reason: 2 if straddle == "restart" else 4}


async def test_a_restart_costs_no_attempt() -> None:
    agent = FakeAgent(one_of_two_hangs, errors={(0, 1): [Unavailable("once"), Unavailable("twice")]})
    async with Trainer(agent, rows(1), k=2, straddle="restart").running() as trainer:
        for number in (1, 2):
            await until(lambda: agent.running == 1)
            trainer.update()
            await until(lambda number=number: len(agent.cancelled) == number)
        group = await trainer.take()
    assert group is not None
    assert group.usable
    assert agent.attempts[0, 1] == 5


async def test_stragglers_and_deadlines() -> None:
    async def last_hangs(row: JSON) -> None:
        if row["_ng_rollout_index"] == 2 or row["number"] == 1:
            await asyncio.Event().wait()

    agent = FakeAgent(last_hangs)
    async with Trainer(agent, rows(2), size=2, oversample=1, deadline=0.05).running() as trainer:
        first, second = await trainer.all()
    assert (first.usable, len(first.rollouts)) == (True, 2)
    assert not second.usable
    assert "deadline of 0.05 s passed with 3 unfinished" in (second.reason or "")
    assert trainer.feed.counts.dropped == {"straggler": 4}
    assert agent.running == 0


async def test_a_group_that_begins_again_has_its_deadline_again() -> None:
    held = Held(0)
    async with Trainer(FakeAgent(held), rows(1), k=0, batch=1, deadline=2).running() as trainer:
        await asyncio.sleep(1.5)
        trainer.update()
        await until(lambda: trainer.feed.counts.dropped)
        await asyncio.sleep(1)
        held.let()
        group = await trainer.take()
    assert group is not None
    assert group.usable


async def test_groups_that_are_not_usable_do_not_count() -> None:
    errors: Any = {(number, 0): [BadRequest("never")] for number in range(4)}
    async with Trainer(FakeAgent(errors=errors), rows(6), k=0, batch=2).running() as trainer:
        found = []
        while (group := await trainer.take()) is not None:
            found.append(group)
            if sum(group.usable for group in found) == 2:
                trainer.update()
    assert sorted(map(task_of, found)) == list(range(6))
    assert [task_of(group) for group in found if group.usable] == [4, 5]
    assert {group.staleness for group in found} == {0}


async def test_compare_gives_the_rewards_and_its_answer_for_old_rollouts_is_not_used() -> None:
    asked: list[asyncio.Event] = []

    async def compare(row: JSON, body: JSON, meter: UsageMeter) -> JSON:
        asked.append(may := asyncio.Event())
        number = len(asked)
        await may.wait()
        return {"rewards": [float(number)] * 2}

    async with Trainer(FakeAgent(), rows(1), k=0, batch=1, compare=compare).running() as trainer:
        await until(lambda: len(asked) == 1)
        trainer.update()
        await until(lambda: len(asked) == 2)
        asked[0].set()
        await asyncio.sleep(0.01)
        assert trainer.feed.counts.ready == 0
        asked[1].set()
        group = await trainer.take()
    assert group is not None
    assert [rollout.reward for rollout in group.rollouts] == [2.0, 2.0]


async def test_a_group_on_its_way_to_a_cancelled_call_is_given_back() -> None:
    async with Trainer(FakeAgent(), rows(2), k=1, batch=1).running() as trainer:
        handover = Handover()
        first = await trainer.feed.take(handover)
        await trainer.feed.give_back(handover)
        await trainer.feed.give_back(Handover())  # of a call that got nothing
        assert trainer.feed.counts.taken == 0
        assert await trainer.take() == first
        handover = Handover()
        last = await trainer.feed.take(handover)
        assert task_of(last) == 1
        trainer.version += 2  # it is too old when it comes back
        await trainer.feed.give_back(handover)
        again = await trainer.take()
        assert (task_of(again), again and again.staleness) == (1, 0)
        assert await trainer.take() is None


async def test_a_cancelled_take_takes_nothing() -> None:
    held = Held(0)
    async with Trainer(FakeAgent(held), rows(1)).running() as trainer:
        for _ in range(3):
            with pytest.raises((asyncio.TimeoutError, TimeoutError)):
                await asyncio.wait_for(trainer.take(), 0.01)
        held.let()
        assert task_of(await trainer.take()) == 0
        assert await trainer.take() is None


async def test_leaving_cancels_everything() -> None:
    agent = FakeAgent(Held(*range(50)))
    async with Trainer(agent, rows(50), k=4, batch=8, concurrency=10).running() as trainer:
        waiting = asyncio.ensure_future(trainer.take())
        await until(lambda: agent.running == 10)
    assert agent.running == 0
    assert await waiting is None


async def test_rows_that_wait_hold_up_nothing() -> None:
    import queue

    asked: queue.Queue[JSON | None] = queue.Queue()
    asked.put(row(0))
    async with Trainer(FakeAgent(), iter(asked.get, None), k=1, batch=1).running() as trainer:
        assert task_of(await trainer.take()) == 0
        asked.put(row(1))
        assert task_of(await trainer.take()) == 1
        asked.put(None)
        assert await trainer.take() is None


async def test_errors_reach_the_trainer() -> None:
    def broken() -> Iterator[JSON]:
        yield row(0)
        raise KeyError("rows")

    async with Trainer(FakeAgent(), broken(), k=1, batch=4).running() as trainer:
        with pytest.raises(KeyError, match="rows"):
            await trainer.all()
    refused: Any = {(0, 0): [Unauthorized("no key")]}
    async with Trainer(FakeAgent(errors=refused), rows(9)).running() as trainer:
        with pytest.raises(Unauthorized):
            await trainer.all()
    wrong: Any = {(number, 0): [EndpointMisconfigured("no model")] for number in range(9)}
    async with Trainer(FakeAgent(errors=wrong), rows(9), size=1).running() as trainer:
        with pytest.raises(EndpointMisconfigured):
            await trainer.all()


async def test_a_version_that_cannot_be_asked_for_just_now_is_asked_for_later() -> None:
    async with Trainer(FakeAgent(), rows(3), k=0, batch=1).running() as trainer:
        assert task_of(await trainer.take()) == 0
        trainer.errors = [Unavailable("restarting")]
        trainer.version += 1
        found = [task_of(group) for group in await trainer.all()]
    assert found == [1, 2]
    async with Trainer(FakeAgent(), rows(1)).running() as trainer:
        trainer.errors = [BadRequest("no version")]
        with pytest.raises(BadRequest, match="no version"):
            await trainer.take()


async def test_a_count_of_versions_that_begins_again_is_a_new_version() -> None:
    held = Held(0)
    agent = FakeAgent(held)
    async with Trainer(agent, rows(1), k=0, batch=1).running() as trainer:
        await until(lambda: agent.running == 2)
        trainer.version = 0  # the cluster has lost it
        trainer.feed.look()
        await until(lambda: len(agent.cancelled) == 2)
        held.let()
        assert task_of(await trainer.take()) == 0


async def test_rows_are_taken_as_often_as_they_are_asked_for_whatever_the_trainer_does() -> None:
    """Updates at odd times, some without a group taken, and rows that are there several times."""

    async def takes_its_time(row: JSON) -> None:
        for _ in range(1 + row["number"] % 5):
            await asyncio.sleep(0.001)

    source = [row(number % 4) for number in range(40)]
    for straddle in ("continue", "restart", "cancel"):
        agent = FakeAgent(takes_its_time)
        trainer = Trainer(agent, source, k=1, batch=2, straddle=straddle, concurrency=6)
        async with trainer.running():
            found: list[Group] = []
            while (group := await trainer.take()) is not None:
                assert group.staleness is not None
                assert group.staleness <= 1
                found.append(group)
                if len(found) % 3 == 0:
                    trainer.update(1 + len(found) % 2)
                    await asyncio.sleep(0.002)
        assert Counter(map(task_of, found)) == Counter(row["number"] for row in source)
        assert all(group.usable for group in found)

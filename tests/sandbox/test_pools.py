"""Pools of boxes: what the plan decides whatever happens, and that a pool does it, with fake boxes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.waiting import until

from gym_serve.sandbox import BoxPool, SandboxSpec
from gym_serve.sandbox.pools import Plan, Ramp
from gym_serve.types.errors import GymError, InvalidRequest, Unavailable

KEYS = st.sampled_from("abc")


class Decisions(RuleBasedStateMachine):
    """Takes, starts that succeed or fail, and ends, in any order; the counts are kept here as well."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = Plan(most=5, most_warm=3)
        self.now = 100.0
        self.starting: list[tuple[str, int]] = []
        self.waiting: list[tuple[str, float]] = []
        self.held = self.ending = 0
        self.warm = dict.fromkeys("abc", 0)

    @rule(key=KEYS)
    def take(self, key: str) -> None:
        if self.plan.ask(key, self.now):
            self.warm[key] -= 1
            self.held += 1
        else:
            assert not self.warm[key]
            self.waiting.append((key, self.now))
        self.follow()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        key, since = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        self.plan.leave(key, since)
        self.follow()

    @precondition(lambda self: self.starting)
    @rule(data=st.data(), seconds=st.floats(0.01, 50), outcome=st.sampled_from(["started", "again", "never"]))
    def finish(self, data: st.DataObject, seconds: float, outcome: str) -> None:
        key, under_way = self.starting.pop(data.draw(st.integers(0, len(self.starting) - 1)))
        ours = [entry for entry in self.waiting if entry[0] == key]
        if outcome == "started":
            self.plan.started(key, seconds, under_way)
            assert self.plan.settle(key) == bool(ours)
            if ours:
                self.waiting.remove(ours[0])  # the one that waited longest
                self.held += 1
            else:
                self.warm[key] += 1
        else:
            told = self.plan.failed(key, self.now, again=outcome == "again")
            assert told >= min(1, len(ours))
            assert outcome == "again" or told == len(ours)
            for entry in ours[:told]:
                self.waiting.remove(entry)
        self.follow()

    @precondition(lambda self: self.held + self.ending)
    @rule()
    def end(self) -> None:
        if self.ending:
            self.ending -= 1
        else:
            self.held -= 1
        self.plan.ended()
        self.follow()

    @rule(seconds=st.floats(0.01, 40))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.plan.forget(self.now)
        self.follow()

    def follow(self) -> None:
        for _ in range(100):
            step = self.plan.step(self.now)
            if step is None:
                return
            if step.action == "start":
                self.starting.append((step.key, len(self.starting) + 1))
            else:
                assert self.warm[step.key]
                self.warm[step.key] -= 1
                self.ending += 1
        raise AssertionError("it never comes to rest")

    @invariant()
    def counts_and_limits(self) -> None:
        plan, warm = self.plan, sum(self.warm.values())
        assert (plan.warm, plan.starting, plan.held) == (warm, len(self.starting), self.held + self.ending)
        assert plan.waiting == len(self.waiting)
        assert warm + len(self.starting) + plan.held <= 5
        assert plan.ramp.limit >= 1

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        starting, may = len(self.starting), self.plan.ramp.allows(len(self.starting), self.now)
        for key in {key for key, _ in self.waiting}:
            waiting = sum(entry[0] == key for entry in self.waiting)
            if waiting > sum(each[0] == key for each in self.starting):
                busy = self.held + self.ending + starting == 5
                assert busy or not may, f"{key} waits, and none starts"


TestDecisions = Decisions.TestCase
TestDecisions.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("at_once", "least", "most"),
    [(2, 2, 6), (8, 7, 12), (100, 60, 110)],
)
def test_a_ramp_finds_what_a_provider_does_at_once(at_once: int, least: int, most: int) -> None:
    ramp, heap, now = Ramp(), [], 0.0
    for _ in range(3000):
        while ramp.allows(len(heap), now):
            under_way = len(heap) + 1
            heap.append((now + max(1.0, under_way / at_once), now, under_way))
        heap.sort()
        now, begun, under_way = heap.pop(0)
        ramp.started(now - begun, under_way)
    assert least <= ramp.limit <= most


def test_failures_in_a_row_hold_starts_up_longer_each_time() -> None:
    ramp, now, waits = Ramp(), 10.0, []
    for _ in range(8):
        ramp.failed(now)
        waits.append(ramp.until - now)
        assert not ramp.allows(0, now)
        now = ramp.until
    assert waits == [0.5, 1, 2, 4, 8, 16, 16, 16]
    assert ramp.allows(0, now)
    assert not ramp.allows(1, now)
    ramp.started(1.0, 1)
    ramp.failed(now)
    assert ramp.until - now == 0.5


class FakeBox:
    def __init__(self) -> None:
        self.alive = True
        self.closed = 0

    async def close(self) -> None:
        self.closed += 1


class FakeProvider:
    """Takes ``seconds`` for a box, or fails."""

    def __init__(self, seconds: float = 0.01) -> None:
        self.seconds = seconds
        self.failure: Exception | None = None
        self.boxes: list[FakeBox] = []
        self.under_way = self.most_under_way = 0

    def problems(self) -> list[str]:
        return []

    async def create(self, spec: SandboxSpec, *, layer: Any = None) -> Any:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(self.seconds)
            if self.failure is not None:
                raise self.failure
        finally:
            self.under_way -= 1
        self.boxes.append(FakeBox())
        return self.boxes[-1]

    def left(self) -> int:
        return sum(not box.closed for box in self.boxes)


SPEC, OTHER = SandboxSpec(workdir="/a"), SandboxSpec(workdir="/b")


async def _pool(provider: FakeProvider, **limits: int) -> BoxPool:
    pool = BoxPool(provider, **{"most": 8, "warm": 4, **limits})
    await pool.start()
    return pool


async def test_a_box_is_for_one_taker_and_ends_once() -> None:
    provider = FakeProvider(0.05)
    pool = await _pool(provider)
    taken: list[Any] = []

    async def episode() -> None:
        box = await pool.take(SPEC)
        assert box not in taken
        taken.append(box)
        await asyncio.sleep(0.001)
        await pool.end(box)

    await asyncio.gather(*(episode() for _ in range(200)))
    await until(lambda: pool.counts["warm"] > 0)
    await pool.stop()
    assert {box.closed for box in provider.boxes} == {1}


async def test_many_takes_are_no_stampede_and_no_more_boxes_than_there_may_be() -> None:
    provider = FakeProvider(0.02)
    pool = await _pool(provider, most=6)
    takes = [asyncio.create_task(pool.take(SPEC)) for _ in range(40)]
    for _ in range(40):
        done, takes = await asyncio.wait(takes, return_when=asyncio.FIRST_COMPLETED)
        counts = pool.counts
        assert counts["live"] + counts["warm"] + counts["starting"] <= 6
        await asyncio.gather(*(pool.end(task.result()) for task in done))
        if not takes:
            break
    assert provider.most_under_way <= 6
    await pool.stop()
    assert provider.left() == 0


async def test_a_warm_box_of_another_kind_makes_room() -> None:
    pool = await _pool(provider := FakeProvider(1e-3), most=2)
    pool._plan.kinds.clear()
    first = await pool.take(SPEC)
    pool._plan.kinds[SPEC.model_dump_json()].seconds = 100.0  # so that one is kept ready
    second = await pool.take(SPEC)
    await pool.end(second)
    await until(lambda: pool.counts["warm"] == 1)
    other = await asyncio.wait_for(pool.take(OTHER), 5)
    for box in (first, other):
        await pool.end(box)
    await pool.stop()
    assert provider.left() == 0


async def test_a_box_that_died_while_it_was_warm_is_not_given_away() -> None:
    pool = await _pool(provider := FakeProvider(1e-3))
    first = await pool.take(SPEC)
    pool._plan.kinds[SPEC.model_dump_json()].seconds = 100.0
    await until(lambda: pool.counts["warm"] > 0)
    for box in provider.boxes:
        box.alive = False
    second = await pool.take(SPEC)
    assert second.alive
    for box in (first, second):
        await pool.end(box)
    await pool.stop()
    assert {box.closed for box in provider.boxes} == {1}


@pytest.mark.parametrize(
    ("failure", "told_at_once"),
    [(Unavailable("busy"), 1), (InvalidRequest("no such image"), 5), (OSError("no files"), 1)],
)
async def test_who_waits_is_told_why_no_box_starts(failure: Exception, told_at_once: int) -> None:
    provider = FakeProvider()
    provider.failure = failure
    pool = await _pool(provider, most=1)
    takes = [asyncio.create_task(pool.take(SPEC)) for _ in range(5)]
    done, waiting = await asyncio.wait(takes, return_when=asyncio.FIRST_COMPLETED)
    assert [task.exception() for task in done] == [failure] * told_at_once
    provider.failure = None
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert pool.counts["waiting"] == 0
    await pool.end(await asyncio.wait_for(pool.take(SPEC), 5))
    await pool.stop()
    assert provider.left() == 0


@pytest.mark.parametrize("moment", ["before", "same", "after"])
async def test_a_taker_that_leaves(moment: str) -> None:
    provider = FakeProvider(0.01)
    pool = await _pool(provider)
    take = asyncio.create_task(pool.take(SPEC))
    await asyncio.sleep(0.001)
    if moment == "same":
        await until(lambda: bool(provider.boxes))
    elif moment == "after":
        await until(lambda: pool.counts["live"] == 1)
    take.cancel()
    await asyncio.gather(take, return_exceptions=True)
    if not take.cancelled():
        await pool.end(take.result())
    await until(lambda: pool.counts["live"] == 0)
    await pool.stop()
    await until(lambda: provider.left() == 0)


async def test_a_pool_that_stops_tells_those_that_wait() -> None:
    pool = await _pool(provider := FakeProvider(60.0))
    take = asyncio.create_task(pool.take(SPEC))
    await until(lambda: provider.under_way == 1)
    await pool.stop()
    await pool.stop()
    for late in (take, pool.take(SPEC)):
        with pytest.raises(GymError, match="the pool of boxes is stopped"):
            await late
    assert provider.under_way == 0


async def test_what_nobody_takes_any_more_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_WINDOW", "_SHORTEST"):
        monkeypatch.setattr(f"gym_serve.sandbox.pools.{name}", 0.5)
    provider = FakeProvider(0.1)
    pool = await _pool(provider)
    boxes = await asyncio.gather(*(pool.take(SPEC) for _ in range(4)))
    await until(lambda: pool.counts["warm"] > 0)
    for box in boxes:
        await pool.end(box)
    await until(lambda: pool.counts == dict.fromkeys(pool.counts, 0))
    await until(lambda: not pool._shelves)
    await pool.stop()

"""How many calls a replica works on, and how many wait."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.no_parts import no_parts

from gym_serve.cluster.routing.admission import Admission
from gym_serve.cluster.routing.rpc import QueueFullError
from gym_serve.servers.transport import Call, Reply


class Work:
    """Calls that run until they are told to end; counts those at work."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.at_work: dict[str, asyncio.Event] = {}
        self.most = 0

    async def dispatch(self, call: Call) -> Reply:
        self.order.append(call.op)
        end = self.at_work[call.op] = asyncio.Event()
        self.most = max(self.most, len(self.at_work))
        try:
            await end.wait()
        finally:
            del self.at_work[call.op]
        return Reply(200, b"")


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


def test_calls_beyond_the_queue_are_refused_with_a_hint() -> None:
    async def run() -> None:
        work = Work()
        admission = Admission(work.dispatch, no_parts, lambda: (1, 2))
        tasks = [asyncio.create_task(admission.dispatch(Call(str(n)))) for n in range(4)]
        await settle()
        with pytest.raises(QueueFullError, match="2 calls wait already"):
            await tasks[3]
        assert (admission.running, admission.waiting, admission.unbound) == (1, 2, 3)
        for _ in range(3):
            next(iter(work.at_work.values())).set()
            await settle()
        assert [(await task).status for task in tasks[:3]] == [200, 200, 200]
        assert work.order == ["0", "1", "2"]
        assert (admission.running, admission.waiting, admission.unbound) == (0, 0, 0)
        assert admission.meter.refused() == 0.25

    asyncio.run(run())


@settings(deadline=None)
@given(
    limit=st.integers(1, 4),
    steps=st.lists(st.tuples(st.sampled_from(["call", "end", "cancel"]), st.integers(0, 9)), max_size=60),
)
def test_never_more_than_the_limit_and_nobody_forgotten(limit: int, steps: list[tuple[str, int]]) -> None:
    async def run() -> None:
        work = Work()
        admission = Admission(work.dispatch, no_parts, lambda: (limit, -1))
        tasks: list[asyncio.Task[Reply]] = []
        for step, which in steps:
            if step == "call":
                tasks.append(asyncio.create_task(admission.dispatch(Call(str(len(tasks))))))
            elif step == "end" and work.at_work:
                list(work.at_work.values())[which % len(work.at_work)].set()
            elif step == "cancel" and tasks:
                tasks[which % len(tasks)].cancel()
            if which % 3:  # else the next step comes before anybody has noticed
                await settle()
            open_ = sum(not task.done() for task in tasks)
            assert work.most <= limit
            if which % 3:
                assert admission.unbound == open_ == admission.running + admission.waiting
                assert len(work.at_work) == min(limit, open_)
        await settle()
        while work.at_work:
            next(iter(work.at_work.values())).set()
            await settle()
        assert all(task.done() for task in tasks)
        order = [int(op) for op in work.order]
        assert limit > 1 or order == sorted(order)  # first come, first served

    asyncio.run(run())

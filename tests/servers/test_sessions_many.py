"""20,000 sessions that end in every way there is leave nothing behind."""

import asyncio
import gc
import random
from typing import Any, ClassVar

import psutil
import pytest
from pydantic import BaseModel

from gym_serve import ResourcesServer, ServerRunner, Verdict, VerifyRequest, tool
from gym_serve.cluster.routing.failover import FailoverTransport
from gym_serve.servers.sessions import OpenSession
from gym_serve.servers.transport import Call
from gym_serve.transports import InlineTransport
from gym_serve.types.errors import GymError

SESSIONS = 20_000
AT_ONCE = 1000
TTL = 50.0


class Cheap(ResourcesServer):
    restorable: ClassVar[bool] = True

    class Session(BaseModel):
        notes: str = ""

    opened = 0
    closed = 0

    async def seed(self, row: dict[str, Any], session: Session) -> None:
        self.opened += 1
        session.notes = "x" * 200
        if row["end"] == "cancelled seed":
            await asyncio.sleep(3600)

    @tool
    async def wait(self) -> None:
        await asyncio.sleep(3600)

    async def verify(self, request: VerifyRequest) -> Verdict:
        return Verdict(reward=0.0)

    async def close(self, session: Session) -> None:
        self.closed += 1


async def one(transport: FailoverTransport, end: str) -> None:
    reply = await transport.call(Call("seed_session", b'{"end": "%s"}' % end.encode()))
    if end == "dead caller":
        return
    try:
        if end == "cancelled":
            await transport.call(Call("tools/wait", b"{}", reply.session))
        if end == "deadline":
            await transport.call(Call("tools/wait", b"{}", reply.session, timeout=0.001))
    finally:
        await transport.call(Call("close_session", b"{}", reply.session))


@pytest.mark.timeout(600)  # seconds on a free core
async def test_nothing_is_left_of_20_000_sessions() -> None:
    """However they end: closed, cancelled at seed or in a call, by a deadline, or by time alone."""
    server = Cheap(session_ttl=TTL)
    now = 0.0
    server.sessions.clock = lambda: now
    transport = FailoverTransport(InlineTransport(ServerRunner(server)), max_bytes=4 << 20)
    ends = random.Random(7)
    process, early = psutil.Process(), 0
    for batch in range(SESSIONS // AT_ONCE):
        tasks = []
        for _ in range(AT_ONCE):
            end = ends.choices(
                ["closed", "dead caller", "cancelled seed", "cancelled", "deadline"], [70, 10, 5, 10, 5]
            )[0]
            task = asyncio.create_task(one(transport, end))
            tasks.append(task)
            if end.startswith("cancelled"):
                asyncio.get_running_loop().call_later(ends.random() / 100, task.cancel)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert result is None or isinstance(result, asyncio.CancelledError | GymError), result
        now += 20.0
        server.sessions.sweep()
        assert len(server.sessions) <= 4 * AT_ONCE
        if batch == SESSIONS // AT_ONCE // 4:
            early = process.memory_info().rss
    assert process.memory_info().rss - early < 13 << 20  # 900 bytes a session
    now += 2 * TTL
    server.sessions.sweep()
    await server.stop()
    assert len(server.sessions) == 0
    assert server.opened == server.closed > 0.99 * SESSIONS
    assert transport.states.bytes <= 4 << 20  # of dead callers' sessions, until their time is over
    del tasks, task
    gc.collect()
    assert not [found for found in gc.get_objects() if isinstance(found, OpenSession)]

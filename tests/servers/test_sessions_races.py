"""Calls, cancellations, expiry, closing and the stop of the server in any order: each session closes once."""

import asyncio
import logging
import threading
from functools import partial
from typing import Any, ClassVar

import orjson
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule
from pydantic import BaseModel, PrivateAttr

from gym_serve import (
    ResourcesServer,
    ServerRunner,
    SessionLost,
    SessionNotFound,
    Unavailable,
    Verdict,
    VerifyRequest,
    tool,
)
from gym_serve.servers.transport import Call, Reply

TTL = 100.0


class Gated(ResourcesServer):
    """Its calls last until they are let go; it counts who uses a session, and how often one was closed."""

    class Session(BaseModel):
        number: int = -1
        users: int = 0

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.gates: dict[int, asyncio.Event] = {}
        self.closes: dict[int, int] = {}

    async def seed(self, row: dict[str, Any], session: Session) -> None:
        session.number = row["number"]
        self.closes[session.number] = 0
        if row.get("fails"):
            raise Unavailable("no seed")

    @tool
    async def work(self, gate: int, session: Session) -> None:
        assert self.closes[session.number] == 0
        session.users += 1
        try:
            await self.gates[gate].wait()
            assert self.closes[session.number] == 0
        finally:
            session.users -= 1

    async def verify(self, request: VerifyRequest, session: Session) -> Verdict:
        return Verdict(reward=0.0)

    async def close(self, session: Session) -> None:
        assert session.users == 0
        self.closes[session.number] += 1
        await asyncio.sleep(0)


class OneByOne(Gated):
    restorable: ClassVar[bool] = True


class Races(RuleBasedStateMachine):
    """Against the rules of `LiveSessions`, with a clock that is moved by hand."""

    server: type[Gated] = Gated
    sessions = Bundle("sessions")
    calls = Bundle("calls")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.now = 0.0
        self.env = self.server(name="env", replica="r", session_ttl=TTL)
        self.env.sessions.clock = lambda: self.now
        self.host = ServerRunner(self.env)
        self.running: list[asyncio.Task[Reply]] = []
        self.seeded = 0
        self.stopped = False

    def settle(self) -> None:
        async def turns() -> None:
            for _ in range(12):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())

    def dispatch(self, op: str, body: Any = None, session: str | None = None) -> asyncio.Task[Reply]:
        task = self.loop.create_task(self.host.dispatch(Call(op, orjson.dumps(body or {}), session)))
        self.running.append(task)
        return task

    @rule(target=sessions, fails=st.booleans())
    def seed(self, fails: bool) -> str:
        number, self.seeded = self.seeded, self.seeded + 1
        task = self.dispatch("seed_session", {"number": number, "fails": fails})
        reply = self.loop.run_until_complete(task)
        assert (reply.status == 200) == (not fails and not self.stopped)
        return reply.session or "r.none"

    @rule(target=calls, session=sessions)
    def call(self, session: str) -> int:
        gate = len(self.env.gates)
        self.env.gates[gate] = asyncio.Event()
        self.dispatch("tools/work", {"gate": gate}, session)
        self.settle()
        return gate

    @rule(gate=calls)
    def let_go(self, gate: int) -> None:
        self.env.gates[gate].set()
        self.settle()

    @rule(which=st.integers(0, 100), settled=st.booleans())
    def cancel(self, which: int, settled: bool) -> None:
        if self.running:
            self.running[which % len(self.running)].cancel()
            if settled:
                self.settle()

    @rule(session=sessions, settled=st.booleans())
    def close(self, session: str, settled: bool) -> None:
        self.dispatch("close_session", session=session)
        if settled:
            self.settle()

    @rule(seconds=st.floats(0, 2 * TTL))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

        async def sweep() -> None:
            self.env.sessions.sweep()

        self.loop.run_until_complete(sweep())

    @precondition(lambda self: not self.stopped)
    @rule()
    def stop(self) -> None:
        self.stopped = True
        self.running.append(self.loop.create_task(self.host.stop()))  # type: ignore[arg-type]
        self.settle()

    @invariant()
    def no_session_closes_twice(self) -> None:
        assert all(count <= 1 for count in self.env.closes.values())

    def teardown(self) -> None:
        async def end() -> list[Any]:
            for gate in self.env.gates.values():
                gate.set()
            await self.host.stop()
            return await asyncio.gather(*self.running, return_exceptions=True)

        replies = self.loop.run_until_complete(end())
        self.loop.close()
        assert set(self.env.closes.values()) <= {1}
        assert len(self.env.sessions) == 0
        failures = [reply for reply in replies if isinstance(reply, Reply) and reply.status >= 500]
        assert all(b"no seed" in reply.body or b"is stopping" in reply.body for reply in failures), failures


class RacesOneByOne(Races):
    server = OneByOne


TestRaces = Races.TestCase
TestRaces.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestRacesOneByOne = RacesOneByOne.TestCase
TestRacesOneByOne.settings = TestRaces.settings


class Threaded(ResourcesServer):
    """Its tool runs in a thread that nobody can stop."""

    class Session(BaseModel):
        calls: int = 0

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.let_go = threading.Event()
        self.entered = threading.Event()
        self.at_the_same_time = 0
        self.inside = 0
        self.closed: list[int] = []

    @tool
    def work(self, session: Session) -> int:
        self.inside += 1
        self.at_the_same_time = max(self.at_the_same_time, self.inside)
        self.entered.set()
        self.let_go.wait(30)
        session.calls += 1
        self.inside -= 1
        return session.calls

    async def verify(self, request: VerifyRequest) -> Verdict:
        return Verdict(reward=0.0)

    def close(self, session: Session) -> None:  # type: ignore[override]
        self.closed.append(session.calls)


async def opened(host: ServerRunner) -> str:
    reply = await host.dispatch(Call("seed_session", b"{}"))
    assert reply.session is not None
    return reply.session


async def test_a_thread_whose_caller_is_gone_still_has_its_turn() -> None:
    server = Threaded()
    host = ServerRunner(server)
    session = await opened(host)
    first = asyncio.create_task(host.dispatch(Call("tools/work", b"{}", session)))
    await asyncio.to_thread(server.entered.wait, 30)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(host.dispatch(Call("tools/work", b"{}", session)))
    closing = asyncio.create_task(host.dispatch(Call("close_session", b"{}", session)))
    await asyncio.sleep(0)
    assert len(server.sessions) == 0
    assert server.closed == []
    server.let_go.set()
    with pytest.raises(SessionNotFound, match="closed while the call waited"):
        (await second).json()
    await closing
    assert server.at_the_same_time == 1
    assert server.closed == [1]


async def test_a_call_that_was_given_up_before_its_thread_began_never_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gym_serve.servers.threads._MOST", 1)
    server = Threaded()
    host = ServerRunner(server)
    server.let_go.set()
    free = threading.Event()
    occupied = server.sessions.threads.call(partial(free.wait, 30))
    session = await opened(host)
    task = asyncio.create_task(host.dispatch(Call("tools/work", b"{}", session)))
    for _ in range(5):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    free.set()
    await occupied.result
    await host.dispatch(Call("close_session", b"{}", session))
    assert server.closed == [0]


async def test_a_stop_waits_for_calls_also_where_no_hook_is_to_run() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    class Plain(ResourcesServer):
        @tool
        async def work(self) -> str:
            begun.set()
            await go_on.wait()
            return "done"

        def verify(self) -> float:
            return 0.0

    host = ServerRunner(Plain())
    call = asyncio.create_task(host.dispatch(Call("tools/work", b"{}")))
    await begun.wait()
    stop = asyncio.create_task(host.stop())
    await asyncio.sleep(0)
    assert not stop.done()
    go_on.set()
    await stop
    assert (await call).json() == "done"


async def test_a_stop_does_not_wait_for_a_call_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_serve.servers.sessions._STOP_SECONDS", 0.01)
    server = Threaded()
    host = ServerRunner(server)
    session = await opened(host)
    task = asyncio.create_task(host.dispatch(Call("tools/work", b"{}", session)))
    await asyncio.to_thread(server.entered.wait, 30)
    await host.stop()
    assert server.closed == [0]
    server.let_go.set()
    await task
    with pytest.raises(SessionLost):
        (await host.dispatch(Call("tools/work", b"{}", session))).json()
    with pytest.raises(Unavailable):
        (await host.dispatch(Call("seed_session", b"{}"))).json()


class BadHook(ResourcesServer):
    async def verify(self, request: VerifyRequest) -> Verdict:
        return Verdict(reward=0.0)

    async def close(self, session: Any) -> None:
        raise RuntimeError("the container does not answer")


async def test_a_hook_that_fails_is_logged_and_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    server = BadHook(session_ttl=10)
    host = ServerRunner(server)
    for _ in range(3):
        await opened(host)
    now = server.sessions.clock() + 11
    server.sessions.clock = lambda: now
    with caplog.at_level(logging.ERROR, "gym_serve"):
        server.sessions.sweep()
        await host.stop()
    assert len(server.sessions) == 0
    assert sum("the container does not answer" in str(record.exc_info) for record in caplog.records) == 3


class HangingHook(BadHook):
    async def close(self, session: Any) -> None:
        await asyncio.sleep(600)


class HangingInAThread(BadHook):
    def close(self, session: Any) -> None:  # type: ignore[override]
        threading.Event().wait(600)


@pytest.mark.parametrize("server", [HangingHook, HangingInAThread])
@pytest.mark.parametrize("limit", [0.2, None])  # of the call that closes the session; it stays open without
async def test_a_stop_waits_for_a_hanging_hook_to_its_limit(
    server: type[ResourcesServer],
    limit: float | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gym_serve.servers.sessions._CLOSE_SECONDS", 600 if limit else 0.2)
    host = ServerRunner(server())
    session = await opened(host)
    if limit is not None:
        closed = await host.dispatch(Call("close_session", b"{}", session, timeout=limit))
        assert closed.status == 504
    await asyncio.wait_for(host.stop(), 30)
    assert f"{server.__name__}.close (tests/servers/test_sessions_races.py:" in caplog.text
    assert session in caplog.text


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"snapshot": lambda self, session: 1}, "must define both `snapshot` and `restore`"),
        ({"restorable": True, "Session": dict}, "`Session` must be a pydantic model"),
        (
            {
                "restorable": True,
                "Session": type(
                    "Session", (BaseModel,), {"__annotations__": {"_secret": int}, "_secret": PrivateAttr(0)}
                ),
            },
            "_secret",
        ),
    ],
)
def test_a_class_whose_snapshots_could_not_be_complete_is_refused(body: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        type("Broken", (BadHook,), body)

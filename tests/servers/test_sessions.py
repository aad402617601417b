"""Sessions: pinned ids, state of their own, expiry, and a close that happens once."""

import asyncio

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from gym_serve import (
    ResourcesServer,
    ServerRunner,
    SessionLost,
    SessionNotFound,
    Verdict,
    VerifyRequest,
    tool,
)
from gym_serve.servers.context import CALLER
from gym_serve.servers.sessions import SessionTable, replica_of
from gym_serve.servers.transport import Call
from gym_serve.types.errors import Overloaded, SeedFailed

RESPONSE = {"response": {"output": []}}


class Counter(ResourcesServer):
    class Session(BaseModel):
        value: int = 0

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self.closed: list[int] = []

    async def seed(self, row: dict, session: Session) -> dict:
        session.value = row.get("start", 0)
        if session.value < 0:
            raise ValueError("negative")
        return {"started": session.value}

    @tool
    def increment(self, session: Session) -> int:
        session.value += 1
        return session.value

    async def verify(self, request: VerifyRequest, session: Session) -> Verdict:
        return Verdict(reward=float(session.value))

    async def close(self, session: Session) -> None:
        self.closed.append(session.value)


async def call(host: ServerRunner, op: str, body: object = None, session: str | None = None):
    return await host.dispatch(Call(op, orjson.dumps(body or {}), session))


async def test_a_session_keeps_its_state_from_seed_to_verify() -> None:
    host = ServerRunner(Counter(replica="r1"))
    seeded = await call(host, "seed_session", {"start": 5})
    assert seeded.json() == {"started": 5}
    assert replica_of(seeded.session or "") == "r1"
    for expected in (6, 7):
        assert (await call(host, "tools/increment", session=seeded.session)).json() == expected
    verdict = await call(host, "verify", RESPONSE, seeded.session)
    assert verdict.json() == {"reward": 7.0}


async def test_sessions_do_not_see_one_another() -> None:
    host = ServerRunner(Counter())
    ids = [(await call(host, "seed_session", {"start": n})).session for n in range(50)]
    await asyncio.gather(*(call(host, "tools/increment", session=i) for i in ids * 3))
    rewards = [(await call(host, "verify", RESPONSE, i)).json()["reward"] for i in ids]
    assert rewards == [n + 3.0 for n in range(50)]


async def test_sync_tools_of_one_session_do_not_race() -> None:
    host = ServerRunner(Counter())
    session = (await call(host, "seed_session")).session
    replies = await asyncio.gather(*(call(host, "tools/increment", session=session) for _ in range(100)))
    assert sorted(r.json() for r in replies) == list(range(1, 101))


async def test_close_is_safe_to_call_twice_and_closes_once() -> None:
    server = Counter()
    host = ServerRunner(server)
    session = (await call(host, "seed_session", {"start": 3})).session
    for _ in range(2):
        assert (await call(host, "close_session", session=session)).json() == {}
    assert server.closed == [3]
    assert len(server.sessions) == 0
    with pytest.raises(SessionNotFound):
        (await call(host, "tools/increment", session=session)).json()


async def test_a_seed_that_fails_leaves_no_session() -> None:
    server = Counter()
    reply = await call(ServerRunner(server), "seed_session", {"start": -1})
    assert reply.status == 500
    assert len(server.sessions) == 0


async def test_seeding_again_keeps_the_state() -> None:
    server = Counter()
    host = ServerRunner(server)
    first = await call(host, "seed_session", {"start": 5})
    await call(host, "tools/increment", session=first.session)
    again = await call(host, "seed_session", {"start": 0}, first.session)
    assert (again.session, again.json()) == (first.session, {"started": 5})
    assert (await call(host, "verify", RESPONSE, first.session)).json() == {"reward": 6.0}
    # A session that a tool call has opened was not seeded yet.
    opened = (await call(host, "tools/increment")).session
    assert (await call(host, "seed_session", {"start": 3}, opened)).session == opened
    assert (await call(host, "verify", RESPONSE, opened)).json() == {"reward": 3.0}
    await call(host, "close_session", session=first.session)
    fresh = await call(host, "seed_session", {"start": 1}, first.session)
    assert fresh.session not in (first.session, None)
    assert (await call(host, "verify", RESPONSE, fresh.session)).json() == {"reward": 1.0}
    assert len(server.sessions) == 2


async def test_a_seed_that_fails_in_an_open_session_may_be_sent_again() -> None:
    host = ServerRunner(Counter())
    opened = (await call(host, "tools/increment")).session
    failed = await call(host, "seed_session", {"start": -1}, opened)
    assert (failed.status, failed.session) == (SeedFailed.status, opened)
    assert (await call(host, "seed_session", {"start": 3}, opened)).json() == {"started": 3}


async def test_an_agent_that_wants_tools_is_answered_those_of_the_class() -> None:
    class Rows(Counter):
        async def seed(self, row: dict, session: Counter.Session) -> dict:
            return {"keys": sorted(row)}

    host = ServerRunner(Rows())
    row = {"responses_create_params": {"input": "x"}}
    offered = [spec.openai() for spec in Rows.tools.values()]
    assert [tool["name"] for tool in offered] == ["increment"]
    wanted = (await call(host, "seed_session", {**row, "_ng_wants_tools": True})).json()
    assert wanted == {"tools": offered, "keys": ["responses_create_params"]}
    assert (await call(host, "seed_session", row)).json() == {"keys": ["responses_create_params"]}


async def test_a_tool_call_without_a_session_opens_one() -> None:
    host = ServerRunner(Counter())
    first = await call(host, "tools/increment")
    assert first.session
    assert (await call(host, "tools/increment", session=first.session)).json() == 2


async def test_verify_without_a_session_leaves_none_behind() -> None:
    server = Counter()
    assert (await call(ServerRunner(server), "verify", RESPONSE)).json() == {"reward": 0.0}
    assert len(server.sessions) == 0


async def test_stop_closes_what_is_left() -> None:
    server = Counter()
    host = ServerRunner(server)
    await host.start()
    await call(host, "seed_session", {"start": 8})
    await host.stop()
    assert server.closed == [8]


def test_a_session_of_another_replica_is_lost_not_missing() -> None:
    table: SessionTable[None] = SessionTable("here", ttl=10)
    with pytest.raises(SessionLost, match="there"):
        table.get("there.abc", now=0)
    for unknown in ("here.abc", "abc", ""):
        with pytest.raises(SessionNotFound):
            table.get(unknown, now=0)


@given(st.lists(st.tuples(st.sampled_from(["open", "use", "close", "sweep"]), st.floats(0, 5)), max_size=60))
def test_sessions_expire_only_after_their_time_to_live(steps: list[tuple[str, float]]) -> None:
    """Against a model: a dict of the moments of last use."""
    table: SessionTable[None] = SessionTable("r", ttl=7)
    used: dict[str, float] = {}
    now = 0.0
    for action, passed in steps:
        now += passed
        if action == "open":
            used[table.open(None, now).id] = now
        elif action == "use" and used:
            session_id = min(used)
            table.get(session_id, now)
            used[session_id] = now
        elif action == "close" and used:
            session_id = max(used)
            assert table.pop(session_id) is not None
            assert table.pop(session_id) is None
            del used[session_id]
        elif action == "sweep":
            expired = table.expired(now)
            assert set(expired) == {i for i, moment in used.items() if now - moment > 7}
            for session_id in expired:
                table.pop(session_id)
                del used[session_id]
        assert len(table) == len(used)


def test_a_session_that_runs_a_call_does_not_expire() -> None:
    table: SessionTable[None] = SessionTable("r", ttl=1)
    session = table.open(None, now=0)
    session.running = 1
    assert table.expired(now=100) == []


async def test_a_client_that_only_seeds_leaves_room_for_episodes() -> None:
    counter = Counter(max_client_sessions=3)
    host = ServerRunner(counter)
    first = await call(host, "seed_session")
    await call(host, "seed_session")
    await call(host, "tools/increment")  # opens one as well
    for op in ("seed_session", "tools/increment"):
        refused = await call(host, op)
        assert refused.status == 429
        with pytest.raises(Overloaded, match="clients have 3 sessions open"):
            refused.json()
    seeds = [Call("seed_session", b"{}", affinity=f"rollout-{n}") for n in range(10)]
    assert [(await host.dispatch(seed)).status for seed in seeds] == [200] * 10
    assert (await call(host, "verify", RESPONSE)).status == 200
    await call(host, "close_session", session=first.session)
    assert (await call(host, "seed_session")).status == 200
    assert (await call(host, "seed_session")).status == 429


async def test_sessions_that_expire_make_room() -> None:
    counter = Counter(max_client_sessions=1, session_ttl=10)
    now = 0.0
    counter.sessions.clock = lambda: now
    host = ServerRunner(counter)
    assert (await call(host, "seed_session")).status == 200
    assert (await call(host, "seed_session")).status == 429
    now = 11.0
    counter.sessions.sweep()
    assert (await call(host, "seed_session")).status == 200


def test_sessions_of_a_dead_process_are_not_counted_and_end_soon() -> None:
    table: SessionTable[None] = SessionTable("r1", ttl=3600)
    opened = {}
    names = ("left", "taken over", "busy", "client", "of another")
    for name in names:
        CALLER.set("alive" if name == "of another" else "dead")
        opened[name] = table.open(None, 0.0, of_client=name == "client")
    opened["busy"].running = 1
    table.orphan("dead", 100.0)
    assert (len(table), table.wanted) == (5, 2)
    assert table.get(opened["taken over"].id, 120.0) is opened["taken over"]
    assert (table.expired(150.0), table.wanted) == ([], 3)
    assert table.expired(161.0) == [opened["left"].id]
    table.pop(opened["left"].id)
    assert (len(table), table.wanted) == (4, 3)
    opened["busy"].running, opened["busy"].used = 0, 200.0  # a tool of the dead process has returned
    assert table.expired(250.0) == []
    assert table.expired(261.0) == [opened["busy"].id]

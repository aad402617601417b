"""Failover: whenever a replica dies, the rollout is the one of the undisturbed run, byte for byte."""

import asyncio
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.failover import BytesChain, Chain, Death, JsonChain, MortalEdge

from gym_serve import (
    EnvironmentClient,
    ResourcesServer,
    ServerRunner,
    SessionLost,
    Unavailable,
    Verdict,
    VerifyRequest,
    tool,
)
from gym_serve.cluster.routing.failover import FailoverTransport
from gym_serve.deployments.simple_agent import SimpleAgent
from gym_serve.environments.mcqa import Mcqa
from gym_serve.environments.simple_weather import SimpleWeather
from gym_serve.servers.sessions import RESTORE
from gym_serve.servers.transport import Call, Reply, Transport, encode

ROW = {"responses_create_params": {"input": "go"}, "number": 7, "_ng_rollout_id": "0-0"}
CHAINS = [Chain, JsonChain, BytesChain]
DEATHS: list[Death] = ["before", "after", "noticed"]
TURNS = [("add", "a"), ("add_in_thread", "b"), ("add_and_fail", "c"), ("echo", "d"), ("add", "e")]


class FakeModel:
    """Makes the calls one by one, then answers with all that it saw."""

    async def responses(self, params: dict[str, Any]) -> dict[str, Any]:
        outputs = [i["output"] for i in params["input"] if i.get("type") == "function_call_output"]
        if len(outputs) < len(TURNS):
            name, what = TURNS[len(outputs)]
            arguments = orjson.dumps({"what": what}).decode()
            item = {"type": "function_call", "call_id": "c", "name": name, "arguments": arguments}
        else:
            text = {"type": "output_text", "text": " ".join(outputs), "annotations": []}
            item = {"type": "message", "role": "assistant", "content": [text]}
        return {"id": "r", "object": "response", "output": [item], "usage": None}

    async def chat_completions(self, body: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError("the agent speaks Responses")


async def episode(transport: Transport) -> dict[str, Any]:
    resources = EnvironmentClient(transport)
    agent = SimpleAgent(model=FakeModel(), resources=resources, max_steps=len(TURNS) + 1, timeline=False)
    return await agent.run(ROW)


@pytest.fixture(autouse=True)
def closed() -> list[str]:
    Chain.closed.clear()
    return Chain.closed


async def test_a_server_in_its_callers_process_takes_no_snapshots() -> None:
    server = JsonChain()
    assert (await ServerRunner(server).dispatch(Call("seed_session", encode(ROW)))).state is not None
    server.takes_snapshots = False
    assert (await ServerRunner(server).dispatch(Call("seed_session", encode(ROW)))).state is None


@pytest.mark.parametrize("chain", CHAINS)
async def test_every_death_at_every_call_leaves_the_rollout_as_it_is(
    chain: type[Chain], closed: list[str]
) -> None:
    undisturbed = MortalEdge(chain)
    expected = await episode(FailoverTransport(undisturbed))
    assert expected["calls"] == len(TURNS) + 1  # seed and verify as well, and echo not
    assert undisturbed.calls == [f"tools/{name}" for name, _ in TURNS] + ["verify", "close_session"]
    for number, call in enumerate(undisturbed.calls):
        for death in DEATHS:
            if (call, death) == ("close_session", "noticed"):
                continue  # to close what is not there is no failure
            closed.clear()
            transport = MortalEdge(chain, {number: death})
            failover = FailoverTransport(transport)
            assert orjson.dumps(await episode(failover)) == orjson.dumps(expected), (call, death)
            assert transport.replicas == 2
            assert transport.calls.count(RESTORE) == 1
            # A death after the hook ran, and before its answer was through, shows to no one.
            assert closed == [expected["digest"]] * (1 + (death == "after" and call == "close_session"))
            assert len(transport.host.server.sessions) == len(failover.states) == failover.states.bytes == 0  # type: ignore[attr-defined]


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.integers(0, 20), st.sampled_from(DEATHS), max_size=4), st.sampled_from(CHAINS))
def test_deaths_in_a_row_are_survived_too(deaths: dict[int, Death], chain: type[Chain]) -> None:
    """Unless one call loses its replica thrice: it may be what kills them."""
    expected = asyncio.run(episode(FailoverTransport(MortalEdge(chain))))
    transport = MortalEdge(chain, deaths)
    rollout = asyncio.run(episode(FailoverTransport(transport)))
    if "failure" in rollout:
        assert rollout["failure"]["kind"] == "session_lost"
        assert max(map(transport.calls.count, transport.calls)) >= 3
    else:
        assert orjson.dumps(rollout) == orjson.dumps(expected)


async def test_a_call_that_kills_every_replica_is_given_up() -> None:
    transport = MortalEdge(Chain, dict.fromkeys((0, 2, 4), "after"))
    rollout = await episode(FailoverTransport(transport))
    assert rollout["failure"]["kind"] == "session_lost"
    assert rollout["failure"]["retryable"] is True
    assert transport.calls == [
        "tools/add",
        RESTORE,
        "tools/add",
        RESTORE,
        "tools/add",
        "close_session",
        RESTORE,
        "close_session",
    ]


class Forgetful(Chain):
    """The same environment without snapshots."""

    restorable = False


async def test_without_a_state_the_session_is_lost() -> None:
    for death in DEATHS:
        transport = MortalEdge(Forgetful, {1: death})
        rollout = await episode(FailoverTransport(transport))
        failure = rollout["failure"]
        assert (failure["kind"], failure["stage"], failure["retryable"]) == ("session_lost", "tool", True)
        assert RESTORE not in transport.calls


async def seeded(transport: Transport) -> str:
    reply = await transport.call(Call("seed_session", encode(ROW)))
    assert reply.session is not None
    return reply.session


async def add(transport: Transport, session: str, what: str) -> Reply:
    reply = await transport.call(Call("tools/add", encode({"what": what}), session))
    reply.json()
    return reply


async def test_the_first_id_leads_to_the_session_wherever_it_went() -> None:
    transport = MortalEdge(Chain, {0: "before", 3: "before", 6: "before"})
    failover = FailoverTransport(transport)
    first = await seeded(failover)
    replies = [await add(failover, first, what) for what in "abcd"]
    assert [reply.session.split(".")[0] for reply in replies if reply.session] == ["r2", "r3", "r4", "r4"]
    middle = replies[1].session
    assert middle is not None
    verdict = await failover.call(Call("verify", b'{"response": {"output": []}}', middle))
    assert verdict.json()["calls"] == 6
    await failover.call(Call("close_session", session=first))
    assert len(failover.states) == failover.states.bytes == 0
    for session in (first, middle):
        with pytest.raises(SessionLost):
            await add(failover, session, "e")


async def test_a_state_stays_between_the_servers() -> None:
    failover = FailoverTransport(MortalEdge(Chain))
    session = await seeded(failover)
    reply = await add(failover, session, "a")
    assert reply.state is None


async def test_calls_at_the_same_time_move_their_session_once() -> None:
    transport = MortalEdge(Chain, {3: "after"})
    failover = FailoverTransport(transport)
    session = await seeded(failover)
    replies = await asyncio.gather(*(add(failover, session, str(n)) for n in range(20)))
    assert len({reply.body for reply in replies}) == 20
    assert transport.calls.count(RESTORE) == 1
    verdict = await failover.call(Call("verify", b'{"response": {"output": []}}', session))
    assert verdict.json()["calls"] == 22


class SlowAdder(ResourcesServer):
    """Calls of one session that do not wait for one another would be seen in a snapshot."""

    restorable = True

    class Session(Chain.Session):
        pass

    @tool
    async def add(self, session: Session) -> int:
        calls = session.calls
        session.digest = "half"
        await asyncio.sleep(0)
        session.calls, session.digest = calls + 1, ""
        return session.calls

    async def verify(self, request: VerifyRequest, session: Session) -> Verdict:
        return Verdict(reward=float(session.calls))

    async def snapshot(self, session: Session) -> Any:
        assert session.digest == ""
        return session.calls

    async def restore(self, state: Any) -> Session:
        return self.Session(calls=state)


async def test_a_snapshot_never_holds_half_of_another_call() -> None:
    failover = FailoverTransport(MortalEdge(SlowAdder))
    session = await seeded(failover)
    replies = await asyncio.gather(*(failover.call(Call("tools/add", b"{}", session)) for _ in range(30)))
    assert sorted(reply.json() for reply in replies) == list(range(1, 31))


class LateEdge(MortalEdge):
    """Holds back the answer of one call until it is let go."""

    late = -1

    async def call(self, call: Call) -> Reply:
        number = len(self.calls)
        reply = await super().call(call)
        if number == self.late:
            await self.let_go.wait()
        return reply


async def test_an_answer_that_comes_late_does_not_bring_back_an_old_state() -> None:
    transport = LateEdge(Chain)
    failover = FailoverTransport(transport)
    session = await seeded(failover)
    transport.late, transport.let_go = 0, asyncio.Event()
    first = asyncio.create_task(add(failover, session, "a"))
    await asyncio.sleep(0)
    await add(failover, session, "b")
    transport.let_go.set()
    await first
    transport.deaths[2] = "before"
    verdict = await failover.call(Call("verify", b'{"response": {"output": []}}', session))
    assert verdict.json()["calls"] == 4


async def test_a_gateway_that_missed_calls_does_not_bring_back_an_old_state() -> None:
    transport = MortalEdge(Chain)
    one, two = FailoverTransport(transport), FailoverTransport(transport)
    session = await seeded(one)
    session = (await add(two, session, "a")).session or ""
    session = (await one.call(Call("tools/echo", encode({"what": "x"}), session))).session or ""
    transport.deaths[2] = "before"
    with pytest.raises(SessionLost):
        await add(one, session, "b")  # it holds the state of seed


async def test_the_gateway_that_saw_the_last_call_goes_on() -> None:
    transport = MortalEdge(Chain, {2: "before"})
    one, two = FailoverTransport(transport), FailoverTransport(transport)
    session = await seeded(one)
    session = (await add(two, session, "a")).session or ""
    session = (await add(one, session, "b")).session or ""
    session = (await add(one, session, "c")).session or ""
    verdict = await one.call(Call("verify", b'{"response": {"output": []}}', session))
    assert verdict.json()["calls"] == 5


class Picky(Chain):
    """Takes no state of another replica."""

    async def restore(self, state: Any) -> Chain.Session:
        raise RuntimeError("made by another version")

    async def snapshot(self, session: Chain.Session) -> Any:
        return session.model_dump()


async def test_a_state_that_does_not_fit_is_a_lost_session() -> None:
    rollout = await episode(FailoverTransport(MortalEdge(Picky, {2: "before"})))
    assert rollout["failure"]["kind"] == "session_lost"
    assert "made by another version" in rollout["failure"]["detail"]


class StartingEdge(MortalEdge):
    """The replica that follows a dead one is not there at once."""

    refusals = 3

    async def call(self, call: Call) -> Reply:
        if call.op == RESTORE and self.refusals:
            self.refusals -= 1
            raise Unavailable("no replica is running")
        return await super().call(call)


async def test_a_restore_waits_for_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_serve.cluster.routing.failover._FIRST_PAUSE", 0.001)
    expected = await episode(FailoverTransport(MortalEdge(Chain)))
    assert await episode(FailoverTransport(StartingEdge(Chain, {1: "after"}))) == expected


async def test_a_restore_waits_no_longer_than_the_call() -> None:
    transport = StartingEdge(Chain, {0: "after"})
    transport.refusals = 1000
    failover = FailoverTransport(transport)
    session = await seeded(failover)
    with pytest.raises(SessionLost, match="no replica is running"):
        await failover.call(Call("tools/add", encode({"what": "a"}), session, timeout=0.01))


class Behind(Chain):
    """A session of another server, behind this one, is lost."""

    @tool
    async def add(self, what: str, session: Chain.Session) -> str:  # type: ignore[override]
        raise SessionLost("the browser is gone", server="browser")


async def test_the_loss_of_a_session_behind_the_server_is_not_its_own() -> None:
    transport = MortalEdge(Behind)
    failover = FailoverTransport(transport)
    session = await seeded(failover)
    reply = await failover.call(Call("tools/add", encode({"what": "a"}), session))
    with pytest.raises(SessionLost, match="browser"):
        reply.json()
    assert transport.calls == ["tools/add"]


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"state": 7}', b'{"state": "?"}', b'{"state": ""}', b'{"state": "AAAAAAAAAAFqbnVsbC0="}'],
)
async def test_what_is_no_state_opens_no_session(body: bytes) -> None:
    transport = MortalEdge(Chain)
    assert (await transport.call(Call(RESTORE, body))).status == 422
    assert len(transport.host.server.sessions) == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("environment", [SimpleWeather, Mcqa])
async def test_built_in_environments_survive(environment: type[ResourcesServer]) -> None:
    row = {**ROW, "options": [{"A": "1"}], "expected_answer": "A"}
    transport = MortalEdge(environment, {0: "before", 2: "before"})
    failover = FailoverTransport(transport)
    session = (await failover.call(Call("seed_session", encode(row)))).session
    if environment is SimpleWeather:
        await failover.call(Call("tools/get_weather", b'{"city": "Paris"}', session))
    text = {"type": "output_text", "text": "The answer is \\boxed{A}", "annotations": []}
    message = {"type": "message", "role": "assistant", "content": [text]}
    reply = await failover.call(Call("verify", encode({**row, "response": {"output": [message]}}), session))
    assert reply.json()["reward"] == 1.0
    assert RESTORE in transport.calls

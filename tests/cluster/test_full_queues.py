"""Replicas with full queues: a call goes to another one, and is `Overloaded` when all are full. No Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from support.no_parts import no_parts
from support.waiting import until

from gym_serve.cluster.routing.admission import Admission
from gym_serve.cluster.routing.balancing import members_of
from gym_serve.cluster.routing.replica_transport import ReplicaTransport
from gym_serve.cluster.routing.rpc import Address, Channel, Listener, QueueFullError
from gym_serve.servers.transport import Call, Reply
from gym_serve.types.errors import Overloaded


class Replica:
    """Works on one call, until told to end it, and lets one wait."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.end = asyncio.Event()
        self.admission = Admission(self._work, no_parts, lambda: (1, 1))
        self.listener = Listener(self.admission.dispatch, self.admission.stream, lambda: 0)

    async def _work(self, call: Call) -> Reply:
        await self.end.wait()
        return Reply(200, self.name.encode(), call.session)

    @property
    def busy(self) -> int:
        return self.admission.running + self.admission.waiting


class Handle:
    """What a transport asks of Serve's handle, as long as replicas run."""

    deployment_id = SimpleNamespace(app_name="full", name="server")
    is_initialized = True

    def options(self, method_name: str) -> Handle:
        return self

    async def shutdown_async(self) -> None:
        pass


@asynccontextmanager
async def deployment(*names: str) -> AsyncIterator[tuple[ReplicaTransport, list[Replica]]]:
    replicas = [Replica(name) for name in names]
    addresses: dict[str, Address] = {r.name: await r.listener.start("127.0.0.1") for r in replicas}

    async def get(replica: str) -> Address | None:
        return addresses.get(replica)

    transport: Any = ReplicaTransport("server", Handle())  # type: ignore[arg-type]
    transport._directory = SimpleNamespace(get=get)
    members_of("full", "server").update(names)
    try:
        yield transport, replicas
    finally:
        for replica in replicas:
            replica.end.set()
        await transport.close()
        for replica in replicas:
            await replica.listener.stop()


async def until_busy(replicas: list[Replica], calls: int) -> None:
    await until(lambda: sum(replica.busy for replica in replicas) >= calls)


async def test_all_places_of_all_replicas_are_taken_before_a_call_is_refused() -> None:
    async with deployment("a", "b", "c") as (transport, replicas):
        calls = [asyncio.create_task(transport.call(Call("run"))) for _ in range(6)]
        await until_busy(replicas, 6)
        assert [replica.busy for replica in replicas] == [2, 2, 2]
        with pytest.raises(Overloaded) as refused:
            await transport.call(Call("run"))
        assert (refused.value.server, refused.value.retry_after) == ("server", 1.0)
        for replica in replicas:
            replica.end.set()
        assert sorted([(await call).body for call in calls]) == [b"a", b"a", b"b", b"b", b"c", b"c"]


async def test_a_call_of_a_session_is_not_sent_to_another_replica() -> None:
    async with deployment("a", "b") as (transport, replicas):
        calls = [asyncio.create_task(transport.call(Call("touch", session="a.1"))) for _ in range(2)]
        await until_busy(replicas, 2)
        with pytest.raises(Overloaded):
            await transport.call(Call("touch", session="a.1"))
        assert [replica.busy for replica in replicas] == [2, 0]
        replicas[0].end.set()
        assert [(await call).body for call in calls] == [b"a", b"a"]


async def test_an_episode_moves_over_when_its_replica_is_full() -> None:
    async with deployment("a", "b") as (transport, replicas):
        calls = [asyncio.create_task(transport.call(Call("v1/responses", affinity="one"))) for _ in range(4)]
        await until_busy(replicas, 4)
        assert [replica.busy for replica in replicas] == [2, 2]
        for replica in replicas:
            replica.end.set()
        await asyncio.gather(*calls)


async def test_over_the_wire_a_refused_call_is_told_from_a_failed_one() -> None:
    async def failing(call: Call) -> Reply:
        if call.op == "full":
            raise QueueFullError("3 calls wait already")
        return Reply.failed(Overloaded("the endpoint says 429", retry_after=7.0))

    listener = Listener(failing, no_parts, lambda: 0)
    channel = await Channel.open(await listener.start("127.0.0.1"))
    with pytest.raises(QueueFullError, match="3 calls wait already"):
        await channel.call(Call("full"))
    assert (await channel.call(Call("v1/responses"))).status == 429
    assert (channel.calls, channel.load) == (0, 0)
    await channel.close()
    await listener.stop()

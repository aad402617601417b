"""Calls over one WebSocket: real sockets, no Ray."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress

import aiohttp
import pytest
from support.waiting import until

from gym_serve.cluster.routing.rpc import (
    Address,
    Channel,
    ConnectError,
    ConnectionLostError,
    ConnectTimeoutError,
    Listener,
    NotDeliveredError,
)
from gym_serve.cluster.routing.rpc import listener as listener_module
from gym_serve.cluster.routing.rpc.channel import LOAD, WINDOW, Notification, Outbox
from gym_serve.servers.context import CALLER
from gym_serve.servers.transport import Call, Reply
from gym_serve.types.errors import Conflict, DeadlineExceeded

Dispatch = Callable[[Call], Awaitable[Reply]]
Stream = Callable[[Call], AsyncIterator[bytes]]


async def echo(call: Call) -> Reply:
    return Reply(200, call.body, call.session)


async def echo_parts(call: Call) -> AsyncIterator[bytes]:
    """The lines of a body, one at a time."""
    for line in call.body.splitlines(keepends=True):
        yield line
        await asyncio.sleep(0)


@asynccontextmanager
async def connected(
    dispatch: Dispatch, load: int = 0, stream: Stream = echo_parts
) -> AsyncIterator[tuple[Listener, Channel]]:
    listener = Listener(dispatch, stream, lambda: load)
    channel = await Channel.open(await listener.start("127.0.0.1"))
    try:
        yield listener, channel
    finally:
        await channel.close()
        await listener.stop()


def address_of(listener: Listener) -> Address:
    assert listener._server is not None
    return Address(*listener._server.sockets[0].getsockname(), listener._token)


async def test_every_field_of_a_call_and_of_its_reply_arrives() -> None:
    seen = []

    async def dispatch(call: Call) -> Reply:
        seen.append(call)
        return Reply(418, b"\x00 no JSON \xff", "r.next")

    call = Call("tools/look", b"\xff\x00", "r.1", "request", "key", 2.5)
    async with connected(dispatch) as (_, channel):
        assert await channel.call(call) == Reply(418, b"\x00 no JSON \xff", "r.next")
    assert seen == [call]


async def test_many_calls_share_a_connection_and_each_gets_its_own_reply() -> None:
    async def dispatch(call: Call) -> Reply:
        await asyncio.sleep(int(call.body) % 7 / 1000)  # not in their order
        return await echo(call)

    async with connected(dispatch) as (listener, channel):
        replies = await asyncio.gather(*(channel.call(Call("op", b"%d" % n)) for n in range(500)))
        assert [reply.body for reply in replies] == [b"%d" % n for n in range(500)]
        assert (channel.calls, listener.calls) == (0, 0)


async def test_a_body_of_any_size() -> None:
    body = b"x" * 30_000_000
    async with connected(echo) as (_, channel):
        assert (await channel.call(Call("op", body))).body == body


async def test_cancelling_a_call_cancels_it_over_there() -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def dispatch(call: Call) -> Reply:
        if call.op == "echo":
            return await echo(call)
        try:
            begun.set()
            await asyncio.sleep(60)
        finally:
            cancelled.set()
        raise AssertionError

    async with connected(dispatch) as (listener, channel):
        task = asyncio.create_task(channel.call(Call("hang")))
        await begun.wait()
        task.cancel()
        await asyncio.wait_for(cancelled.wait(), 10)
        assert (await channel.call(Call("echo", b"1"))).body == b"1"  # the others go on
        await until(lambda: listener.calls == 0)
        assert channel.calls == 0


async def test_calls_that_are_given_up_before_they_begin_over_there_leave_nothing() -> None:
    async def read() -> None:
        async for _ in channel.stream(Call("op")):
            raise AssertionError("nobody waits for it")

    async with connected(echo) as (listener, channel):
        for _ in range(20):
            tasks = [asyncio.create_task(channel.call(Call("op"))), asyncio.create_task(read())]
            await asyncio.sleep(0)  # the request is written; it leaves together with what follows
            for task in tasks:
                task.cancel()
            assert all(
                isinstance(e, asyncio.CancelledError)
                for e in await asyncio.gather(*tasks, return_exceptions=True)
            )
        assert (await channel.call(Call("op", b"more"))).body == b"more"
        await until(lambda: listener.calls == 0)
        assert channel.calls == 0
        assert not any(connection.streams for connection in listener._connections)


async def test_a_caller_that_goes_away_cancels_its_calls() -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def dispatch(call: Call) -> Reply:
        try:
            begun.set()
            await asyncio.sleep(60)
        finally:
            cancelled.set()
        raise AssertionError

    async with connected(dispatch) as (_, channel):
        task = asyncio.create_task(channel.call(Call("hang")))
        await begun.wait()
        await channel.close()
        await asyncio.wait_for(cancelled.wait(), 10)
        with pytest.raises(ConnectionLostError):
            await task


async def test_a_replica_that_leaves_answers_what_it_has_begun() -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def dispatch(call: Call) -> Reply:
        begun.set()
        await go.wait()
        return await echo(call)

    async with connected(dispatch) as (listener, channel):
        task = asyncio.create_task(channel.call(Call("slow", b"1")))
        await begun.wait()
        leaving = asyncio.create_task(listener.stop())
        await asyncio.sleep(0.05)
        late = asyncio.create_task(channel.call(Call("late", b"2")))
        await asyncio.sleep(0.05)
        go.set()
        assert (await task).body == b"1"
        with pytest.raises(NotDeliveredError):  # so it may be sent elsewhere
            await late
        await leaving
        assert not channel.is_open
        with pytest.raises(NotDeliveredError):
            await channel.call(Call("later"))


async def test_a_connection_that_breaks_off_fails_what_waits() -> None:
    async def dispatch(call: Call) -> Reply:
        await asyncio.sleep(60)
        raise AssertionError

    async with connected(dispatch) as (listener, channel):
        task = asyncio.create_task(channel.call(Call("hang")))
        await until(lambda: listener.calls == 1)
        (connection,) = listener._connections
        transport = connection.socket._req.transport  # type: ignore[union-attr]
        transport.abort()  # type: ignore[union-attr]
        with pytest.raises(ConnectionLostError):
            await task
        assert not channel.is_open


async def test_nobody_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectError) as told:
            await Channel.open(Address("127.0.0.1", free.getsockname()[1], "token"))
    assert not isinstance(told.value, ConnectTimeoutError)


async def test_only_who_knows_the_token_may_call() -> None:
    listener = Listener(echo, echo_parts, lambda: 0)
    address = await listener.start("127.0.0.1")
    with pytest.raises(ConnectError, match="401"):
        await Channel.open(Address(address.host, address.port, "guessed"))
    await listener.stop()


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x93\x01\x02", b"\x91\x93\x00\x01\x02"])
async def test_a_frame_that_is_none_ends_only_its_connection(frame: bytes) -> None:
    listener = Listener(echo, echo_parts, lambda: 0)
    address = await listener.start("127.0.0.1")
    channel = await Channel.open(address)
    headers = {"authorization": f"Bearer {address.token}"}
    url = f"ws://{address.host}:{address.port}/"
    async with aiohttp.ClientSession() as client, client.ws_connect(url, headers=headers) as hostile:
        await hostile.send_bytes(frame)
        assert (await hostile.receive()).type is aiohttp.WSMsgType.CLOSE
    assert (await channel.call(Call("op", b"1"))).body == b"1"
    await channel.close()
    await listener.stop()


async def test_callers_hear_of_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_serve.cluster.routing.rpc.listener._LOAD_SECONDS", 0.01)
    async with connected(echo, load=17) as (_, channel):
        assert channel.load == 0
        await until(lambda: channel.load == 17)


async def test_who_is_too_busy_to_answer_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_serve.cluster.routing.rpc.channel._CONNECT_SECONDS", 0.1)
    # Its kernel accepts the connection, and the process never does.
    with socket.create_server(("127.0.0.1", 0)) as busy, pytest.raises(ConnectTimeoutError):
        await Channel.open(Address("127.0.0.1", busy.getsockname()[1], "token"))


async def test_nobody_waits_for_what_a_broken_connection_will_never_take() -> None:
    taken = asyncio.Event()

    async def send(frame: bytes) -> None:
        taken.set()
        await asyncio.Event().wait()  # a peer that reads no more

    outbox = Outbox(send)
    writer = asyncio.create_task(outbox.run())
    outbox.put(Notification(LOAD, [1]))
    await taken.wait()
    stopping = asyncio.create_task(outbox.flush())
    writer.cancel()  # as a connection does when it breaks
    await asyncio.wait_for(stopping, 10)
    assert writer.cancelled()
    outbox.put(Notification(LOAD, [2]))
    await asyncio.wait_for(outbox.flush(), 10)


async def test_the_parts_of_many_streams_come_in_their_order() -> None:
    async def read(body: bytes) -> bytes:
        return b"".join([part async for part in channel.stream(Call("op", body))])

    async with connected(echo) as (listener, channel):
        bodies = [b"".join(b"%d.%d\n" % (n, i) for i in range(5 * WINDOW)) for n in range(20)]
        assert await asyncio.gather(*map(read, bodies)) == bodies
        assert (channel.calls, listener.calls) == (0, 0)


async def test_a_stream_waits_for_its_reader_and_for_no_other() -> None:
    sent = 0

    async def count(call: Call) -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1
            yield b"%d\n" % sent

    async with connected(echo, stream=count) as (listener, channel):
        async with aclosing(channel.stream(Call("op"))) as parts:
            received = await anext(parts)
            assert received.startswith(b"1\n")
            await until(lambda: sent > WINDOW)
            assert (await channel.call(Call("op", b"other"))).body == b"other"
            assert sent == WINDOW + 1  # the last one waits for room
            while b"\n%d\n" % (2 * WINDOW) not in received:
                received += await anext(parts)
        await until(lambda: listener.calls == 0)  # closing it has ended it over there


async def test_a_stream_ends_in_its_failure() -> None:
    async def fail(call: Call) -> AsyncIterator[bytes]:
        yield b"begun"
        raise Conflict("not now", server="far")

    async with connected(echo, stream=fail) as (_, channel):
        parts = channel.stream(Call("op"))
        assert await anext(parts) == b"begun"
        with pytest.raises(Conflict, match="not now") as told:
            await anext(parts)
    assert told.value.server == "far"


async def test_a_stream_that_nobody_reads_ends_with_its_time() -> None:
    ended = asyncio.Event()

    async def endless(call: Call) -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x"
        finally:
            ended.set()

    async with connected(echo, stream=endless) as (listener, channel):
        parts = channel.stream(Call("op", timeout=0.2))
        await anext(parts)
        await asyncio.wait_for(ended.wait(), 10)
        await until(lambda: listener.calls == 0)
        with pytest.raises(DeadlineExceeded):
            async for _ in parts:
                pass


async def test_a_stream_breaks_with_its_connection() -> None:
    async def endless(call: Call) -> AsyncIterator[bytes]:
        while True:
            yield b"x"
            await asyncio.sleep(0.001)

    async with connected(echo, stream=endless) as (_, channel):
        parts = channel.stream(Call("op"))
        await anext(parts)
        await channel.close()
        with pytest.raises(ConnectionLostError):
            async for _ in parts:
                pass


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nx: ", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"])
async def test_who_shows_no_token_holds_no_connection(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(listener_module, "_MOST_OPENING", 20)
    async with connected(echo) as (listener, channel):
        address = address_of(listener)
        opened = [await asyncio.open_connection(address.host, address.port) for _ in range(100)]
        for _, writer in opened:
            writer.write(sent)
        await until(lambda: sum(r.at_eof() or r.exception() is not None for r, _ in opened) >= 80)
        assert len(listener._opening) <= 20
        assert (await channel.call(Call("op", b"still here"))).body == b"still here"
        another = await Channel.open(address)
        assert (await another.call(Call("op", b"and others"))).body == b"and others"
        await another.close()
        for _, writer in opened:
            writer.close()


async def test_half_a_request_is_given_up_after_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "_OPENING_SECONDS", 0.2)
    async with connected(echo) as (listener, channel):
        reader, writer = await asyncio.open_connection("127.0.0.1", address_of(listener).port)
        writer.write(b"GET / HTTP/1.1\r\nx: ")
        with suppress(ConnectionError):  # a reset
            assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()
        await asyncio.sleep(0.3)
        assert (await channel.call(Call("op", b"still here"))).body == b"still here"


async def test_a_replica_learns_who_calls_and_whose_last_connection_ends() -> None:
    lost: list[str] = []

    async def who(call: Call) -> Reply:
        return Reply(200, CALLER.get().encode(), None)

    listener = Listener(who, echo_parts, lambda: 0, lost.append)
    address = await listener.start("127.0.0.1")
    callers = ("agent-1", "agent-1", "agent-2", "")
    channels = [await Channel.open(address, caller) for caller in callers]
    said = [(await channel.call(Call("op", b""))).body.decode() for channel in channels]
    assert said == list(callers)
    await channels[0].close()
    await channels[3].close()
    await until(lambda: len(listener._connections) == 2)
    assert lost == []
    await channels[1].close()
    await until(lambda: lost)
    assert lost == ["agent-1"]
    await listener.stop()
    assert lost == ["agent-1"]
    await channels[2].close()

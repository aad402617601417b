"""`Channel`: a caller's end of the connection to one replica.

Its errors (`RpcError`) say whether a call may have run, which decides whether it is safe to run it again. The
transports turn them into the errors of `gym_serve.types.errors`.

The messages of a connection, and the `Outbox` that writes them in frames.

A frame is a MessagePack array of MessagePack-RPC messages: ``[0, id, method, params]`` asks, ``[1, id, error,
result]`` answers, ``[2, method, params]`` notifies. Beyond the specification, ``[3, id, method, params]``
asks for an answer in parts, and ``[4, id, data]`` is one part. A failure is a `Reply` like any other;
``error`` is the reason why a call was not begun.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Union

import aiohttp
import msgspec

from gym_serve.cluster.routing.rpc.network import CALLER_HEADER, Address, caller_context, enable_keepalive
from gym_serve.servers.transport import Call, Reply
from gym_serve.types.model_endpoint import ModelEndpoint

FULL = 64  # messages of a frame at most

CANCEL = "cancel"  # sent by the caller: it no longer waits for the call ``params[0]``

LOAD = "load"  # sent by the replica: it has ``params[0]`` live sessions and calls in progress

# Parts of an answer that the replica sends ahead of the caller's reader: all calls of two processes share a
# connection, which must not wait for a slow reader.
WINDOW = 64
TAKEN = (
    "taken"  # sent by the caller: it took ``params[1]`` more parts of the answer to the call ``params[0]``
)

_Text = Union[str, None]  # noqa: UP007  # on 3.10
Params = tuple[
    bytes,
    _Text,
    str,
    _Text,
    Union[float, None],  # noqa: UP007
    Union[ModelEndpoint, None],  # noqa: UP007
    _Text,
]


class Request(msgspec.Struct, array_like=True, tag=0, gc=False):
    """A call: its operation, and the further fields of `Call`."""

    id: int
    method: str
    params: Params

    @classmethod
    def of(cls, id: int, call: Call) -> Request:
        return cls(id, call[0], call[1:-1])

    @property
    def call(self) -> Call:
        return Call(self.method, *self.params)


class StreamRequest(Request, array_like=True, tag=3, gc=False):
    """A call whose answer comes in parts, before its reply."""


class Part(msgspec.Struct, array_like=True, tag=4, gc=False):
    """A part of the answer to a `StreamRequest`."""

    id: int
    data: bytes


class Response(msgspec.Struct, array_like=True, tag=1, gc=False):
    """The reply to a call, or why the replica did not begin with it."""

    id: int
    error: Union[str, None]  # noqa: UP007  # on 3.10
    result: Union[Reply, None]  # noqa: UP007


class Notification(msgspec.Struct, array_like=True, tag=2, gc=False):
    """`CANCEL`, `LOAD` or `TAKEN`."""

    method: str
    params: list[int]


Message = Union[Request, Response, Notification, StreamRequest, Part]  # noqa: UP007  # evaluated by msgspec on 3.10

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[list[Message]] = msgspec.msgpack.Decoder(list[Message])


def encode(messages: list[Message]) -> bytes:
    """One frame."""
    return _encoder.encode(messages)


def decode(frame: bytes) -> list[Message]:
    """The messages of a frame. Raises `msgspec.DecodeError` if it is none."""
    return _decoder.decode(frame)


class Outbox:
    """Writes messages.

    On an idle connection a message leaves in the next turn of the event loop. Under load, or while the peer
    reads slowly, the messages of many calls share a frame; of thousands, the first leave before the last.
    """

    def __init__(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._send = send
        self._waiting: list[Message] = []
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()
        self._ended = False

    def put(self, message: Message) -> None:
        self._waiting.append(message)
        self._filled.set()
        if not self._ended:
            self._emptied.clear()

    async def run(self) -> None:
        """Write what comes, until cancelled or the connection breaks. Raises `OSError` if it broke."""
        try:
            while True:
                await self._filled.wait()
                self._filled.clear()
                messages, self._waiting = self._waiting, []
                for first in range(0, len(messages), FULL):
                    await self._send(encode(messages[first : first + FULL]))
                if not self._waiting:
                    self._emptied.set()
        finally:
            self._ended = True
            self._emptied.set()

    async def flush(self) -> None:
        """Wait until everything is written, or nothing can be any more."""
        await self._emptied.wait()


logger = logging.getLogger("gym_serve")

_CONNECT_SECONDS = 5.0
_REPORT_EVERY = WINDOW // 4  # parts that a reader has taken


class RpcError(Exception):
    """A call did not return a reply. Which error it is says whether the call may have run.

    RpcError
    ├── ConnectError            not run: nothing listens at the address, or it refuses connections
    │   └── ConnectTimeoutError not run: the replica may be gone, or too busy to accept
    ├── NotDeliveredError       not run: the replica left before it began the call
    ├── QueueFullError          not run: too many calls wait at the replica
    └── ConnectionLostError     may have run
    """


class ConnectError(RpcError):
    """Nothing listens at the address of the replica, or it refuses connections."""


class ConnectTimeoutError(ConnectError):
    """The replica did not accept in time: its machine is gone, or it is too busy."""


class NotDeliveredError(RpcError):
    """The replica left before it began the call."""


class QueueFullError(RpcError):
    """Too many calls wait at the replica; it did not begin this one."""


class ConnectionLostError(RpcError):
    """The connection broke; the call may have run."""


class Channel:
    """An open connection; `open` makes one."""

    def __init__(self, client: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.load = 0
        """The load that the replica reported last, and the calls that were sent to it since then."""
        self._open = True
        self._client = client
        self._socket = socket
        self._outbox = Outbox(socket.send_bytes)
        self._ids = count()
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._streams: dict[int, asyncio.Queue[bytes | None]] = {}
        self._writer = asyncio.create_task(self._outbox.run())
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, address: Address, caller: str = "") -> Channel:
        """Connect. Raises `ConnectError` if the replica is gone or leaving, `ConnectTimeoutError` if it
        may be."""
        tls = caller_context()
        client = aiohttp.ClientSession()
        try:
            socket = await asyncio.wait_for(
                client.ws_connect(
                    f"{'ws' if tls is None else 'wss'}://{address.host}:{address.port}/",
                    headers={"authorization": f"Bearer {address.token}", CALLER_HEADER: caller},
                    max_msg_size=0,
                    ssl=tls or True,
                ),
                _CONNECT_SECONDS,
            )
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            await client.close()
            refused = getattr(error, "errno", None) == errno.ECONNREFUSED
            gone = refused or isinstance(error, aiohttp.WSServerHandshakeError)
            raise (ConnectError if gone else ConnectTimeoutError)(
                f"{type(error).__name__}: {error}"
            ) from error
        except BaseException:
            await client.close()
            raise
        enable_keepalive(socket.get_extra_info("socket"))
        return cls(client, socket)

    @classmethod
    @asynccontextmanager
    async def opened(cls, address: Address) -> AsyncIterator[Channel]:
        """A connection for as long as the block lasts; see `open`."""
        channel = await cls.open(address)
        try:
            yield channel
        finally:
            await channel.close()

    @property
    def is_open(self) -> bool:
        return self._open

    @property
    def calls(self) -> int:
        return len(self._waiting)

    async def call(self, call: Call) -> Reply:
        """Send a call and wait for its reply, or raise why there is none; cancelling cancels it at the
        replica."""
        number, reply = self._begin()
        self._outbox.put(Request.of(number, call))
        try:
            return await reply
        finally:
            self._end(number, reply)

    async def stream(self, call: Call) -> AsyncGenerator[bytes, None]:
        """Send a call and yield the parts of its answer; parts that wait for the reader are joined.

        Closing the generator cancels the call at the replica. Raises as `call`, or the failure of the call.
        """
        number, reply = self._begin()
        parts = self._streams[number] = asyncio.Queue()
        self._outbox.put(StreamRequest.of(number, call))
        taken = 0
        try:
            while (part := await parts.get()) is not None:
                ready = [part]
                while not parts.empty() and (part := parts.get_nowait()) is not None:
                    ready.append(part)
                yield b"".join(ready)
                if part is None:
                    break
                taken += len(ready)
                if taken >= _REPORT_EVERY:
                    self._outbox.put(Notification(TAKEN, [number, taken]))
                    taken = 0
            (await reply).json()
        finally:
            del self._streams[number]
            self._end(number, reply)

    def _begin(self) -> tuple[int, asyncio.Future[Reply]]:
        """The number of a new call, and its reply."""
        if not self._open:
            raise NotDeliveredError("the connection is closed")
        number = next(self._ids)
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        self.load += 1
        return number, reply

    def _end(self, number: int, reply: asyncio.Future[Reply]) -> None:
        """Forget a call; cancel it at the replica if it still runs."""
        if self._waiting.pop(number, None) and (reply.cancelled() or not reply.done()):
            self._outbox.put(Notification(CANCEL, [number]))
        if reply.done() and not reply.cancelled():
            reply.exception()  # a stream may be closed before it has read its failure

    async def close(self) -> None:
        """Close the connection; calls in progress are cancelled at the replica."""
        await self._socket.close()
        await self._reader

    async def _read(self) -> None:
        try:
            async for frame in self._socket:
                if frame.type is not aiohttp.WSMsgType.BINARY:
                    break
                for message in decode(frame.data):
                    if isinstance(message, Response):
                        self._answered(message)
                    elif isinstance(message, Part):
                        if (stream := self._streams.get(message.id)) is not None:
                            stream.put_nowait(message.data)
                    elif isinstance(message, Notification) and message.method == LOAD:
                        self.load = message.params[0]
        except msgspec.DecodeError as error:
            logger.error(
                "A replica sent a frame that cannot be read. Do both run the same version? %s", error
            )
        finally:
            self._open = False
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
            await self._client.close()
            self._ended()

    def _answered(self, response: Response) -> None:
        waiting = self._waiting.pop(response.id, None)
        self.load = max(0, self.load - 1)
        if waiting is None or waiting.done():
            return
        if (stream := self._streams.get(response.id)) is not None:
            stream.put_nowait(None)
        if response.result is None:
            waiting.set_exception(QueueFullError(response.error))
        else:
            waiting.set_result(response.result)

    def _ended(self) -> None:
        left = self._socket.close_code == aiohttp.WSCloseCode.GOING_AWAY
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(
                    NotDeliveredError("the replica left")
                    if left
                    else ConnectionLostError("the connection broke")
                )
        self._waiting.clear()
        for stream in self._streams.values():
            stream.put_nowait(None)

"""The messages of a connection, and the `Outbox` that writes them in frames.

A frame is a MessagePack array of MessagePack-RPC messages: ``[0, id, method, params]`` asks, ``[1, id, error,
result]`` answers, ``[2, method, params]`` notifies. Beyond the specification, ``[3, id, method, params]``
asks for an answer in parts, and ``[4, id, data]`` is one part. A failure is a `Reply` like any other;
``error`` is the reason why a call was not begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Union

import msgspec

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

"""For listeners that are asked for no stream."""

from __future__ import annotations

from collections.abc import AsyncIterator

from gym_serve.servers.transport import Call

__all__ = ["no_parts"]


async def no_parts(call: Call) -> AsyncIterator[bytes]:
    """Fails: nobody asks for a stream."""
    raise AssertionError(f"{call.op} was asked for a stream")
    yield b""

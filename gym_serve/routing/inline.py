"""The inline transport: an instance inside the caller's process, reached without any hop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from gym_serve.servers.runner import ServerRunner
from gym_serve.servers.transport import Call, Reply

__all__ = ["InlineTransport"]


class InlineTransport:
    """Reaches an instance inside this process.

    Args:
        host: runs the instance.
    """

    def __init__(self, host: ServerRunner) -> None:
        self.server = host.server.name
        self.host = host

    def call(self, call: Call) -> Coroutine[Any, Any, Reply]:
        """See `Transport.call`."""
        return self.host.dispatch(call)

    def stream(self, call: Call) -> AsyncGenerator[bytes, None]:
        """See `Transport.stream`."""
        return self.host.stream(call)

    async def close(self) -> None:
        """Nothing to release: whoever started the host stops it."""

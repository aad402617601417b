"""The inline edge: an instance inside the caller's process, reached without any hop."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from gym_serve.servers.edge import Call, Reply
from gym_serve.servers.host import Host

__all__ = ["InlineEdge"]


class InlineEdge:
    """Reaches an instance inside this process.

    Args:
        host: runs the instance.
    """

    def __init__(self, host: Host) -> None:
        self.server = host.server.name
        self.host = host

    def call(self, call: Call) -> Coroutine[Any, Any, Reply]:
        """See `Edge.call`."""
        return self.host.dispatch(call)

    async def close(self) -> None:
        """Nothing to release: whoever started the host stops it."""

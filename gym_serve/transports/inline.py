"""The inline transport: reaches a server inside the caller's process, without any hop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from gym_serve.servers.runner import ServerRunner
from gym_serve.servers.transport import Call, Reply


class InlineTransport:
    """Reaches a server inside this process."""

    def __init__(self, runner: ServerRunner) -> None:
        self.server = runner.server.name
        self.runner = runner

    def call(self, call: Call) -> Coroutine[Any, Any, Reply]:
        return self.runner.dispatch(call)

    def stream(self, call: Call) -> AsyncGenerator[bytes, None]:
        return self.runner.stream(call)

    async def close(self) -> None:
        """Nothing: whoever started the runner stops it."""

"""An endpoint that holds the answers to some prompts, and sees which requests are cancelled."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from support.upstream import ChatEndpoint

__all__ = ["HeldEndpoint", "graph_of", "row"]


class HeldEndpoint(ChatEndpoint):
    """Answers at once, but prompts with "slow" only when it is let.

    Attributes:
        held: the requests that wait.
        cancelled: how many requests their client took back.
    """

    handler_cancellation = True

    def __init__(self) -> None:
        self.held = 0
        self.cancelled = 0
        self._may = asyncio.Event()
        super().__init__("\\boxed{A}")

    def let(self) -> None:
        """Answer the requests that wait, and all later ones."""
        self._loop.call_soon_threadsafe(self._may.set)

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        if "slow" in str(body["messages"]):
            self.held += 1
            try:
                await self._may.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            finally:
                self.held -= 1
        return await super()._complete(request)


def graph_of(endpoint: ChatEndpoint) -> dict[str, Any]:
    """A graph whose policy is behind the endpoint."""
    return {
        "models": {"policy": {"type": "chat_model", "base_url": endpoint.url, "model": "m"}},
        "resources": {"mcqa": {"type": "mcqa"}},
        "agents": {"agent": {"type": "simple_agent", "model": "policy", "resources": "mcqa"}},
    }


def row(prompt: str) -> dict[str, Any]:
    """A row of `mcqa`."""
    return {"prompt": prompt, "options": [{"A": "one"}, {"B": "two"}], "expected_answer": "A"}

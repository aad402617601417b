"""`AsgiApp`: a web application in this process, from its start to its end, without a port.

Requests are awaited calls. What the application raises reaches the caller as the same exception, so that it
becomes a typed failure where all others do. Start and end are run by one task of their own: what a lifespan
opens (task groups, cancel scopes) has to be closed by the task that opened it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

import httpx

from gym_serve.servers.transport import encode

__all__ = ["Answer", "AsgiApp"]

_BASE = "http://in-process"


class Answer(NamedTuple):
    """An application's answer.

    Attributes:
        status: HTTP status.
        body: its bytes.
    """

    status: int
    body: bytes


class AsgiApp:
    """A Starlette or FastAPI application.

    Args:
        app: the application.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        self._transport = httpx.ASGITransport(app)
        self._end = asyncio.Event()
        self._life: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Run what the application does at its start; whatever that raises is raised."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live(ready))
        await ready

    async def stop(self) -> None:
        """Run what it does at its end."""
        self._end.set()
        if self._life is not None:
            await self._life

    async def post(
        self, path: str, body: Any, cookies: httpx.Cookies, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """A POST request with a JSON body.

        Args:
            path: of the route, escaped.
            body: anything that JSON can hold.
            cookies: sent with it; those that the answer sets are put there.
            headers: sent with it.

        Raises:
            Exception: whatever the application does not catch.
        """
        request = httpx.Request(
            "POST",
            f"{_BASE}{path}",
            content=encode(body),
            headers={**(headers or {}), "content-type": "application/json"},
        )
        cookies.set_cookie_header(request)
        response = await self._transport.handle_async_request(request)
        response.request = request
        content = await response.aread()
        cookies.extract_cookies(response)
        return Answer(response.status_code, content)

    async def _live(self, ready: asyncio.Future[None]) -> None:
        try:
            async with self.app.router.lifespan_context(self.app):
                ready.set_result(None)
                await self._end.wait()
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

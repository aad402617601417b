"""A server on loopback in a thread of its own: it answers while a test blocks, or its event loop is busy."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from aiohttp import web
from typing_extensions import Self

__all__ = ["ThreadedServer"]

T = TypeVar("T")


class ThreadedServer:
    """Serves inside a ``with`` block.

    Args:
        routes: what answers requests, by path.
        options: of `aiohttp.web.AppRunner`.

    Attributes:
        url: its address, from the start of the block on.
    """

    def __init__(
        self, routes: Mapping[str, Callable[[web.Request], Awaitable[web.StreamResponse]]], **options: Any
    ) -> None:
        self.url = ""
        self._routes, self._options = routes, options
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._start())
        return self

    def __exit__(self, *raised: object) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(self) -> None:
        app = web.Application(client_max_size=0)  # no limit
        for path, handler in self._routes.items():
            app.router.add_route("*", path, handler)
        self._runner = web.AppRunner(app, access_log=None, **self._options)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _stop(self) -> None:
        await self._runner.cleanup()

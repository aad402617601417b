"""An OpenAI-compatible Chat endpoint on loopback, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

from aiohttp import web


class ChatEndpoint:
    """Answers every chat completion with ``text``; counts the requests.

    Attributes:
        handler_cancellation: whether a client that goes away cancels its request.
        refuses: the status of every answer from request ``refuses_after`` on; None for none.
        fails: how many requests are answered with status 500 first.
    """

    handler_cancellation = False

    def __init__(self, text: str) -> None:
        self.text = text
        self.requests: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.refuses: int | None = None
        self.refuses_after = 0
        self.fails = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._runner, self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    def __enter__(self) -> ChatEndpoint:
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> tuple[web.AppRunner, str]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(app, handler_cancellation=self.handler_cancellation)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner, f"http://127.0.0.1:{runner.addresses[0][1]}/v1"

    async def _complete(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        self.headers.append(request.headers)
        if self.refuses is not None and len(self.requests) > self.refuses_after:
            return web.json_response({"error": {"message": "Incorrect API key"}}, status=self.refuses)
        if len(self.requests) <= self.fails:
            return web.json_response({"error": {"message": "out of order"}}, status=500)
        message = {"role": "assistant", "content": self.text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        return web.json_response(
            {
                "id": "c",
                "object": "chat.completion",
                "created": 1,
                "model": "m",
                "choices": [choice],
                "usage": usage,
            }
        )

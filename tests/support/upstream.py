"""An OpenAI-compatible Chat endpoint on loopback."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from aiohttp import web

from support.threaded import ThreadedServer


class ChatEndpoint(ThreadedServer):
    """Answers every chat completion with ``text``; counts the requests.

    Attributes:
        handler_cancellation: whether a client that goes away cancels its request.
        refuses: the status of every answer from request ``refuses_after`` on; None for none.
        refusal_headers: the headers of these answers.
        fails: how many requests are answered with status 500 first.
    """

    handler_cancellation = False

    def __init__(self, text: str) -> None:
        super().__init__(
            {"/v1/chat/completions": self._complete}, handler_cancellation=self.handler_cancellation
        )
        self.text = text
        self.requests: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.refuses: int | None = None
        self.refuses_after = 0
        self.refusal_headers: dict[str, str] = {}
        self.fails = 0

    async def _start(self) -> None:
        await super()._start()
        self.url += "/v1"

    async def _complete(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        self.headers.append(request.headers)
        if self.refuses is not None and len(self.requests) > self.refuses_after:
            phrase = HTTPStatus(self.refuses).phrase
            body = {"error": {"message": phrase}}
            return web.json_response(body, status=self.refuses, headers=self.refusal_headers)
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

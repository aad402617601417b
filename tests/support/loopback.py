"""An API of models and the HTTP face of a graph in front of it, both on loopback, in one thread without Ray.

The face is the real `Gateway`; only the transports are inline. So a test can hold the official clients
against it, and see at the other end what the API was asked.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson
from aiohttp import web
from pydantic import SecretStr

from gym_serve.graph import resolve
from gym_serve.graph.spec import GraphSpec
from support.in_process import InProcess
from support.threaded import ThreadedServer

__all__ = ["Gate", "Loopback", "chat_and_api"]

JSON = dict[str, Any]


def chat_and_api(url: str) -> JSON:
    """Models of both types in front of an API: ``chat`` speaks Chat Completions to it, ``api`` Responses."""
    backend = {"base_url": url, "model": "m", "max_retries": 0}
    return {
        "chat": {"type": "chat_model", **backend},
        "api": {"type": "openai_model", "api_key": "key-of-the-api", **backend},
    }


class Gate:
    """A place in a stream where the API waits until `Loopback.open` lets it go on."""

    def __init__(self) -> None:
        self.event = asyncio.Event()


class Loopback(ThreadedServer):
    """The API answers every request with ``reply(path, body)``.

    That is a JSON value, a (status, JSON value, headers), a list of the events of a stream, which may have
    gates and `ConnectionError` (the connection breaks) among them, or None: no answer at all.

    Attributes:
        url: address of the face.
        requests: (path, body) of every request that the API got.
        gone: set when a client of the API went away while it was answered.
    """

    def __init__(self, models: Callable[[str], JSON], auth_token: str | None = None) -> None:
        routes = {"/{path:.*}": self._answer}
        super().__init__(routes, handler_cancellation=True, shutdown_timeout=0.1)
        self.reply: Callable[[str, JSON], Any] = lambda path, body: None
        self.requests: list[tuple[str, JSON]] = []
        self.gone = threading.Event()
        self._models = models
        self._tokens = () if auth_token is None else (SecretStr(auth_token),)

    def open(self, gate: Gate) -> None:
        """Let the streams that wait at a gate go on."""
        self._loop.call_soon_threadsafe(gate.event.set)

    @property
    def asked(self) -> JSON:
        """The body of the last request that the API got."""
        return self.requests[-1][1]

    async def _start(self) -> None:
        await super()._start()
        graph = resolve(GraphSpec(models=self._models(f"{self.url}/v1")))
        self._face = InProcess({"": replace(graph, auth_tokens=self._tokens)})
        await self._face.start()
        self.url = self._face.url

    async def _stop(self) -> None:
        await self._face.stop()
        await super()._stop()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.requests.append((request.path, body))
        reply = self.reply(request.path, body)
        try:
            if reply is None:
                await asyncio.Event().wait()
            if isinstance(reply, list):
                return await self._stream(request, reply)
        except (asyncio.CancelledError, ConnectionError):
            self.gone.set()
            raise
        status, answer, headers = reply if isinstance(reply, tuple) else (200, reply, {})
        return web.Response(
            status=status, body=orjson.dumps(answer), content_type="application/json", headers=headers
        )

    async def _stream(self, request: web.Request, events: list[Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            if isinstance(event, Gate):
                await event.event.wait()
            elif isinstance(event, ConnectionError):
                assert request.transport is not None
                request.transport.abort()
                return response
            else:
                await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

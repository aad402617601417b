"""A model endpoint and an environment that hang where a row says so, and write down how that ends.

What is written down (`Notes`) is in files of one folder, where it can be read while a replica hangs.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from aiohttp import web
from pydantic import BaseModel

from gym_serve import ResourcesServer, Verdict, VerifyRequest, tool
from support.threaded import ThreadedServer

__all__ = ["HangingEndpoint", "HangingEnvironment", "Notes"]

JSON = dict[str, Any]


class Notes:
    """Moments, by the key of an episode.

    Args:
        folder: where they are kept.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def write(self, key: str, event: str) -> None:
        """Note that ``event`` happens now; once per key."""
        with (self._folder / f"{key}.{event}").open("x") as file:
            file.write(repr(time.time()))

    def read(self, key: str) -> dict[str, float]:
        """The events of a key, and when they happened."""
        files = list(self._folder.glob(f"{key}.*"))
        return {file.suffix[1:]: float(text) for file in files if (text := file.read_text())}


class HangingEnvironment(ResourcesServer):
    class Config(ResourcesServer.Config):
        notes: str

    class Session(BaseModel):
        key: str = ""

    config: Config

    async def seed(self, row: JSON, session: Session) -> None:
        session.key = row["key"]

    async def close(self, session: Session) -> None:
        if session.key:
            self._note(session, "closed")

    @tool
    async def hang(self, session: Session) -> None:
        """Never answer."""
        self._note(session, "hangs")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self._note(session, "cancelled")
            raise

    @tool
    def block(self, session: Session) -> None:
        """Block a thread for three seconds."""
        self._note(session, "hangs")
        time.sleep(3)
        self._note(session, "cancelled")

    async def verify(self, request: VerifyRequest, session: Session) -> Verdict:
        return Verdict(reward=1.0)

    def _note(self, session: Session, event: str) -> None:
        Notes(self.config.notes).write(session.key, event)


class HangingEndpoint(ThreadedServer):
    """Chat completions on loopback.

    The user's message is ``"{what} {key}"``; ``what`` is the tool to call, or ``model`` to hang right here.
    """

    def __init__(self, notes: Notes) -> None:
        routes = {"/v1/chat/completions": self._complete}
        super().__init__(routes, handler_cancellation=True, shutdown_timeout=0.1)
        self._notes = notes

    async def _start(self) -> None:
        await super()._start()
        self.url += "/v1"

    async def _complete(self, request: web.Request) -> web.Response:
        what, _, key = (await request.json())["messages"][0]["content"].partition(" ")
        if what == "model":
            self._notes.write(key, "hangs")
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self._notes.write(key, "cancelled")
                raise
        function = {"name": what, "arguments": "{}"}
        call = {"id": "c1", "type": "function", "function": function}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        body = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "usage": usage}
        return web.json_response({**body, "choices": [choice]})

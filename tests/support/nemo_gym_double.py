"""A resources server in the shape of NeMo Gym's: its web application, made without NeMo Gym.

Sessions are a cookie, which the application sets once. Notes are kept per session.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from pydantic import BaseModel

from gym_serve.interop.nemo_gym.construction import GraphServers
from gym_serve.interop.nemo_gym.hosting import NemoGym

COOKIE = "notebook"


class Note(BaseModel):
    """A note to take."""

    text: str


class Notebook:
    """The server: notes by session, and a judge that scores them."""

    def __init__(self, servers: GraphServers) -> None:
        self.servers = servers
        self.notes: dict[str, list[str]] = {}
        self.life: list[str] = []

    def setup_webserver(self) -> FastAPI:
        app = FastAPI(lifespan=self._lifespan)
        app.middleware("http")(self._with_session)
        app.post("/seed_session")(self.seed_session)
        app.post("/take_note")(self.take_note)
        app.post("/verify")(self.verify)
        app.post("/reset")(self.reset)
        app.post("/step")(self.step)
        app.post("/close")(self.close)
        app.post("/aggregate_metrics")(self.aggregate_metrics)
        app.post("/{tool}")(self.any_tool)
        return app

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self.life.append("started")
        async with asyncio.Lock():
            yield
        self.life.append("stopped")

    async def _with_session(
        self, request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        request.state.session = request.cookies.get(COOKIE) or uuid.uuid4().hex
        response = await call_next(request)
        response.set_cookie(COOKIE, request.state.session)
        return response

    def _notes(self, request: Request) -> list[str]:
        return self.notes.setdefault(request.state.session, [])

    async def seed_session(self, request: Request) -> dict[str, Any]:
        row = await request.json()
        if "first" not in row:
            raise HTTPException(422, "first: a field is missing")
        self._notes(request).append(row["first"])
        return {}

    async def take_note(self, request: Request, note: Note) -> dict[str, Any]:
        """Write a note down."""
        if note.text.isdecimal():
            raise HTTPException(int(note.text), "the desk is taken")
        if note.text == "explode":
            raise RuntimeError("the pen broke")
        self._notes(request).append(note.text)
        return {"count": len(self._notes(request))}

    async def any_tool(self, tool: str) -> Response:
        return Response(f"you called {tool}", media_type="text/plain")

    async def verify(self, request: Request) -> dict[str, Any]:
        body = await request.json()
        notes = self._notes(request)
        if "judge" not in body:
            return {**body, "reward": float(notes == body["expected"]), "notes": notes}
        answer = await self.servers.request("judge_model", "/v1/responses", {"input": " ".join(notes)})
        if not answer.ok:
            return {**body, "reward": 0.25, "status": answer.status}
        text = (await answer.json())["output"][0]["content"][0]["text"]
        return {**body, "reward": float(text == "good")}

    async def reset(self, request: Request) -> dict[str, Any]:
        self._notes(request).clear()
        return {"observation": "Write two notes.", "info": {}}

    async def step(self, request: Request) -> dict[str, Any]:
        body = await request.json()
        notes = self._notes(request)
        notes.append(body["response"]["output"][0]["content"])
        over = len(notes) == 2
        return {
            "observation": None if over else "One more.",
            "reward": 0.5,
            "terminated": over,
            "truncated": False,
            "info": {},
        }

    async def close(self, request: Request) -> dict[str, Any]:
        self.notes.pop(request.state.session, None)
        return {}

    async def aggregate_metrics(self, request: Request) -> dict[str, Any]:
        rollouts = (await request.json())["verify_responses"]
        return {"group_level_metrics": [], "agent_metrics": {"n": len(rollouts)}, "key_metrics": {}}


class HostedNotebook(NemoGym):
    """`Notebook` in a graph; the class of the settings is not looked at."""

    def make_app(self) -> tuple[Any, str | None]:
        self.notebook = Notebook(GraphServers(self.config.servers, "servers"))
        return self.notebook.setup_webserver(), None

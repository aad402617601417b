"""A model that answers when, and what, a test writes into a folder; an environment that tells how it ends.

    held = Held(folder)
    held.call("a", 0, "look_up", {"query": "weather"})   # the first answer to the row with the prompt "a"
    held.say("a", 1, "It is sunny.")

Files do for a graph on Ray what they do for one in this process.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from gym_serve import ModelServer, ResourcesServer, Verdict, VerifyRequest, tool

JSON = dict[str, Any]
_SECONDS = 0.01


class Held:
    """What the model is to answer, and what has happened.

    Args:
        folder: an empty one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def answer(self, key: str, turn: int, *items: JSON) -> None:
        """Let the model answer the call of a turn, from 0."""
        made = self.folder / f"{key}.{turn}.new"
        made.write_text(json.dumps(items))
        made.rename(self.folder / f"{key}.{turn}")

    def call(self, key: str, turn: int, name: str, arguments: JSON) -> None:
        """Let it call a tool."""
        call = {"type": "function_call", "call_id": f"call_{turn}", "name": name}
        self.answer(key, turn, {**call, "arguments": json.dumps(arguments)})

    def say(self, key: str, turn: int, text: str) -> None:
        """Let it say something, which ends the episode."""
        content = [{"type": "output_text", "text": text, "annotations": []}]
        self.answer(key, turn, {"type": "message", "role": "assistant", "content": content})

    def tell(self, key: str) -> None:
        """Let the slow tool answer."""
        (self.folder / f"{key}.told").touch()

    def graph(self, **agent: Any) -> JSON:
        """A graph with this model and environment."""
        folder = str(self.folder)
        return {
            "models": {"policy": {"type": HeldModel, "folder": folder}},
            "resources": {"library": {"type": Library, "folder": folder}},
            "agents": {
                "reader": {"type": "simple_agent", "model": "policy", "resources": "library", **agent}
            },
        }

    def has(self, key: str, event: str) -> bool:
        """Whether an event has happened.

        ``asked``: the model was; ``cancelled``: its request was; ``untold``: the slow tool was; ``closed``:
        the session is.
        """
        return (self.folder / f"{key}.{event}").exists()

    async def until(self, key: str, event: str) -> None:
        """Wait for it."""
        await _appears(self.folder / f"{key}.{event}")


async def _appears(file: Path) -> None:
    while True:
        if os.path.exists(file):  # noqa: ASYNC240  # a moment
            return
        await asyncio.sleep(_SECONDS)


def _note(folder: str, key: str, event: str) -> None:
    (Path(folder) / f"{key}.{event}").touch()


class HeldModel(ModelServer):
    """Answers what the folder says, as soon as it says it."""

    class Config(ModelServer.Config):
        folder: str

    config: Config

    async def responses(self, body: JSON) -> JSON:
        given = body["input"]
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        key = next(item["content"] for item in items if item.get("role") == "user").split()[0]
        turn = sum(item.get("type") == "function_call_output" for item in items)
        _note(self.config.folder, key, "asked")
        place = Path(self.config.folder) / f"{key}.{turn}"
        try:
            await _appears(place)
        except asyncio.CancelledError:
            _note(self.config.folder, key, "cancelled")
            raise
        usage = {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15}
        made = {"id": "resp", "object": "response", "created_at": 0, "model": "held", "usage": usage}
        return {**made, "status": "completed", "output": json.loads(place.read_text())}


class Library(ResourcesServer):
    """Knows everything about its only subject."""

    class Config(ResourcesServer.Config):
        folder: str

    class Session(BaseModel):
        key: str = ""

    config: Config

    async def seed(self, row: JSON, session: Session) -> None:
        session.key = str(row["responses_create_params"]["input"]).split()[0]

    @tool
    async def look_up(self, query: str) -> str:
        """Look a word up."""
        return f"There are three books about {query}."

    @tool
    async def ask_librarian(self, question: str, session: Session) -> str:
        """Ask somebody who takes her time."""
        try:
            await _appears(Path(self.config.folder) / f"{session.key}.told")
        except asyncio.CancelledError:
            _note(self.config.folder, session.key, "untold")
            raise
        return "The second shelf on the left."

    async def close(self, session: Session) -> None:
        _note(self.config.folder, session.key, "closed")

    async def verify(self, request: VerifyRequest, session: Session) -> Verdict:
        return Verdict(reward=1.0)

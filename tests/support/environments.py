"""Running an environment in a unit test, as a graph would: through a `ServerRunner`, with a session."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

from gym_serve.servers import Call, Reply, ResourcesServer, ServerRunner
from gym_serve.testing import ScriptedReplies, check_fixtures, load_fixtures, missing_kinds

__all__ = ["Bench", "Scripted", "called", "examples", "fixture_problems", "folder_of", "said"]


def folder_of(environment: type[ResourcesServer]) -> Path:
    """The folder of an environment: its README, data and fixtures."""
    return Path(inspect.getfile(environment)).parent


def examples(environment: type[ResourcesServer]) -> list[dict[str, Any]]:
    """Its example rows."""
    text = (folder_of(environment) / "data" / "example.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


async def fixture_problems(environment: type[ResourcesServer], **settings: Any) -> list[tuple[str, Any]]:
    """What is wrong with its fixtures: a kind that is missing, or a case that fails."""
    fixtures = load_fixtures(folder_of(environment) / "fixtures.jsonl")
    results = await check_fixtures(environment, fixtures, settings)
    missing = [("no fixture of the kind", kind) for kind in missing_kinds(fixtures)]
    return missing + [(result.name, result.problems) for result in results if not result.passed]


def said(*texts: str) -> list[dict[str, Any]]:
    """Output items: one assistant message per text."""
    return [
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
        for text in texts
    ]


def called(name: str, arguments: Any, call_id: str = "call_1") -> dict[str, Any]:
    """Output item: a function call; arguments that are no text are encoded."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": text}


class Scripted(ScriptedReplies):
    """A policy or judge that answers from a list, and remembers what it was asked; an error there is raised.

    Args:
        replies: texts, lists of output items, whole answers or errors.
    """

    def __init__(self, *replies: Any) -> None:
        super().__init__()
        self.replies = list(replies)
        self.asked: list[dict[str, Any]] = []

    async def responses(self, params: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(params)
        if self.replies and isinstance(self.replies[0], Exception):
            raise self.replies.pop(0)
        return await super().responses(params)

    @property
    def prompts(self) -> list[str]:
        """The last message of each call."""
        return [call["input"][-1]["content"] for call in self.asked]


class Bench:
    """An environment with one session.

    Args:
        server: the environment.
    """

    def __init__(self, server: ResourcesServer) -> None:
        self.host = ServerRunner(server)
        self.session: str | None = None

    async def call(self, op: str, body: Any = None) -> Any:
        """The answer of an operation, in the session; a failure is raised."""
        reply: Reply = await self.host.dispatch(Call(op, json.dumps(body or {}).encode(), self.session))
        self.session = reply.session
        return reply.json()

    async def tool(self, name: str, /, **arguments: Any) -> Any:
        """The answer of a tool."""
        return await self.call(f"tools/{name}", arguments)

    async def verify(self, row: dict[str, Any], output: list[dict[str, Any]]) -> dict[str, Any]:
        """The verdict on a response."""
        verdict: dict[str, Any] = await self.call("verify", {**row, "response": {"output": output}})
        return verdict

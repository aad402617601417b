"""An environment and a model for whole episodes, one script per scenario.

The row names its scenario in ``responses_create_params.user``, where the model sees it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import BaseModel

from gym_serve import (
    ModelServer,
    Overloaded,
    ResourcesServer,
    Unavailable,
    Verdict,
    VerifierFailed,
    VerifyRequest,
    tool,
)

Item = dict[str, Any]


def call(name: str, arguments: str, call_id: str = "c1") -> Item:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def say(text: str) -> Item:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": "m1", "role": "assistant", "status": "completed", "content": content}


def think(text: str) -> Item:
    return {"type": "reasoning", "id": "r1", "summary": [{"type": "summary_text", "text": text}]}


DONE = [say("done")]
SCRIPTS: dict[str, list[list[Item]]] = {
    "answer": [DONE],
    "tools offered": [[say("the model's own words")]],
    "reasoning": [[think("hm"), say("done")]],
    "two messages": [[say("one"), say("two")]],
    "one call": [[call("add", '{"amount": 2}')], DONE],
    "message and call": [[say("let me see"), call("add", '{"amount": 2}')], DONE],
    "calls in order": [[call("add", f'{{"amount": {n}}}', f"c{n}") for n in (3, 1, 2)], DONE],
    "sync tool": [[call("describe", "{}")], DONE],
    "no json": [[call("add", "{amount: 2}")], DONE],
    "python literal": [[call("add", "{'amount': 2}")], DONE],
    "array": [[call("add", "[]")], DONE],
    "null": [[call("add", "null")], DONE],
    "wrong type": [[call("add", '{"amount": "two"}')], DONE],
    "extra argument": [[call("add", '{"amount": 1, "session": {"total": 99}}')], DONE],
    "huge argument": [[call("add", '{"amount": "' + "x" * 2_000_000 + '"}')], DONE],
    "huge answer": [[call("add", '{"amount": "' + "x" * 10_000_000 + '"}')], DONE],
    "deep argument": [[call("add", "[" * 5000 + "]" * 5000)], DONE],
    "unknown tool": [[call("subtract", "{}")], DONE],
    "no name": [[{"type": "function_call", "call_id": "c1", "name": None, "arguments": "{}"}], DONE],
    "tool verify": [[call("verify", "{}")], DONE],
    "tool path": [[call("../verify", "{}")], DONE],
    "tool seed": [[call("add", '{"amount": 5}'), call("seed_session", "{}", "c2")], DONE],
    "tool close": [[call("close_session", "{}")], DONE],
    "tool describe op": [[call("v1/models", "{}")], DONE],
    "tool breaks": [[call("break_down", "{}")], DONE],
    "unicode": [[say("é😀\u2028")]],
    "lone surrogate": [[call("add", '{"amount": 2}'), say("\ud83d")], DONE],
    "big output": [[call("repeat", '{"times": 6000000}')], DONE],
    "only reasoning": [[think("1")], [think("2")], [think("3")], [think("4")]],
    "reasoning then answer": [[think("1")], DONE],
    "nothing": [[], [], [], []],
    "max steps": [[call("add", '{"amount": 1}')]],
    "cut off": [[call("add", '{"amount": 1}')], [call("add", '{"amount": 1}')]],
    "model down": [],
    "model busy": [],
    "model hangs": [],
    "model talks nonsense": [],
    "tool not there": [[call("unavailable", "{}")], DONE],
    "tool hangs": [[call("hang", "{}")], DONE],
    "seed fails": [DONE],
    "seed hangs": [DONE],
    "verifier fails": [DONE],
    "verifier breaks": [DONE],
    "verifier hangs": [DONE],
    "verifier says nan": [DONE],
}


class ScenarioModel(ModelServer):
    async def responses(self, body: Item) -> Item:
        scenario = body["user"]
        if scenario == "model down":
            raise Unavailable("the model is down")
        if scenario == "model busy":
            raise Overloaded("the model is busy", retry_after=2.0)
        if scenario == "model hangs":
            await asyncio.sleep(60)
        if scenario == "model talks nonsense":
            return {"hello": "world"}
        given = body["input"]
        turn = sum(
            1 for item in given if item.get("type") == "function_call_output" and item["call_id"] == "c1"
        )
        turn += sum(1 for item in given if item.get("type") == "reasoning") if scenario != "reasoning" else 0
        script = SCRIPTS[scenario]
        if scenario == "tools offered":
            script = [[say(" ".join(tool["name"] for tool in body["tools"]))]]
        cut = scenario == "cut off" and turn == 1
        return {
            "id": f"resp_{turn}",
            "object": "response",
            "created_at": 0.0,
            "model": "scenario",
            "output": script[min(turn, len(script) - 1)],
            "usage": {"input_tokens": len(given), "output_tokens": 1, "total_tokens": len(given) + 1},
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        }


class ScenarioEnvironment(ResourcesServer):
    class Session(BaseModel):
        scenario: str = ""
        total: int = 0

    async def seed(self, row: Item, session: Session) -> None:
        session.scenario = row["responses_create_params"]["user"]
        if session.scenario == "seed fails":
            raise Unavailable("no more sessions")
        if session.scenario == "seed hangs":
            await asyncio.sleep(60)

    @tool
    async def add(self, amount: int, session: Session) -> dict[str, int]:
        """Add to the total."""
        session.total += amount
        return {"total": session.total}

    @tool
    def describe(self, session: Session) -> str:
        """Say what the total is."""
        return f"the total is {session.total}"

    @tool
    def live(self) -> int:
        """How many sessions live here, the one of this call included."""
        return len(self.sessions)

    @tool
    def repeat(self, times: int) -> str:
        return "x" * times

    @tool
    def break_down(self) -> None:
        raise RuntimeError("sparks and smoke")

    @tool
    async def unavailable(self) -> None:
        raise Unavailable("the search engine is away")

    @tool
    async def hang(self) -> None:
        await asyncio.sleep(60)

    async def verify(self, request: VerifyRequest, session: Session) -> Verdict:
        if session.scenario == "verifier fails":
            raise VerifierFailed("the judge is away")
        if session.scenario == "verifier breaks":
            raise ZeroDivisionError("oops")
        if session.scenario == "verifier hangs":
            await asyncio.sleep(60)
        reward = float("nan") if session.scenario == "verifier says nan" else float(session.total)
        return Verdict(reward=reward, items=len(request.response.output), said=request.response.last_text)

"""A graph that asks for a bell to be rung, and an engine that rings it, for the tests of trainers' adapters.

The prompt says what happens: ``ring`` is done right, ``refuse`` is not, ``break`` fails in the environment,
``flaky`` fails there once, ``uneven`` is scored 1 and 0 in turn, and ``chatter`` never ends by itself.
"""

from __future__ import annotations

from typing import Any

from gym_serve import PolicyAnswer, PolicyRequest, ResourcesServer, Unavailable, Verdict, VerifyRequest, tool
from support.letters import END, Letters

CALL = '<tool_call>{"name": "ring", "arguments": {"times": 2}}</tool_call>  '
"""A call, with spaces that no template keeps."""
LOGPROB = -0.25


class Bell(ResourcesServer):
    """Rings."""

    has_failed = False
    scored = 0

    @tool
    async def ring(self, times: int) -> str:
        """Ring.

        Args:
            times: how often.
        """
        return "ding " * times

    async def verify(self, request: VerifyRequest) -> Verdict:
        asked = str(request.responses_create_params["input"])
        if "break" in asked:
            raise Unavailable("the bell is broken")
        if "flaky" in asked and not self.has_failed:
            self.has_failed = True
            raise Unavailable("the bell is broken for once")
        if "uneven" in asked:
            self.scored += 1
            return Verdict(reward=float(self.scored % 2))
        return Verdict(reward=float(request.response.last_text == "done"))


def bell_graph(**policy: Any) -> dict[str, Any]:
    """The model is one that no test can reach: the trainer takes its place."""
    model = {"type": "chat_model", "base_url": "http://127.0.0.1:9/v1", "model": "m", **policy}
    return {
        "models": {"policy": model},
        "resources": {"bell": {"type": Bell}},
        "agents": {"ringer": {"type": "simple_agent", "model": "policy", "resources": "bell"}},
    }


def said(text: str) -> str:
    """What the engine says to the text of a prompt."""
    if "refuse" in text:
        return "no"
    if "chatter" in text:
        return "and so on " * 100
    return "done" if "ding" in text else CALL


def tokens(prompt_ids: list[int], limit: int | None = None) -> tuple[list[int], str]:
    """The engine's tokens for a prompt, and why it stopped."""
    ids = [*Letters.ids(said(Letters().decode(prompt_ids))), END]
    return (ids, "stop") if limit is None or len(ids) <= limit else (ids[:limit], "length")


def sample(prompt_ids: list[int], sampling: dict[str, Any]) -> tuple[list[int], list[float], str]:
    """The engine, for an endpoint (`support.endpoint`)."""
    ids, finish = tokens(prompt_ids, sampling.get("max_tokens"))
    return ids, [LOGPROB] * len(ids), finish


async def answered(request: PolicyRequest, context: object = None) -> PolicyAnswer:
    """The engine."""
    ids, finish = tokens(request.prompt_ids, request.sampling.get("max_tokens"))
    return PolicyAnswer(ids, [LOGPROB] * len(ids), "length" if finish == "length" else "stop", versions="7")

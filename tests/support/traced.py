"""A graph whose rollouts have all kinds of spans: a tool, a judge, a model that fails at first."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

from gym_serve import ModelServer, ResourcesServer, Unavailable, Verdict, VerifyRequest, tool
from gym_serve.servers.clients import ModelClient
from support.scenarios import call, say

Item = dict[str, Any]


class TracedModel(ModelServer):
    """Calls a tool, then answers. It fails its first calls, as many as ``failures`` says."""

    class Config(ModelServer.Config):
        failures: int = 0

    config: Config

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.calls = 0

    async def responses(self, body: Item) -> Item:
        self.calls += 1
        if self.calls <= self.config.failures:
            raise Unavailable("the model is away")
        given = body["input"]
        ran = isinstance(given, list) and any(item.get("type") == "function_call_output" for item in given)
        wants_tool = bool(body.get("tools")) and not ran
        return {
            "id": "resp_1",
            "object": "response",
            "created_at": 0.0,
            "model": "a-model",
            "output": [call("add", '{"amount": 2}') if wants_tool else say("done")],
            "usage": {"input_tokens": 7, "output_tokens": 2, "total_tokens": 9},
        }


class Judged(ResourcesServer):
    """Asks a judge for its verdict."""

    class Config(ResourcesServer.Config):
        judge: ModelClient

    config: Config

    @tool
    async def add(self, amount: int) -> int:
        """Add one."""
        return amount + 1

    async def verify(self, request: VerifyRequest) -> Verdict:
        await self.config.judge.responses({"input": "Is that right?"})
        return Verdict(reward=1.0)


class Mortal(ResourcesServer):
    """Its tool kills the process that it runs in."""

    @tool
    async def add(self, amount: int) -> int:
        """Never returns."""
        logging.getLogger("an.author").warning("the last words")
        os.kill(os.getpid(), signal.SIGKILL)
        return amount

    async def verify(self, request: VerifyRequest) -> Verdict:
        return Verdict(reward=1.0)


def graph(**agents: Any) -> dict[str, Any]:
    """The graph; ``agents`` are its agents, by default one."""
    return {
        "tracing": 1,
        "models": {"policy": {"type": TracedModel}, "judge": {"type": TracedModel}},
        "resources": {"env": {"type": Judged, "judge": "judge"}},
        "agents": agents or {"agent": {"type": "simple_agent", "model": "policy", "resources": "env"}},
    }


ROW: Item = {"responses_create_params": {"input": "Add two."}}

TREE = """\
rollout
  attempt
    run
      invoke_agent AGENT
        seed_session
          seed_session
        chat policy
          v1/responses
        execute_tool add
          tools/add
        chat policy
          v1/responses
        verify
          verify
            chat judge
              v1/responses
        close_session
          close_session"""
"""The spans of one of its rollouts."""

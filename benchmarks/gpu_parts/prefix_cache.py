"""What the prefix caches of two engines hold of a conversation, by where its calls go."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from benchmarks.gpu_parts import engines
from gym_serve import AgentServer, Gym
from gym_serve.servers import Episode
from gym_serve.servers.context import current, use

TURNS = 8
SCENE = "You are asked about colours. " * 40


class Talk(AgentServer):
    """A conversation of some turns."""

    class Config(AgentServer.Config):
        """Settings."""

        sticky: bool = True
        """All calls of an episode go to one replica; else each goes to the less busy one."""

    config: Config

    async def act(self, episode: Episode) -> None:
        """Ask again and again."""
        for turn in range(TURNS):
            if turn:
                said = {"type": "message", "role": "user", "content": f"And another one, number {turn}?"}
                episode.append_items([said])
            context = current()
            with use(context if self.config.sticky else msgspec.structs.replace(context, affinity=None)):
                await episode.generate()


def figures(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Shares of the prompt tokens that were in a cache, and seconds."""
    device, on_gpu = arguments.device, arguments.device == "cuda"
    count, tokens = (128, 64) if on_gpu else (2, 8)
    folder = engines.smollm2(arguments)
    policy = engines.engine("vllm_engine", folder, device, 0.25, num_replicas=2)
    policy["extra_body"] = {"ignore_eos": True}
    agents = {
        name: {
            "type": "benchmarks.gpu_parts.prefix_cache:Talk",
            "model": "policy",
            "resources": "none",
            "inline": ["none"],
            "sticky": sticky,
            "max_ongoing_requests": 2 * engines.IN_FLIGHT,
        }
        for name, sticky in (("sticky", True), ("spread", False))
    }
    graph = {**engines.one_answer(policy), "agents": agents}
    with Gym.from_graph(graph, name="gpu") as gym:
        for number in range(2):  # the first run of each warms up
            for agent in agents:
                texts = [f"Conversation {number} {agent} {n}. {SCENE}{engines.PROMPT}" for n in range(count)]
                begun = time.monotonic()
                given = [{"prompt": text, "expected_answer": "blue"} for text in texts]
                params = {"temperature": 1.0, "max_output_tokens": tokens}
                rollouts = gym.run(given, agent=agent, concurrency=count, params=params)
                seconds = time.monotonic() - begun
                usage = [rollout["model_usage"]["model"]["policy"] for rollout in rollouts]
                cached, read = (sum(one[f"{kind}_tokens"] for one in usage) for kind in ("cached", "input"))
                yield {
                    f"{agent}: prompt tokens in the cache, share": cached / read,
                    f"{agent}: seconds of {count} conversations of {TURNS} turns": seconds,
                }

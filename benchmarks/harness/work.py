"""The work of every benchmark: an episode with one tool call (seed, model, tool, model, verify, close)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.loopback import Behaviour
from gym_serve.environments.simple_weather import weather_in

__all__ = ["ROOT", "TOOL_ARGUMENTS", "graph", "model_behaviour", "rows"]

ROOT = Path(__file__).parents[2]
"""The repository."""

TOOL_ARGUMENTS = '{"city":"Paris"}'
"""What the model calls the tool with."""

_CITY = "Paris"


def rows(count: int) -> list[dict[str, Any]]:
    """Rows of one question, which the model answers rightly: a reward of 1 says that all was done."""
    data = ROOT / "environments" / "simple_weather" / "data" / "example.jsonl"
    row = json.loads(data.read_text().splitlines()[0])
    assert row["verifier_metadata"]["cities"] == [_CITY]
    del row["agent_ref"]
    return [{**row, "number": number} for number in range(count)]


def model_behaviour(latency_ms: float = 0.0, tokens: int = 0) -> Behaviour:
    """The model: asks the tool, then tells what it said.

    Args:
        latency_ms: milliseconds between a request and its answer.
        tokens: how many each of the two turns samples, with ids and log-probabilities; 0 sends none.
    """
    condition, temperature = weather_in(_CITY)
    answer = f"It is {condition} in {_CITY}, with {temperature} degrees Celsius."
    return Behaviour(arguments=TOOL_ARGUMENTS, answer=answer, latency_ms=latency_ms, tokens=tokens)


def graph(
    model_url: str,
    *,
    inline: bool = False,
    agent_replicas: int = 1,
    in_flight: int = 4096,
    token_ids: bool = False,
) -> dict[str, Any]:
    """A graph of one model, one environment and one agent.

    Args:
        model_url: the model server.
        inline: run model and environment inside the agent's replicas.
        agent_replicas: number of those.
        in_flight: calls that each replica works on at the same time; further ones wait.
        token_ids: ask the model for the ids and log-probabilities of its tokens.
    """
    # Inlined servers have replicas of their own only where something else calls them.
    unused = {"autoscaling": {"min_replicas": 0, "max_replicas": 1}} if inline else {}
    return {
        "models": {
            "policy": {
                "type": "chat_model",
                "base_url": f"{model_url}/v1",
                "model": "loopback",
                "return_token_ids": token_ids,
                "max_ongoing_requests": in_flight,
                **unused,
            }
        },
        "resources": {"weather": {"type": "simple_weather", **unused}},
        "agents": {
            "agent": {
                "type": "simple_agent",
                "model": "policy",
                "resources": "weather",
                "num_replicas": agent_replicas,
                "max_ongoing_requests": in_flight,
                "inline": ["weather", "policy"] if inline else [],
            }
        },
    }

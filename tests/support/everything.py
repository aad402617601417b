"""Every environment that ships, in a form that runs offline, and one agent for all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gym_serve.environments
from gym_serve import AgentServer, EnvironmentClient
from gym_serve.deployments.gymnasium_agent import GymnasiumAgent
from gym_serve.deployments.simple_agent import SimpleAgent

__all__ = ["JUDGE", "OFFLINE", "Everything", "rows", "shipped"]

JSON = dict[str, Any]
ROOT = Path(gym_serve.environments.__path__[0])

OFFLINE: dict[str, JSON] = {
    "code_gen": {"sandbox": "process"},
    "equivalence_llm_judge": {"judge": "judge"},
    "genrm_compare": {"genrm": "judge", "message_format": "prompt"},
    "google_search": {"mode": "replay"},
    "gymnasium": {"env_id": "FrozenLake-v1", "env_kwargs": {"is_slippery": False}},
    "instruction_following": {},
    "math_with_code": {"sandbox": "process"},
    "math_with_judge": {"should_use_judge": False},
    "mcqa": {},
    "multi_step_synonyms": {},
    "reasoning_gym": {"sandbox": "process", "num_processes": 1},
    "session_counter": {},
    "shapes": {},
    "simple_weather": {},
    "string_match": {},
    "structured_outputs": {},
    "text_to_sql": {"judge": "judge", "sandbox": "process"},
    "tool_argument_comparison": {},
    "tool_call_multireward": {},
    "workplace_assistant": {},
    "xlam_fc": {},
}
"""Settings by type; ``judge`` is a model of `JUDGE`."""

JUDGE: JSON = {
    "type": "scripted_model",
    "script": [
        [
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "[[A=B]]", "annotations": []}],
            }
        ]
    ],
}

_STEPPED = {"gymnasium"}
_FIRST_TURN = {
    "code_gen",
    "structured_outputs",
    "tool_argument_comparison",
    "tool_call_multireward",
    "xlam_fc",
}


def shipped() -> set[str]:
    """The folders of all environments, without those that need bubblewrap."""
    return {path.parents[1].name for path in ROOT.glob("*/data/example.jsonl")} - {"workspace"}


def rows(name: str, count: int) -> list[JSON]:
    """Rows of an environment, without the agent that its own graph has."""
    lines = (ROOT / name / "data" / "example.jsonl").read_text("utf-8").splitlines()[:count]
    few = [{**json.loads(line), "environment": name} for line in lines]
    for row in few:
        row.pop("agent_ref", None)
    return few


class Everything(AgentServer):
    """Runs a row in the environment that its key ``environment`` names."""

    class Config(AgentServer.Config):
        resources: EnvironmentClient | None = None  # type: ignore[assignment]
        environments: dict[str, EnvironmentClient]

    config: Config

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._agents = {
            name: (GymnasiumAgent if name in _STEPPED else SimpleAgent)(
                name=name,
                model=self.config.model,
                resources=client,
                max_steps=1 if name in _FIRST_TURN else 10,
            )
            for name, client in self.config.environments.items()
        }

    async def run(self, row: JSON) -> JSON:
        return await self._agents[row["environment"]].run(row)

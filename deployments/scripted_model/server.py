"""`scripted_model`: a policy without a model, for first runs and for tests.

Deterministic: what it answers depends on its seed, the request and the episode's affinity key
(the rollout id), never on time, order or replica. So a rollout is the same over every transport, and
its repeats differ.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from typing import Any

from pydantic import Field

from gym_serve.deployments.scripted_model import answers, scripts, tokens
from gym_serve.servers import ModelServer
from gym_serve.servers.context import current
from gym_serve.types.errors import Unavailable
from gym_serve.types.requests import input_items

__all__ = ["ScriptedModel"]

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class ScriptedModel(ModelServer):
    """The embedded policy."""

    class Config(ModelServer.Config):
        """Settings of the policy. Rates are probabilities, 0 to 1."""

        seed: int = 0
        """Changes every draw."""
        skill: float = Field(0.7, ge=0, le=1)
        """How often it takes the right way through a row that it knows."""
        environments: tuple[str, ...] | None = None
        """Shipped environments whose example rows it knows; all if left out."""
        script: list[answers.Turn] | None = None
        """Fixed output items, turn by turn, instead of all that."""
        latency: float = Field(0.0, ge=0)
        """Seconds before it answers."""
        error_rate: float = Field(0.0, ge=0, le=1)
        """How often it is unavailable."""
        hang_rate: float = Field(0.0, ge=0, le=1)
        """How often it never answers."""

    config: Config

    def __init__(self, *, name: str | None = None, **settings: Any) -> None:
        super().__init__(name=name, **settings)
        known = () if self.config.script is not None else self.config.environments
        self._answer_key = answers.load_answer_key(known)

    async def responses(self, body: dict[str, Any]) -> dict[str, Any]:
        """See `ModelServer.responses`.

        Raises:
            Unavailable: an injected error.
        """
        items = input_items(body["input"])
        prompt = tokens.render_prompt(body, items)
        draw = self._draw("call", prompt)
        await asyncio.sleep(self.config.latency)
        if draw.random() < self.config.error_rate:
            raise Unavailable("an injected error", server=self.name)
        if draw.random() < self.config.hang_rate:
            await asyncio.Event().wait()
        return self._response(body, prompt, self._turn(body, items))

    def _turn(self, body: dict[str, Any], items: list[dict[str, Any]]) -> answers.Turn:
        if self.config.script is not None:
            return scripts.turn_after(self.config.script, items)
        found = answers.known_row(self._answer_key, items)
        if found is None:
            return scripts.improvise(body, items)
        known, said, since = found
        # What the user said since is part of the draw: told that it was wrong, it may think better.
        draw = self._draw("skill", list(said.encode("utf-8", "replace")))
        turn = scripts.scripted(known, draw.random() < self.config.skill, since, draw)
        return scripts.improvise(body, items) if turn is None else turn

    def _response(self, body: dict[str, Any], prompt: list[int], turn: answers.Turn) -> dict[str, Any]:
        digest = self._digest("id", prompt)
        output = [dict(item) for item in turn]
        for index, item in enumerate(output):
            item.setdefault(
                "id", f"{_PREFIXES.get(item.get('type', 'message'), 'item')}_{digest[:16]}{index}"
            )
            if item.get("type") == "function_call" and item.get("call_id", "").startswith("call_"):
                item["call_id"] = f"call_{digest[:16]}{index}"
        generated = [token for item in output for token in tokens.render(item)]
        if output:
            output[-1] |= {
                "prompt_token_ids": prompt,
                "generation_token_ids": generated,
                "generation_log_probs": tokens.log_probs(generated, digest),
            }
        return {
            "id": f"resp_{digest[:24]}",
            "object": "response",
            "created_at": 0.0,
            "status": "completed",
            "model": body.get("model") or self.name,
            "output": output,
            "usage": {
                "input_tokens": len(prompt),
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": len(generated),
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": len(prompt) + len(generated),
            },
            "error": None,
            "incomplete_details": None,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata"),
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "temperature": body.get("temperature"),
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_p": body.get("top_p"),
        }

    def _digest(self, purpose: str, prompt: list[int]) -> str:
        parts = f"{self.config.seed}|{purpose}|{current().affinity}|{prompt}"
        return hashlib.sha256(parts.encode()).hexdigest()

    def _draw(self, purpose: str, prompt: list[int]) -> random.Random:
        return random.Random(self._digest(purpose, prompt))

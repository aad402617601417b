"""`scripted_model`: a policy without a model, for first runs and for tests.

Its answers depend on its seed, the request and the episode's affinity key, never on time, order or replica.

Its tokens are UTF-8 bytes, and one marker before every item. The tokens of an item depend on it alone, so
those of a turn are a prefix of every later prompt that contains it: the contiguity that trainers assert.

It refuses the bodies that OpenAI's API and vLLM both answer with a 400, so that what works with it is not
refused by its first real endpoint. A model's name may be missing, as the models of a graph set their own.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
import time
from typing import Any

import orjson
from pydantic import Field

from gym_serve.deployments.scripted_answers import (
    Turn,
    improvise,
    known_row,
    load_answer_key,
    scripted,
    turn_after,
)
from gym_serve.servers import ModelServer
from gym_serve.servers.context import current
from gym_serve.types.errors import BadRequest, Unavailable
from gym_serve.types.protocols.bodies import Misfit, misfits
from gym_serve.types.requests import JSON, input_items

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_LONGEST_ID = 64
_MOST_CALLS = 128


def check_body(body: JSON) -> None:
    """Check a body of ``POST /v1/responses``. Raises BadRequest: a real endpoint would refuse it; names the
    place, and what must be there.
    """
    if (misfit := next(misfits(body), None)) is not None:
        raise BadRequest(f"`{misfit.place}` {misfit}")
    _check_calls(body["input"] if isinstance(body.get("input"), list) else [])


def _check_calls(items: list[Any]) -> None:
    """Earlier calls: what the chat templates of vLLM, SGLang and llama.cpp, and OpenAI's API, refuse."""
    ids: set[str] = set()
    in_a_row = 0
    for index, item in enumerate(items):
        in_a_row = in_a_row + 1 if item.get("type") == "function_call" else 0
        if not in_a_row:
            continue
        name, call_id, arguments = item["name"], item["call_id"], item["arguments"]
        try:
            fits = isinstance(json.loads(arguments), dict)
        except (ValueError, RecursionError):
            fits = False
        for key, is_sound, wanted in (
            ("name", _NAME.fullmatch(name), "1 to 64 of the characters a-z, A-Z, 0-9, _, - and ."),
            ("call_id", 1 <= len(call_id) <= _LONGEST_ID, f"1 to {_LONGEST_ID} characters"),
            ("call_id", call_id not in ids, "an id of its own"),
            ("arguments", fits, "a JSON object"),
        ):
            if not is_sound:
                raise BadRequest(f"`input[{index}].{key}` {Misfit('', wanted, item[key])}")
        ids.add(call_id)
        if in_a_row > _MOST_CALLS:
            raise BadRequest(f"`input` must have at most {_MOST_CALLS} calls in a turn")


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
        script: list[Turn] | None = None
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
        self._answer_key = load_answer_key(known)

    async def responses(self, body: dict[str, Any]) -> dict[str, Any]:
        check_body(body)
        items = input_items(body["input"])
        prompt = render_prompt(body, items)
        metadata = self.metadata()
        draw = self._draw("call", prompt)
        await asyncio.sleep(self.config.latency)
        if draw.random() < self.config.error_rate:
            raise Unavailable("an injected error", server=self.name)
        if draw.random() < self.config.hang_rate:
            await asyncio.Event().wait()
        response = self._response(body, prompt, self._turn(body, items))
        for item in response["output"][-1:]:
            item.update(metadata)
        return response

    def _turn(self, body: dict[str, Any], items: list[dict[str, Any]]) -> Turn:
        if self.config.script is not None:
            return turn_after(self.config.script, items)
        match = known_row(self._answer_key, items)
        if match is None:
            return improvise(body, items)
        known, user_text, since = match
        # What the user said since is part of the draw: told that it was wrong, it may think better.
        draw = self._draw("skill", list(user_text.encode("utf-8", "replace")))
        turn = scripted(known, draw.random() < self.config.skill, since, draw)
        return improvise(body, items) if turn is None else turn

    def _response(self, body: dict[str, Any], prompt: list[int], turn: Turn) -> dict[str, Any]:
        digest = self._digest("id", prompt)
        output = [dict(item) for item in turn]
        for index, item in enumerate(output):
            item.setdefault(
                "id", f"{_PREFIXES.get(item.get('type', 'message'), 'item')}_{digest[:16]}{index}"
            )
            if item.get("type") == "function_call" and item.get("call_id", "").startswith("call_"):
                item["call_id"] = f"call_{digest[:16]}{index}"
        generated = [token for item in output for token in render(item)]
        if output:
            output[-1] |= {
                "prompt_token_ids": prompt,
                "generation_token_ids": generated,
                "generation_log_probs": log_probs(generated, digest),
            }
        return {
            "id": f"resp_{digest[:24]}",
            "object": "response",
            "created_at": time.time(),
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


_MARKERS = {"system": 256, "user": 257, "assistant": 258, "reasoning": 259, "function_call": 260}
_OUTPUT, _TOOLS, _OTHER, VOCABULARY = 261, 262, 263, 264


def render_prompt(params: dict[str, Any], items: list[dict[str, Any]]) -> list[int]:
    """Tokens of a whole request: instructions and tools first, then the input items in order."""
    tokens: list[int] = []
    if instructions := params.get("instructions"):
        tokens += [_MARKERS["system"], *str(instructions).encode("utf-8", "replace")]
    if tools := params.get("tools"):
        tokens += [_TOOLS, *orjson.dumps(tools)]
    for item in items:
        tokens += render(item)
    return tokens


def render(item: dict[str, Any]) -> list[int]:
    """Tokens of one item: its marker, then what it says."""
    kind = item.get("type", "message")
    if kind == "message":
        role = {"developer": "system"}.get(str(item.get("role")), str(item.get("role")))
        return [_MARKERS.get(role, _OTHER), *_bytes(item.get("content"))]
    if kind == "function_call":
        return [_MARKERS[kind], *_bytes([item.get("name"), item.get("arguments")])]
    if kind == "function_call_output":
        return [_OUTPUT, *_bytes(item.get("output"))]
    if kind == "reasoning":
        return [_MARKERS[kind], *_bytes(item.get("summary"))]
    return [_OTHER, *_bytes(item)]


def log_probs(tokens: list[int], seed: str) -> list[float]:
    """One natural-log probability per token, made up, the same for the same seed."""
    draw = random.Random(seed)
    return [-draw.expovariate(4.0) for _ in tokens]


def _bytes(value: Any) -> bytes:
    if isinstance(value, list):
        return b"".join(_bytes(v.get("text") if isinstance(v, dict) and "text" in v else v) for v in value)
    if isinstance(value, str):
        return value.encode("utf-8", "replace")
    return b"" if value is None else orjson.dumps(value)

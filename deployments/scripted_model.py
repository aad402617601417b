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
from collections.abc import Mapping
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
from gym_serve.types.requests import JSON, input_items

_ROLES = ("user", "assistant", "system", "developer")
_CHOICES = ("auto", "none", "required")
_CHAT_KEYS = ("tool_calls", "reasoning_content", "reasoning")  # of a chat message that needs no content
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_LONGEST_ID = 64
_MOST_CALLS = 128
_RANGES = {"temperature": (0.0, 2.0), "top_p": (0.0, 1.0)}
_TYPES: Mapping[str, tuple[type, str]] = {
    "model": (str, "a string"),
    "instructions": (str, "a string"),
    "parallel_tool_calls": (bool, "a boolean"),
    "metadata": (dict, "an object"),
    "tools": (list, "a list of tools"),
}


def check_body(body: JSON) -> None:
    """Check a body of ``POST /v1/responses``. Raises BadRequest: a real endpoint would refuse it; names the
    place, and what must be there.
    """
    for key, (kind, wanted) in _TYPES.items():
        _require(isinstance(body.get(key), kind | None), key, wanted, body.get(key))
    for key, (low, high) in _RANGES.items():
        value = body.get(key)
        fits = value is None or (_is_number(value) and low <= value <= high)
        _require(fits, key, f"a number from {low:g} to {high:g}", value)
    limit = body.get("max_output_tokens")
    fits = limit is None or (_is_number(limit) and limit >= 1 and float(limit).is_integer())
    _require(fits, "max_output_tokens", "an integer of at least 1", limit)
    choice = body.get("tool_choice")
    fits = choice is None or isinstance(choice, dict) or choice in _CHOICES
    _require(fits, "tool_choice", f"one of {', '.join(_CHOICES)}, or an object", choice)
    for index, tool in enumerate(body.get("tools") or ()):
        _check_tool(tool, f"tools[{index}]")
    items = body["input"] if isinstance(body.get("input"), list) else []
    for index, item in enumerate(items):
        _check_item(item, f"input[{index}]")
    _check_calls(items)


def _check_tool(tool: Any, where: str) -> None:
    _require(isinstance(tool, dict), where, "an object", tool)
    if tool.get("type", "function") == "function":  # else one that an API itself runs
        name, parameters = tool.get("name"), tool.get("parameters")
        _require(isinstance(name, str) and name != "", f"{where}.name", "a string", name)
        _require(isinstance(parameters, dict | None), f"{where}.parameters", "a JSON schema", parameters)


def _check_item(item: Any, where: str) -> None:
    _require(isinstance(item, dict), where, "an object", item)
    match item.get("type") or "message":
        case "message":
            _check_message(item, where)
        case "function_call":
            for key in ("call_id", "name", "arguments"):
                _require(isinstance(item.get(key), str), f"{where}.{key}", "a string", item.get(key))
        case "function_call_output":
            call_id, output = item.get("call_id"), item.get("output")
            _require(isinstance(call_id, str), f"{where}.call_id", "a string", call_id)
            _require(isinstance(output, str | list), f"{where}.output", "a string or a list of parts", output)


def _check_calls(items: list[Any]) -> None:
    """Earlier calls: what the chat templates of vLLM, SGLang and llama.cpp, and OpenAI's API, refuse."""
    ids: set[str] = set()
    in_a_row = 0
    for index, item in enumerate(items):
        in_a_row = in_a_row + 1 if item.get("type") == "function_call" else 0
        if not in_a_row:
            continue
        name, call_id, arguments = item["name"], item["call_id"], item["arguments"]
        where = f"input[{index}]"
        characters = "1 to 64 of the characters a-z, A-Z, 0-9, _, - and ."
        _require(_NAME.fullmatch(name) is not None, f"{where}.name", characters, name)
        fits = 1 <= len(call_id) <= _LONGEST_ID
        _require(fits, f"{where}.call_id", f"1 to {_LONGEST_ID} characters", call_id)
        _require(call_id not in ids, f"{where}.call_id", "an id of its own", call_id)
        ids.add(call_id)
        try:
            fits = isinstance(json.loads(arguments), dict)
        except (ValueError, RecursionError):
            fits = False
        _require(fits, f"{where}.arguments", "a JSON object", arguments)
        if in_a_row > _MOST_CALLS:
            raise BadRequest(f"`input` must have at most {_MOST_CALLS} calls in a turn")


def _check_message(item: JSON, where: str) -> None:
    role, content = item.get("role"), item.get("content")
    if role == "tool" and item.get("tool_call_id"):
        return  # a chat message, as rows may have
    _require(role in _ROLES, f"{where}.role", f"one of {', '.join(_ROLES)}", role)
    if isinstance(content, str) or (role == "assistant" and any(item.get(key) for key in _CHAT_KEYS)):
        return
    _require(isinstance(content, list), f"{where}.content", "a string or a list of parts", content)
    for index, part in enumerate(content or ()):
        at = f"{where}.content[{index}]"
        _require(isinstance(part, dict), at, "an object", part)
        kind, text = part.get("type"), part.get("text")
        _require(isinstance(kind, str), f"{at}.type", "a string", kind)
        if kind in ("input_text", "output_text", "text"):
            _require(isinstance(text, str), f"{at}.text", "a string", text)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require(fits: bool, place: str, wanted: str, value: Any) -> None:
    if not fits:
        shown = "null" if value is None else repr(value)[:60]
        raise BadRequest(f"`{place}` must be {wanted}, got {shown}")


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
        found = known_row(self._answer_key, items)
        if found is None:
            return improvise(body, items)
        known, said, since = found
        # What the user said since is part of the draw: told that it was wrong, it may think better.
        draw = self._draw("skill", list(said.encode("utf-8", "replace")))
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

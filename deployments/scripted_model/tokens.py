"""A byte-level tokenizer: ids 0..255 are UTF-8 bytes, and one marker stands before every item.

What an item renders to depends on that item alone, so the tokens of a turn are a prefix of every
later prompt that contains it: the contiguity that trainers assert (docs/formats.md, Training tokens).
"""

from __future__ import annotations

import random
from typing import Any

import orjson

__all__ = ["log_probs", "render", "render_prompt"]

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

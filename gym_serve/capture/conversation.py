"""Which earlier conversation an input continues: digests of its turns, robust to how a harness repeats them.

A harness sends back what it was told in its own form: it drops item ids, status and reasoning, re-encodes
arguments, and splits or joins messages. A *turn* is what does not change: everything that the assistant said
and called in a row, or one message or tool output of somebody else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import orjson

from gym_serve.types.errors import BadRequest
from gym_serve.types.requests import JSON

Prefix = tuple[int, bytes]
"""Where a turn ends, as a number of items, and the digest of the conversation up to there."""


def prefixes(items: Sequence[JSON]) -> list[Prefix]:
    """The ends of all turns of a conversation, in order; turns without content are none."""
    marks: list[Prefix] = []
    value = b""
    for end, turn in _turns(items):
        value = hashlib.sha256(value + _bytes(turn)).digest()
        marks.append((end, value))
    return marks


def digest(items: Sequence[JSON]) -> bytes:
    """The digest of a whole conversation."""
    marks = prefixes(items)
    return marks[-1][1] if marks else b""


def is_said(item: JSON) -> bool:
    """Whether an item is the assistant's."""
    kind = item.get("type", "message")
    return kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant")


def _turns(items: Sequence[JSON]) -> Iterator[tuple[int, Any]]:
    end = 0
    for is_own, group in groupby(items, key=is_said):
        run = list(group)
        if is_own:
            end += len(run)
            if turn := _assistant_turn(run):
                yield end, turn
            continue
        for item in run:
            end += 1
            if item.get("type") == "function_call_output":
                yield end, ["output", item.get("call_id"), _content(item.get("output"))]
            elif item.get("type", "message") == "message":
                role = item.get("role")
                yield end, ["system" if role == "developer" else role, _content(item.get("content"))]
            else:
                yield end, item


def _assistant_turn(run: Sequence[JSON]) -> Any:
    """What the assistant said and called; None if that is nothing."""
    messages = (item for item in run if item.get("type", "message") == "message")
    text = "".join(_content(message.get("content")) for message in messages).strip()
    calls = [
        [item.get("call_id"), item.get("name"), _decoded(item.get("arguments"))]
        for item in run
        if item.get("type") == "function_call"
    ]
    return ["assistant", text, calls] if text or calls else None


def _content(content: Any) -> str:
    """Content as one text; parts that are no text are written as JSON."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    return "".join(_part(part) for part in parts if part is not None)


def _part(part: Any) -> str:
    if isinstance(part, dict):
        text = part.get("text") or part.get("refusal")
        if isinstance(text, str):
            return text
    return _bytes(part).decode("utf-8", "replace")


def _bytes(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # a lone surrogate, an integer over 64 bits, or nested deeply
        pass
    try:
        return repr(value).encode("utf-8", "replace")
    except RecursionError:
        raise BadRequest("the conversation has a value that is nested too deeply") from None


def _decoded(arguments: Any) -> Any:
    """The arguments of a call without the ways in which JSON can be written.

    Numbers are doubles, as a harness in JavaScript has no others. Nothing is the empty object.
    """
    if not isinstance(arguments, str):
        return arguments
    try:
        decoded = json.loads(arguments or "{}", parse_int=_double, parse_float=_double)
        orjson.dumps(decoded)
    except (ValueError, TypeError, RecursionError):  # no JSON, or none that another side could write again
        return arguments
    return decoded


def _double(text: str) -> float:
    return float(text) + 0.0  # JavaScript writes -0.0 as 0

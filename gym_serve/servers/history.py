"""`History`: what a model is sent of its episode, always in a form that strict endpoints take.

An endpoint may refuse what a model wrote: vLLM, SGLang and llama.cpp parse the arguments of earlier calls;
OpenAI's API wants safe names, ids of 64 characters, and at most 128 calls a turn. A refusal would end the
episode without a reward, and so a policy could turn its zeros into failures. So, in the history alone:

- arguments that are no JSON object, or are nested too deeply for a parser that recurses, stand in one:
  ``{"invalid_arguments": "<what the model wrote>"}``; none at all, and ``null``, are ``{}``
- a name that no tool has gets safe characters
- of the calls of a turn the first ones stay, and the last output says that others did not run

Ids that are missing or there twice are mended in the rollout too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

import orjson

from gym_serve.types.errors import EndpointMisconfigured, NotFound, Rejected
from gym_serve.types.exact import is_empty, is_shallow
from gym_serve.types.protocols import TOKEN_KEYS
from gym_serve.types.requests import JSON

# Keys of the last item of a turn that belong to the whole model call.
CALL_KEYS = (*TOKEN_KEYS, "routed_experts", "weight_version", "weight_versions")

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")
_ID = re.compile(r"[!-~]{1,64}")  # ASCII without spaces
_MOST_CALLS = 128  # of OpenAI's API
_SHOWN = 4096  # characters of arguments that are no JSON


class History:
    """The items that the next model call is sent, after a prompt whose calls a model may have written as
    well."""

    def __init__(self, items: list[JSON], most_calls: int) -> None:
        self.items = [_readable_call(item) if _is_call(item) else item for item in items]
        self._most_calls = min(max(1, most_calls), _MOST_CALLS)
        self._ids = {str(item.get("call_id")) for item in items if _is_call(item)}
        self._numbers: dict[str, int] = {}  # the last one of each id that was given twice
        self._left_out: set[Any] = set()  # ids of calls
        self._accepted = 0  # how many items the endpoint has taken
        self._written = 0  # how many of the others the model wrote

    def identified(self, turn: list[JSON]) -> list[JSON]:
        """A turn of the model whose calls all have an id of their own."""
        if not any(_is_call(item) for item in turn):
            return turn
        return [self._identified(item) if _is_call(item) else item for item in turn]

    def add_turn(self, turn: list[JSON], tools: Collection[str]) -> None:
        """Add what the model wrote, with its token ids; those of the turn before are not sent again."""
        if any(TOKEN_KEYS[0] in item for item in turn):
            self.items = list(map(_without_tokens, self.items))
        calls = [item for item in turn if _is_call(item)]
        if calls:
            turn = self._sent(turn, calls, tools)
        self.items = self.items + turn
        self._written = len(turn)

    def add(self, items: list[JSON]) -> None:
        if self._left_out:
            items = self._shown(items)
        self.items = self.items + items

    def accept(self) -> None:
        self._accepted, self._written = len(self.items), 0

    @property
    def only_the_model_has_written(self) -> bool:
        """Whether all that is new for the endpoint is the model's last turn and the texts of its tools."""
        new = self.items[self._accepted + self._written :]
        return bool(self._accepted and self._written) and all(
            item.get("type") == "function_call_output" and isinstance(item.get("output"), str) for item in new
        )

    def _identified(self, call: JSON) -> JSON:
        original = call.get("call_id")
        call_id = (
            original if isinstance(original, str) and _ID.fullmatch(original) else f"call_{len(self._ids)}"
        )
        unique, number = call_id, self._numbers.get(call_id, 1)
        while unique in self._ids:
            number += 1
            unique = f"{call_id[:56]}_{number}"
        self._ids.add(unique)
        self._numbers[call_id] = number
        return call if unique == original else {**call, "call_id": unique}

    def _sent(self, turn: list[JSON], calls: list[JSON], tools: Collection[str]) -> list[JSON]:
        left_out = {call["call_id"] for call in calls[self._most_calls :]}
        sent = [_safe_call(item, tools) if _is_call(item) else item for item in turn]
        if left_out:
            self._left_out |= left_out
            of_the_call = {key: turn[-1][key] for key in CALL_KEYS if key in turn[-1]}
            sent = [item for item in sent if not (_is_call(item) and item["call_id"] in left_out)]
            sent[-1] = {**sent[-1], **of_the_call}
        return sent

    def _shown(self, items: list[JSON]) -> list[JSON]:
        kept = [item for item in items if item.get("call_id") not in self._left_out]
        words = next((item.get("output") for item in items if item.get("call_id") in self._left_out), None)
        last = kept[-1] if kept else {}
        if isinstance(words, str) and isinstance(last.get("output"), str):
            kept[-1] = {**last, "output": f"{last['output']}\n(further calls of this turn) {words}"}
        return kept


def is_refusal_of_history(error: Rejected, history: History) -> bool:
    """Whether an endpoint refuses a request in which only the model's own words are new."""
    settings = isinstance(error, EndpointMisconfigured | NotFound)
    return not settings and history.only_the_model_has_written


def _is_call(item: JSON) -> bool:
    return item.get("type") == "function_call"


def _safe_call(call: JSON, tools: Collection[str]) -> JSON:
    name = safe_name(call.get("name"), tools)
    return _readable_call(call if name == call.get("name") else {**call, "name": name})


def _readable_call(call: JSON) -> JSON:
    arguments = safe_arguments(call.get("arguments"))
    return call if arguments == call.get("arguments") else {**call, "arguments": arguments}


def safe_name(name: Any, tools: Collection[str] = ()) -> str:
    """The name of a called tool as an endpoint takes it: that of a tool, or of safe characters."""
    if not isinstance(name, str):
        return "invalid"
    if name in tools or _NAME.fullmatch(name):
        return name
    return _UNSAFE.sub("_", name)[:64] or "invalid"


def safe_arguments(arguments: Any) -> str:
    """The arguments of a call as an endpoint takes them: a JSON object, which holds a text that is none."""
    if is_empty(arguments):
        return "{}"
    if isinstance(arguments, str):
        try:
            value = orjson.loads(arguments)
            if isinstance(value, dict) and is_shallow(value):
                return arguments
        except orjson.JSONDecodeError:
            pass
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, default=str)
    return orjson.dumps({"invalid_arguments": _readable(text[:_SHOWN])}).decode()


def _readable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _without_tokens(item: JSON) -> JSON:
    if TOKEN_KEYS[0] not in item:
        return item
    return {key: value for key, value in item.items() if key not in TOKEN_KEYS}

"""`ChunkJoiner`: the chunks of a chat stream as the completion that they are of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gym_serve.types.errors import Unavailable
from gym_serve.types.protocols.answers import check_delta
from gym_serve.types.protocols.fields import shown
from gym_serve.types.requests import JSON

__all__ = ["ChunkJoiner"]

_LISTS = ("content", "refusal")  # of logprobs


class ChunkJoiner:
    """Takes the chunks in their order; `completion` is what they add up to.

    Texts are joined, calls by their index, log probabilities and token ids are appended; of any other field
    the last value counts, so that what a backend adds of its own is kept.
    """

    def __init__(self) -> None:
        self.begun = False
        """Whether a chunk came."""
        self._head: JSON = {}
        self._choices: dict[int, JSON] = {}

    def add(self, chunk: Any) -> None:
        """Take a chunk.

        Raises:
            Unavailable: it is none, or it tells of a failure.
        """
        if not isinstance(chunk, dict) or not isinstance(chunk.get("choices"), list):
            error = chunk.get("error") if isinstance(chunk, dict) else None
            raise Unavailable(f"the backend's stream failed: {shown(error or chunk)}")
        self.begun = True
        self._head.update((k, v) for k, v in chunk.items() if k != "choices" and v is not None)
        for choice in chunk["choices"]:
            check_delta(choice)
            joined = self._choices.setdefault(choice.get("index") or 0, _choice())
            _add_choice(joined, choice)

    def completion(self) -> JSON:
        """The completion.

        Raises:
            Unavailable: the stream ended before the answer did: a part of one is not what the model says.
        """
        choices = []
        for index, choice in sorted(self._choices.items()):
            if choice["finish_reason"] is None:
                raise Unavailable("the backend's stream ended in the middle of its answer")
            message: JSON = dict(choice["message"])
            if calls := message.pop("tool_calls"):
                message["tool_calls"] = [calls[at] for at in sorted(calls)]
            choices.append({**choice, "index": index, "message": message})
        return {**self._head, "object": "chat.completion", "choices": choices}


def _choice() -> JSON:
    message: JSON = {"role": "assistant", "content": None, "tool_calls": {}}
    return {"message": message, "finish_reason": None, "logprobs": None}


def _add_choice(joined: JSON, choice: Mapping[str, Any]) -> None:
    for key, value in (choice.get("delta") or {}).items():
        if key == "tool_calls":
            for call in value or ():
                _add_call(joined["message"]["tool_calls"], call)
        elif key == "role":
            joined["message"]["role"] = value or "assistant"
        elif isinstance(value, str):
            before = joined["message"].get(key)
            joined["message"][key] = before + value if isinstance(before, str) else value
        elif value is not None:
            joined["message"][key] = value
    for key, value in choice.items():
        if key in ("delta", "index") or value is None:
            continue
        if key == "logprobs":
            joined["logprobs"] = _appended(joined["logprobs"] or {}, value)
        elif key == "token_ids":
            joined[key] = [*joined.get(key, []), *_list(value)]
        else:
            joined[key] = value


def _appended(before: JSON, more: Mapping[str, Any]) -> JSON:
    joined = {**before, **more}
    for key in _LISTS:
        if isinstance(more.get(key), list) or isinstance(before.get(key), list):
            joined[key] = [*_list(before.get(key)), *_list(more.get(key))]
    return joined


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _add_call(calls: dict[int, JSON], part: Mapping[str, Any]) -> None:
    index = part.get("index")
    call = calls.setdefault(
        index if isinstance(index, int) else len(calls),
        {"id": None, "type": "function", "function": {"name": "", "arguments": ""}},
    )
    call["id"] = part.get("id") or call["id"]
    function = part.get("function")
    for key in ("name", "arguments"):
        more = function.get(key) if isinstance(function, dict) else None
        if isinstance(more, str):
            call["function"][key] += more

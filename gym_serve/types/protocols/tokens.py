"""The token bundle: what a trainer needs to know of one model call.

``prompt_token_ids``, ``generation_token_ids`` and ``generation_log_probs`` go together: all three
or none, and one log probability per produced token. A bundle that breaks this would be trained on
silently, so it is an error. ``routed_experts`` (the experts that each token took, for replay in a
mixture-of-experts trainer) rides along where a backend sends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

import orjson

from gym_serve.types.errors import BadRequest, Unavailable
from gym_serve.types.requests import JSON

__all__ = ["TOKEN_KEYS", "completion_tokens", "item_tokens", "tokens_problem"]

TOKEN_KEYS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
_OPTIONAL_KEY = "routed_experts"
_TOKEN_PREFIX = "token_id:"


def item_tokens(item: Mapping[str, Any], where: str) -> JSON | None:
    """The bundle that a request's item or message carries, None without one.

    Args:
        item: an item of a Responses input, or a chat message.
        where: its place in the request, for the error.

    Raises:
        BadRequest: some of the three keys are missing, or the lengths differ.
    """
    present = [key for key in TOKEN_KEYS if item.get(key) is not None]
    if not present:
        return None
    missing = [key for key in TOKEN_KEYS if key not in present]
    if missing:
        raise BadRequest(f"{where}: {', '.join(present)} without {', '.join(missing)} (all three or none)")
    problem = tokens_problem(item)
    if problem:
        raise BadRequest(f"{where}: {problem}")
    return _bundle(item)


def completion_tokens(completion: Mapping[str, Any]) -> JSON | None:
    """The bundle of a chat completion, None unless the backend sent all of it.

    It is read from the message itself, or from vLLM's fields (``return_token_ids`` and
    ``logprobs``), where produced ids may also be written as logprob tokens ``"token_id:7"``
    (``return_tokens_as_token_ids``).

    Args:
        completion: the completion, after `check_completion`.

    Raises:
        Unavailable: ids and log probabilities do not match.
    """
    choice = completion["choices"][0]
    message = choice["message"]
    if all(message.get(key) is not None for key in TOKEN_KEYS):
        found = message
    else:
        logprobs = choice.get("logprobs")
        entries = logprobs.get("content") if isinstance(logprobs, dict) else None
        prompt = completion.get("prompt_token_ids")
        if not isinstance(entries, list) or prompt is None:
            return None
        ids = choice.get("token_ids")
        found = {
            TOKEN_KEYS[0]: prompt,
            TOKEN_KEYS[1]: _ids_of_logprobs(entries) if ids is None else ids,
            TOKEN_KEYS[2]: [entry.get("logprob") for entry in entries],
            _OPTIONAL_KEY: message.get(_OPTIONAL_KEY),
        }
        if found[TOKEN_KEYS[1]] is None:
            return None
    problem = tokens_problem(found)
    if problem:
        raise Unavailable(f"the backend's token ids are unusable: {problem}")
    return _bundle(found)


def _ids_of_logprobs(entries: list[JSON]) -> list[int] | None:
    tokens = [str(entry.get("token", "")) for entry in entries]
    numbers = [token.removeprefix(_TOKEN_PREFIX) for token in tokens if token.startswith(_TOKEN_PREFIX)]
    if len(numbers) != len(tokens) or not all(n.isascii() and n.isdigit() for n in numbers):
        return None
    return [int(n) for n in numbers]


def tokens_problem(found: Mapping[str, Any]) -> str | None:
    """What is wrong with a bundle; None for a sound one.

    It costs a few nanoseconds a token: there are tens of thousands of them in an answer.
    """
    for key in TOKEN_KEYS:
        if not isinstance(found.get(key), list):
            return f"{key} is not a list"
    prompt, produced, logprobs = (found[key] for key in TOKEN_KEYS)
    if len(produced) != len(logprobs):
        return f"{len(produced)} {TOKEN_KEYS[1]} but {len(logprobs)} {TOKEN_KEYS[2]}"
    for key, ids in zip(TOKEN_KEYS, (prompt, produced), strict=False):
        if not _are_ids(ids):
            return f"{key} has a token that is no id"
    if not set(map(type, logprobs)) <= {float, int}:
        return f"{TOKEN_KEYS[2]} has a token without a value"
    try:
        finite = isfinite(sum(logprobs))  # only if all of them are
    except OverflowError:
        finite = False
    return None if finite else f"{TOKEN_KEYS[2]} has a value that is no log probability"


def _are_ids(values: list[Any]) -> bool:
    """Whether all are integers from 0, by their JSON: looking at each would take four times as long."""
    try:
        return not orjson.dumps(values)[1:-1].translate(None, b"0123456789,")
    except TypeError:
        return False


def _bundle(found: Mapping[str, Any]) -> JSON:
    bundle = {key: found[key] for key in TOKEN_KEYS}
    if found.get(_OPTIONAL_KEY) is not None:
        bundle[_OPTIONAL_KEY] = found[_OPTIONAL_KEY]
    return bundle

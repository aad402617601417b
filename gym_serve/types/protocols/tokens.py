"""What an answer says of its tokens: ids, log probabilities and counts.

**The token bundle** is what a trainer needs from one model call: ``prompt_token_ids``,
``generation_token_ids`` and ``generation_log_probs``, all three or none, with one log probability per
generated token; and ``routed_experts`` (for replay in a mixture-of-experts trainer) where a backend sends it.
A bundle that breaks this is an error.

**Log probabilities** are one list per choice in chat. In Responses they belong to the text. Some backends'
lists also cover reasoning and tool calls; the whole list is put on the first text. **Counts** that a backend
did not report are null, never zero: zero is a measurement.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from operator import itemgetter
from typing import Any

import orjson

from gym_serve.types.errors import BadRequest, Unavailable
from gym_serve.types.protocols.content import shown
from gym_serve.types.requests import JSON

TOKEN_KEYS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
_OPTIONAL_KEY = "routed_experts"
VERSIONS_KEY = "weight_versions"  # of the weights that produced a call's tokens, as in vLLM
_TOKEN_PREFIX = "token_id:"


def item_tokens(item: Mapping[str, Any], where: str) -> JSON | None:
    """The bundle that a request's item or message carries, None without one; `BadRequest` if it is broken."""
    present = [key for key in TOKEN_KEYS if item.get(key) is not None]
    if not present:
        return None
    if missing := [key for key in TOKEN_KEYS if key not in present]:
        raise BadRequest(f"{where}: {', '.join(present)} without {', '.join(missing)} (all three or none)")
    if problem := tokens_problem(item):
        raise BadRequest(f"{where}: {problem}")
    return _bundle(item)


def completion_tokens(completion: Mapping[str, Any]) -> JSON | None:
    """The bundle of a chat completion, None unless the backend sent all of it.

    It is read from the message itself, or from vLLM's fields (``return_token_ids`` and ``logprobs``; SGLang
    has the prompt's ids at the choice), where produced ids may also be written as logprob tokens
    ``"token_id:7"`` (``return_tokens_as_token_ids``). Raises `Unavailable` if they do not match.
    """
    choice = completion["choices"][0]
    message = choice["message"]
    logprobs = choice.get("logprobs")
    entries = logprobs.get("content") if isinstance(logprobs, dict) else None
    named = _ids_of_logprobs(entries) if isinstance(entries, list) else None
    if all(message.get(key) is not None for key in TOKEN_KEYS):
        bundle = message
    else:
        prompt = completion.get("prompt_token_ids") or choice.get("prompt_token_ids")
        if not isinstance(entries, list) or prompt is None:
            return None
        ids = choice.get("token_ids")
        bundle = {
            TOKEN_KEYS[0]: prompt,
            TOKEN_KEYS[1]: named if ids is None else ids,
            TOKEN_KEYS[2]: [entry.get("logprob") for entry in entries],
            _OPTIONAL_KEY: message.get(_OPTIONAL_KEY),
            VERSIONS_KEY: choice.get(VERSIONS_KEY),
        }
        if bundle[TOKEN_KEYS[1]] is None:
            return None
    problem = tokens_problem(bundle)
    if problem is None and named is not None and named != bundle[TOKEN_KEYS[1]]:
        problem = f"{TOKEN_KEYS[1]} and the tokens of logprobs differ"
    if problem:
        raise Unavailable(f"the backend's token ids are unusable: {problem}")
    return _bundle(bundle)


def _ids_of_logprobs(entries: list[JSON]) -> list[int] | None:
    if entries and not str(entries[0].get("token", "")).startswith(_TOKEN_PREFIX):
        return None
    tokens = [str(entry.get("token", "")) for entry in entries]
    numbers = [token.removeprefix(_TOKEN_PREFIX) for token in tokens if token.startswith(_TOKEN_PREFIX)]
    if len(numbers) != len(tokens) or not all(n.isascii() and n.isdigit() for n in numbers):
        return None
    return [int(n) for n in numbers]


def tokens_problem(bundle: Mapping[str, Any]) -> str | None:
    """What is wrong with a bundle; None for a sound one. It costs a few nanoseconds a token."""
    for key in TOKEN_KEYS:
        if not isinstance(bundle.get(key), list):
            return f"{key} is not a list"
    prompt, produced, logprobs = (bundle[key] for key in TOKEN_KEYS)
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


def _bundle(source: Mapping[str, Any]) -> JSON:
    bundle = {key: source[key] for key in TOKEN_KEYS}
    if source.get(_OPTIONAL_KEY) is not None:
        bundle[_OPTIONAL_KEY] = source[_OPTIONAL_KEY]
    if token_versions(source) is not None:
        bundle[VERSIONS_KEY] = source[VERSIONS_KEY]
    return bundle


def token_versions(bundle: Mapping[str, Any]) -> list[str] | None:
    """The version of each generated token of a bundle; None where its spans do not cover it."""
    spans, count = bundle.get(VERSIONS_KEY), len(bundle[TOKEN_KEYS[1]])
    if not isinstance(spans, list):
        return None
    versions: list[str] = []
    for span in spans:
        if not isinstance(span, dict) or span.get("start") != len(versions):
            return None
        end = span.get("end")
        if type(end) is not int or not len(versions) <= end <= count or span.get("version") is None:
            return None
        versions += [str(span["version"])] * (end - len(versions))
    return versions if versions and len(versions) == count else None


_NUMBERS = {float, int, type(None)}

LOGPROBS = "message.output_text.logprobs"  # what ``include`` of a Responses body has to hold


def asks_for_logprobs(params: Mapping[str, Any]) -> bool:
    """Whether a Responses body asks for log probabilities."""
    return bool(params.get("top_logprobs")) or includes_logprobs(params)


def includes_logprobs(params: Mapping[str, Any]) -> bool:
    """Whether it asks for them by ``include``."""
    include = params.get("include")
    return isinstance(include, list) and LOGPROBS in include


def choice_logprobs(logprobs: Any) -> list[JSON]:
    """The entries of a chat choice's ``logprobs``; empty without any. Raises `Unavailable` for no numbers."""
    entries = logprobs.get("content") if isinstance(logprobs, dict) else None
    objects = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    if not {type(entry.get("logprob")) for entry in objects} <= _NUMBERS:
        raise Unavailable(f"the backend's answer has log probabilities that are no numbers: {shown(objects)}")
    return objects


def add_logprobs(output: list[JSON], logprobs: Any) -> None:
    """Put a chat choice's ``logprobs`` on the first text of the output items made of it."""
    entries = choice_logprobs(logprobs)
    texts = (part for item in output if item["type"] == "message" for part in item["content"])
    text = next((part for part in texts if part["type"] == "output_text"), None)
    if entries and text is not None:
        text["logprobs"] = [*text.get("logprobs", ()), *entries]


def answer_logprobs(answer: list[Any]) -> JSON | None:
    """A chat choice's ``logprobs`` for the items of an answer; None where they have none."""
    all_entries: list[JSON] = []
    for item in answer:
        content = item.get("content") if isinstance(item, dict) else None
        for part in content if isinstance(content, list) else ():
            entries = part.get("logprobs") if isinstance(part, dict) else None
            all_entries += choice_logprobs({"content": entries})
    return {"content": all_entries, "refusal": None} if all_entries else None


# The details of a Response's usage: their name in chat form, and the counts in them, each with the names
# under which backends send it at the top.
_DETAILS: Mapping[str, tuple[str, Mapping[str, tuple[str, ...]]]] = {
    "input_tokens_details": (
        "prompt_tokens_details",
        {
            "cached_tokens": ("cached_input_tokens", "cache_read_input_tokens"),
            "cache_write_tokens": ("cache_creation_input_tokens",),
        },
    ),
    "output_tokens_details": (
        "completion_tokens_details",
        {"reasoning_tokens": ("reasoning_output_tokens",)},
    ),
}


def responses_usage(usage: Any) -> JSON | None:
    """Usage of a model call in Responses form, with every count that OpenAI's type of it requires, if any.

    Details that nobody told (vLLM tells none by default) are 0: clients with OpenAI's types, as NeMo Gym's
    servers are, refuse an answer with null in their place.
    """
    if not isinstance(usage, dict) or not usage:
        return None
    prompt = _first_count(usage.get(key) for key in ("input_tokens", "prompt_tokens"))
    sampled = _first_count(usage.get(key) for key in ("output_tokens", "completion_tokens"))
    total = _count(usage.get("total_tokens"))
    details: JSON = {}
    for group, (in_chat, names) in _DETAILS.items():
        own = usage.get(group, usage.get(in_chat))
        own = own if isinstance(own, dict) else {}
        candidates = [[own.get(name), *map(usage.get, (name, *others))] for name, others in names.items()]
        counts = zip(names, map(_first_count, candidates), strict=True)
        details[group] = {**(own if group in usage else {}), **dict(counts)}
    return {
        "input_tokens": prompt,
        "input_tokens_details": details["input_tokens_details"],
        "output_tokens": sampled,
        "output_tokens_details": details["output_tokens_details"],
        # A provider's total may be accounted otherwise than by the sum.
        "total_tokens": prompt + sampled if total is None else total,
    }


def chat_usage(usage: Any) -> JSON | None:
    """Usage of a Response in chat form; None without one."""
    if not isinstance(usage, dict) or not usage:
        return None
    return {
        "prompt_tokens": usage.get("input_tokens"),
        "completion_tokens": usage.get("output_tokens"),
        "total_tokens": usage.get("total_tokens"),
        "prompt_tokens_details": usage.get("input_tokens_details"),
        "completion_tokens_details": usage.get("output_tokens_details"),
    }


Tokens = tuple[int, int, int]  # those of the prompt, those of them that a cache answered, and those generated

_OF_RESPONSES = itemgetter("input_tokens", "output_tokens", "input_tokens_details")


def tokens_of(usage: Any) -> Tokens | None:
    """The tokens of a model call; None if its usage does not tell."""
    try:  # nearly all usages have this form
        prompt, sampled, details = _OF_RESPONSES(usage)
        cached = details["cached_tokens"] or 0  # None: not told
        if type(prompt) is type(cached) is type(sampled) is int and prompt | cached | sampled >= 0:
            return prompt, cached, sampled
    except (KeyError, TypeError):
        pass
    if not isinstance(usage, dict) or not usage:
        return None
    details = usage.get("input_tokens_details") or usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    prompt = (usage.get(key) for key in ("input_tokens", "prompt_tokens"))
    sampled = (usage.get(key) for key in ("output_tokens", "completion_tokens"))
    return _first_count(prompt), _count(cached) or 0, _first_count(sampled)


def _first_count(values: Iterable[Any]) -> int:
    return next((value for value in values if _count(value) is not None), 0)


def usage_sum(usages: Iterable[Mapping[str, Any] | None]) -> JSON | None:
    """The sum of the Responses usages of several calls; None where none of them has one."""
    reported = [usage for usage in usages if usage]
    total: JSON = {}
    for usage in reported:
        _add(total, usage)
    return total if reported else None


def _add(total: JSON, usage: Mapping[str, Any]) -> None:
    for key, value in usage.items():
        if isinstance(value, Mapping):
            if not isinstance(total.get(key), dict):
                total[key] = {}
            _add(total[key], value)
        elif not isinstance(total.get(key), dict):
            total[key] = total.get(key, 0) + (_count(value) or 0)


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None

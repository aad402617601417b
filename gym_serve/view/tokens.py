"""The training tokens of a rollout, call by call: which, with what probability, and by which weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from gym_serve.training.rollout import Bundle, NotExportable, Rollout, read_bundle
from gym_serve.types.protocols.tokens import token_versions
from gym_serve.types.requests import JSON
from gym_serve.view.runs import Reading
from gym_serve.view.statistics import advantage

MOST_TOKENS = 10_000
"""The most tokens of a call that are told one by one."""


def read_tokens(reading: Reading, n: int, begin: int = 0, end: int | None = None) -> JSON:
    """The tokens of a rollout's model calls.

    The calls of its branches (sub-agents, dropped retries, a context before it was compacted) follow those of
    the conversation that was verified; ``branch`` says whose a call is, 0 for the verified one. ``drift`` is
    by how many tokens a prompt departs from what was seen before in its branch; a trainer begins another
    sample there. ``reused`` is how many tokens it continues.

    Args:
        begin, end: which calls, from 0.

    Raises:
        NotFound: there is no such rollout, or no longer.
    """
    raw = reading.rollout(n)
    gain = _advantage(reading, n)
    shown: list[JSON] = []
    total = 0
    problem: str | None = None
    try:
        whole = Rollout.read(raw)
        for conversation in whole.conversations():
            context: list[int] = []
            for item, bundle in _calls(conversation):
                turn, total = total, total + 1
                reused = _common(context, bundle.prompt)
                drift = len(context) - reused
                count = len(bundle.generation)
                context = bundle.prompt + bundle.generation
                if turn < begin or (end is not None and turn >= end):
                    continue
                shown.append(
                    {
                        "turn": turn,
                        "branch": conversation.branch,
                        "prompt_tokens": len(bundle.prompt),
                        "reused": reused,
                        "drift": drift,
                        "advantage": None if whole.masked else gain,
                        "tokens": list(_tokens(item, bundle, not whole.masked))[:MOST_TOKENS],
                        "generated": count,
                    }
                )
    except NotExportable as error:
        problem = error.message
    return {"turns": shown, "total": total, "problem": problem}


def _calls(conversation: Rollout) -> Iterator[tuple[JSON, Bundle]]:
    """The calls with tokens. Items of the context belong to another branch, which shows them."""
    response = f"branches[{conversation.branch - 1}].response" if conversation.branch else "response"
    for place, item in enumerate(conversation.output[conversation.context :], conversation.context):
        bundle = read_bundle(item, f"{response}.output[{place}]")
        if bundle is not None:
            yield item, bundle


def _tokens(item: JSON, bundle: Bundle, trained: bool) -> Iterator[JSON]:
    one = item.get("weight_version")
    fixed = None if one is None else str(one)[:100]
    versions: list[str | None] = [*(token_versions(item) or ())] or [fixed] * len(bundle.generation)
    texts = _told(item, len(bundle.generation))
    for id_, logprob, version, entry in zip(bundle.generation, bundle.logprobs, versions, texts, strict=True):
        yield {
            "id": id_,
            "logprob": logprob,
            "trained": trained,
            "version": version,
            "text": entry.get("token") if isinstance(entry.get("token"), str) else None,
            "entropy": _entropy(entry.get("top_logprobs")),
        }


def _told(item: JSON, count: int) -> list[JSON]:
    """What the model server said of each token's text; nothing where it did not say it of all."""
    content = item.get("content")
    entries = [
        entry if isinstance(entry, dict) else {}
        for part in (content if isinstance(content, list) else ())
        if isinstance(part, dict) and isinstance(part.get("logprobs"), list)
        for entry in part["logprobs"]
    ]
    return entries if len(entries) == count else [{}] * count


def _entropy(top: Any) -> float | None:
    """In nats, of the alternatives that the model server told, as if there were no others."""
    candidates = (
        [entry.get("logprob") for entry in top if isinstance(entry, dict)] if isinstance(top, list) else []
    )
    logprobs = [value for value in candidates if isinstance(value, int | float) and value <= 0]
    if len(logprobs) < 2:
        return None
    return math.fsum(-math.exp(value) * value for value in logprobs)


def _advantage(reading: Reading, n: int) -> float | None:
    rows = reading.sql(
        "SELECT n, reward FROM rollouts WHERE task = (SELECT task FROM rollouts WHERE n = ?)"
        " AND reward IS NOT NULL",
        (n,),
    )
    own = next((reward for at, reward in rows if at == n), None)
    return None if own is None else advantage([reward for _, reward in rows], own)


def _common(left: list[int], right: list[int]) -> int:
    if right[: len(left)] == left:
        return len(left)
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(left), len(right)))

"""The training tokens of a rollout (docs/formats.md, Training tokens), checked as trainers assert them.

Invariant of `token_turns`: laid end to end, the prompts and generations of the turns are exactly the
last call's prompt and generation. It follows from prefix contiguity (everything seen so far is a
prefix of the next prompt), which is checked, because a trainer would otherwise learn from a sequence
that the model never saw.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from gym_serve.interop.export.rollout import NotExportable, Rollout
from gym_serve.types.errors import BadRequest
from gym_serve.types.protocols.tokens import item_tokens
from gym_serve.types.requests import JSON

__all__ = ["Bundle", "TokenSequence", "TokenTurn", "read_bundle", "token_sequence", "token_turns"]


@dataclass(frozen=True)
class Bundle:
    """The tokens of one model call."""

    prompt: list[int]
    """Every token that the model was given."""
    generation: list[int]
    """Every token that it produced."""
    logprobs: list[float]
    """Natural-log probability of each produced token."""


@dataclass(frozen=True)
class TokenTurn:
    """One generation, with the prompt tokens that are new since the one before."""

    prompt: list[int]
    generation: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class TokenSequence:
    """A rollout as one sequence: the first prompt, and everything after it."""

    prompt: list[int]
    response: list[int]
    mask: list[int]
    """Per response token: 1 if the model produced it, 0 if its environment did."""
    logprobs: list[float]
    """Per response token; 0.0 where the mask is 0."""


def read_bundle(item: JSON, where: str) -> Bundle | None:
    """The token bundle on an output item, None without one.

    Raises:
        NotExportable: it is incomplete, its lengths differ, or a value is no token.
    """
    try:
        found = item_tokens(item, where)
    except BadRequest as error:
        raise NotExportable("bad_tokens", error.message) from None
    if found is None:
        return None
    bundle = Bundle(found["prompt_token_ids"], found["generation_token_ids"], found["generation_log_probs"])
    if not all(map(_is_token, bundle.prompt)) or not all(map(_is_token, bundle.generation)):
        raise NotExportable("bad_tokens", f"{where}: a token id is no integer from 0 to 2**31 - 1")
    if not all(map(_is_finite, bundle.logprobs)):
        raise NotExportable("bad_tokens", f"{where}: a log probability is no finite number")
    return bundle


def token_turns(rollout: Rollout) -> list[TokenTurn]:
    """The generations of a rollout, each with its new prompt tokens.

    A call that produced no token is no turn; its prompt is part of the next one's.

    Raises:
        NotExportable: there are no tokens, they are malformed, or a prompt does not go on from what
            was seen before.
    """
    turns: list[TokenTurn] = []
    seen: list[int] = []
    for i, item in enumerate(rollout.output[rollout.context :], rollout.context):
        bundle = read_bundle(item, f"response.output[{i}]")
        if bundle is None or not bundle.generation:
            continue
        if bundle.prompt[: len(seen)] != seen:
            same = _common_prefix(seen, bundle.prompt)
            raise NotExportable(
                "broken_prefix",
                f"response.output[{i}]: the prompt differs from the {len(seen)} tokens seen so far at "
                f"token {same} (was the history re-tokenized, truncated, or its reasoning stripped?)",
            )
        turns.append(TokenTurn(bundle.prompt[len(seen) :], bundle.generation, bundle.logprobs))
        seen = bundle.prompt + bundle.generation
    if not turns:
        raise NotExportable("no_tokens", "no output item carries training tokens")
    return turns


def token_sequence(turns: list[TokenTurn]) -> TokenSequence:
    """The turns of a rollout as one sequence; there is at least one turn."""
    response: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for number, turn in enumerate(turns):
        between = turn.prompt if number else []
        response += between + turn.generation
        mask += [0] * len(between) + [1] * len(turn.generation)
        logprobs += [0.0] * len(between) + turn.logprobs
    return TokenSequence(turns[0].prompt, response, mask, logprobs)


def _common_prefix(left: list[int], right: list[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)

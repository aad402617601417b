"""How much a policy may do in one episode.

What goes over a limit is the policy's own doing, and gets a real result. A call that is not run has an error
as its output, which the model reads; an answer that is too long is cut, and the episode is verified as it
stands. It is never a failure, which trainers leave out: a policy could learn to turn zeros into failures.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gym_serve.types.protocols import TOKEN_KEYS
from gym_serve.types.requests import JSON

__all__ = ["EpisodeOver", "Limits", "shortened", "written_bytes"]

_AT_END = (*TOKEN_KEYS, "routed_experts", "weight_version")  # what the last item tells of the whole call
_NOT_WRITTEN = frozenset({*_AT_END, "logprobs", "encrypted_content"})
_SHORT = 256  # bytes; a text up to this, such as an id or a type, is never cut
_DEEPEST = 8


class EpisodeOver(Exception):
    """The policy has reached a limit that ends the episode; it is verified as it stands."""


class Limits(NamedTuple):
    """The limits of an episode; see the settings of the same names in `AgentServer.Config`."""

    max_tool_calls_per_turn: int = 128
    max_tool_calls: int = 1024
    max_argument_bytes: int = 2**20
    max_answer_bytes: int = 4 * 2**20
    max_episode_bytes: int = 32 * 2**20


def written_bytes(value: Any, depth: int = 0) -> int:
    """About the bytes of JSON that the texts of an item have, its tokens and log-probabilities left out."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
    if depth < _DEEPEST and isinstance(value, dict):
        return sum(len(k) + written_bytes(v, depth + 1) for k, v in value.items() if k not in _NOT_WRITTEN)
    if depth < _DEEPEST and isinstance(value, list):
        return sum(1 + written_bytes(v, depth + 1) for v in value)
    return 8


def shortened(output: list[JSON], limit: int) -> list[JSON] | None:
    """The items of one model call cut to about ``limit`` bytes; None where they are within it.

    The tokens that the model produced stay whole: they stand on the last item, whichever that is.
    """
    left = limit
    for at, item in enumerate(output):
        size = written_bytes(item)
        if size > left:
            of_the_call = {key: output[-1][key] for key in _AT_END if key in output[-1]}
            return [*output[:at], {**_cut(item, left)[0], **of_the_call}]
        left -= size
    return None


def _cut(value: Any, left: int) -> tuple[Any, int]:
    """``value`` with its long texts cut to what is left of the bytes, and what is left then."""
    if isinstance(value, str):
        size = written_bytes(value)
        if size > max(left, _SHORT):
            value = value.encode("utf-8", "surrogatepass")[: max(left, 0)].decode("utf-8", "ignore")
        return value, left - size
    if isinstance(value, dict):
        made: JSON = {}
        for key, each in value.items():
            if key not in _NOT_WRITTEN:
                made[key], left = _cut(each, left - len(key))
        return made, left
    if isinstance(value, list):
        kept: list[Any] = []
        for each in value:
            if left <= 0 and kept:
                break
            shorter, left = _cut(each, left - 1)
            kept.append(shorter)
        return kept, left
    return value, left - 8

"""What crosses between a `callback_model` and the trainer that generates for it: tokens in, tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gym_serve.types.errors import InvalidRequest
from gym_serve.types.protocols.tokens import TOKEN_KEYS, tokens_problem
from gym_serve.types.requests import JSON


@dataclass(frozen=True)
class PolicyRequest:
    """One generation that the policy is asked for."""

    prompt_ids: list[int]
    """Tokens of the prompt. A later turn of an episode begins with exactly the tokens of the turns before."""
    sampling: JSON
    """``max_tokens``, ``temperature``, ``top_p``, ``stop``, ``seed`` and the like, as far as the row and the
    model server say them, with the names of vLLM's sampling parameters."""
    episode: str | None = None
    """The same for all requests of an episode, to find the engine that has its prefix cached."""
    id: str = ""
    """Names the request."""


@dataclass(frozen=True)
class PolicyAnswer:
    """The generation of the policy for one request.

    Raises:
        InvalidRequest: the lengths differ, or a value is no token id or no log-probability.
    """

    token_ids: Sequence[int]
    """The tokens, including the one that ends the turn."""
    logprobs: Sequence[float]
    """The natural-log probability of each, of the distribution that it was drawn from."""
    finish_reason: Literal["stop", "length"] = "stop"
    """Whether the model ended its turn, or was cut off."""
    versions: str | Sequence[str] | None = None
    """Version of the weights: one for all tokens, or one for each; None for the model server's."""

    def __post_init__(self) -> None:
        bundle = dict(zip(TOKEN_KEYS, ([], list(self.token_ids), list(self.logprobs)), strict=True))
        if problem := tokens_problem(bundle):
            raise InvalidRequest(f"a policy's answer must have matching tokens: {problem}")
        if self.finish_reason not in ("stop", "length"):
            raise InvalidRequest(f"`finish_reason` must be stop or length, got {self.finish_reason!r:.40}")
        if not isinstance(self.versions, str | None) and len(self.versions) != len(self.token_ids):
            raise InvalidRequest(
                f"`versions` must be one, or one for each of {len(self.token_ids)} tokens, "
                f"got {len(self.versions)}"
            )

    @property
    def spans(self) -> list[JSON] | None:
        """`versions` as ``[{version, start, end}]``; None where it has none."""
        if self.versions is None or not self.token_ids:
            return None
        each: Any = [self.versions] * len(self.token_ids) if isinstance(self.versions, str) else self.versions
        spans: list[JSON] = []
        for at, version in enumerate(each):
            if spans and spans[-1]["version"] == str(version):
                spans[-1]["end"] = at + 1
            else:
                spans.append({"version": str(version), "start": at, "end": at + 1})
        return spans

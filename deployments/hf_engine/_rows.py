"""`Row`: one generation, and how its next token is drawn."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import torch

from gym_serve.deployments.hf_engine._grammar import Constraint
from gym_serve.deployments.hf_engine.sampling import Sampling


@dataclass(eq=False)
class Row:
    """One generation: ``done`` is set when it has ended, ``grown`` whenever it has got another token.
    ``finish`` is ``stop``, ``length`` or ``abort``; ``asked`` and ``began`` (its first token) are moments.
    """

    prompt: list[int]
    sampling: Sampling
    limit: int
    done: asyncio.Future[None]
    constraint: Constraint | None = None
    grown: asyncio.Event | None = None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish: str = ""
    asked: float = field(default_factory=time.monotonic)
    began: float | None = None

    def __post_init__(self) -> None:
        self.random: torch.Generator | None = None
        if self.sampling.seed is not None:
            self.random = torch.Generator().manual_seed(self.sampling.seed & (2**63 - 1))


def draw(logits: torch.Tensor, rows: list[Row]) -> tuple[list[int], list[float]]:
    """The next token of every row, and its log probability in the distribution that it was drawn from."""
    scores = logits.float()
    for i, row in enumerate(rows):
        _bias(scores[i], row.sampling)
        if row.constraint is not None:
            row.constraint.forbid(scores[i])
    temperatures = torch.tensor([row.sampling.temperature or 1.0 for row in rows])
    scores = scores / temperatures.to(scores)[:, None]
    for i, row in enumerate(rows):
        _truncate(scores[i], row.sampling)
    log_probs = scores.log_softmax(-1)
    chosen = torch.multinomial(log_probs.exp(), 1)[:, 0]
    for i, row in enumerate(rows):
        if row.sampling.temperature == 0:
            chosen[i] = log_probs[i].argmax()
        elif row.random is not None:
            chosen[i] = torch.multinomial(log_probs[i].exp().cpu(), 1, generator=row.random)[0]
    return chosen.tolist(), log_probs.gather(1, chosen[:, None])[:, 0].tolist()


def _bias(scores: torch.Tensor, sampling: Sampling) -> None:
    for token, bias in sampling.logit_bias.items():
        if 0 <= token < len(scores):
            scores[token] += bias


def _truncate(scores: torch.Tensor, sampling: Sampling) -> None:
    if 0 < sampling.top_k < len(scores):
        scores[scores < scores.topk(sampling.top_k).values[-1]] = -torch.inf
    if sampling.top_p < 1:
        ordered, order = scores.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        scores[order[before >= sampling.top_p]] = -torch.inf

"""A language model in NumPy, with random weights: it really samples, and tells any token's log-probability.

Each token changes a hidden state, from which the next one is drawn, so that every probability depends on all
tokens before it: one that was changed on the way to a trainer is seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat

import numpy as np

_STATE = 24


class LanguageModel:
    """A recurrent network.

    Args:
        tokens: those that it may say; all others have no probability.
        vocabulary: number of tokens that it may read.
        seed: of its weights.
    """

    def __init__(self, tokens: Sequence[int], vocabulary: int, seed: int = 0) -> None:
        weights = np.random.default_rng(seed)
        self._reads = weights.normal(size=(vocabulary, _STATE))
        self._keeps = weights.normal(size=(_STATE, _STATE)) / np.sqrt(_STATE)
        self._says = weights.normal(size=(_STATE, vocabulary)) * 0.7
        self._silent = np.ones(vocabulary, bool)
        self._silent[list(tokens)] = False

    def _next(self, state: np.ndarray, temperature: float) -> np.ndarray:
        """Log-probabilities of the next token."""
        logits = state @ self._says / temperature
        logits[self._silent] = -np.inf
        shifted = logits - logits.max()
        return shifted - np.log(np.exp(shifted).sum())

    def _after(self, state: np.ndarray, token: int) -> np.ndarray:
        return np.tanh(state @ self._keeps + self._reads[token])

    def samples(
        self,
        prompt: Sequence[int],
        random: np.random.Generator,
        temperature: float = 1.0,
        script: Iterable[int | None] = (),
    ) -> Iterator[tuple[int, float]]:
        """Tokens after a prompt, each with its log-probability, without an end.

        Args:
            prompt: the tokens before.
            random: makes the draws.
            temperature: of the draws, and of the log-probabilities.
            script: the first tokens; None for one that is drawn.
        """
        state = np.zeros(_STATE)
        for token in prompt:
            state = self._after(state, token)
        for said in chain(script, repeat(None)):
            found = self._next(state, temperature)
            token = int(random.choice(len(found), p=np.exp(found))) if said is None else said
            yield token, float(found[token])
            state = self._after(state, token)

    def log_probs(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Log-probability of each token after those before it."""
        state, found = np.zeros(_STATE), list[float]()
        for token in tokens:
            found.append(float(self._next(state, temperature)[token]))
            state = self._after(state, token)
        return found

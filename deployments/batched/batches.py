"""`Batches`: generations that run together, on one thread of their own.

`Steps` is what an engine brings: it takes rows, and makes the next token of each. A row that ends, or that
nobody waits for any more, leaves at once.

`Row`: one generation, and how its next token is drawn.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gym_serve.deployments.batched.grammar import Constraint
from gym_serve.deployments.batched.sampling import Sampling
from gym_serve.types.errors import GymError, Unavailable


@dataclass(eq=False)
class Row:
    """One generation: ``done`` is set when it has ended, ``grown`` whenever it has got another token.
    ``finish`` is ``stop``, ``length`` or ``abort``; ``asked`` and ``began`` (its first token) are moments;
    ``cached`` counts tokens of the prompt that the engine had already; ``pictures`` are those of the prompt;
    ``plain``: whether the next token is any, with the probability that its logit says.
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
    cached: int | None = None
    asked: float = field(default_factory=time.monotonic)
    began: float | None = None
    pictures: Sequence[str] = ()

    def __post_init__(self) -> None:
        sampling = self.sampling
        seed = sampling.seed
        narrowed = sampling.top_k > 0 or sampling.top_p < 1 or bool(sampling.logit_bias)
        self.plain = not narrowed and seed is None and self.constraint is None
        self.random = np.random.default_rng(None if seed is None else seed & (2**63 - 1))


class Steps(Protocol):
    """The batch of an engine; all calls come from one thread."""

    @property
    def room(self) -> int:
        """How many rows it can take now."""
        ...

    def add(self, rows: Sequence[Row]) -> None:
        """Take rows, which have no token yet."""
        ...

    def step(self) -> Iterable[tuple[Row, int, float]]:
        """Rows with their next token and its log probability. One whose prompt is read is left out."""
        ...

    def drop(self, rows: Sequence[Row]) -> None:
        """Let rows go."""
        ...


def draw(logits: NDArray[np.float32], row: Row) -> tuple[int, float]:
    """The next token of a row, and its log probability in the distribution that it was drawn from."""
    scores = logits.astype(np.float64)
    sampling = row.sampling
    for token, bias in sampling.logit_bias.items():
        if 0 <= token < len(scores):
            scores[token] += bias
    if row.constraint is not None:
        row.constraint.forbid(scores)
    scores /= sampling.temperature or 1.0
    _truncate(scores, sampling)
    scores -= scores.max()
    log_probs = scores - np.log(np.exp(scores).sum())
    if sampling.temperature == 0:
        token = int(log_probs.argmax())
    else:
        reached = np.exp(log_probs).cumsum()
        token = int(np.searchsorted(reached, row.random.random() * reached[-1], side="right"))
    return token, float(log_probs[token])


def _truncate(scores: NDArray[np.float64], sampling: Sampling) -> None:
    if 0 < sampling.top_k < len(scores):
        scores[scores < np.partition(scores, -sampling.top_k)[-sampling.top_k]] = -np.inf
    if sampling.top_p < 1:
        order = np.argsort(-scores)
        probabilities = np.exp(scores[order] - scores[order[0]])
        probabilities /= probabilities.sum()
        scores[order[probabilities.cumsum() - probabilities >= sampling.top_p]] = -np.inf


class Batches:
    """The generations of one causal language model; ``ends`` are the tokens that end a turn."""

    def __init__(self, steps: Steps, ends: frozenset[int], decode: Callable[[list[int]], str]) -> None:
        self._steps = steps
        self._ends = ends
        self._decode = decode
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Row] = deque()
        self._rows: list[Row] = []
        self._wake = threading.Condition()
        self._stepping = threading.Lock()
        self._paused = self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: list[int],
        sampling: Sampling,
        limit: int,
        constraint: Constraint | None = None,
        pictures: Sequence[str] = (),
    ) -> Row:
        """The finished generation; cancelling the call ends it. Raises BadRequest: the constraint cannot be
        held; Unavailable: the engine broke, or stopped.
        """
        row = Row(prompt, sampling, limit, self._loop.create_future(), constraint, pictures=pictures)
        self._begin(row)
        try:
            await row.done
        finally:
            row.done.cancel()  # unless it has ended, nobody waits for it any more
        return row

    async def stream(
        self,
        prompt: list[int],
        sampling: Sampling,
        limit: int,
        constraint: Constraint | None = None,
        pictures: Sequence[str] = (),
    ) -> AsyncGenerator[Row, None]:
        """The generation, each time that it has grown; closing the generator ends it. It does not wait for
        its reader.
        """
        grown = asyncio.Event()
        row = Row(prompt, sampling, limit, self._loop.create_future(), constraint, grown, pictures=pictures)
        self._begin(row)
        try:
            while not row.done.done():
                await grown.wait()
                grown.clear()
                yield row
            await row.done
        finally:
            row.done.cancel()

    def _begin(self, row: Row) -> None:
        if not self.alive:
            raise Unavailable("the engine has stopped")
        with self._wake:
            self._waiting.append(row)
            self._wake.notify()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def running(self) -> int:
        """Generations that have not ended, those included that wait for their first token."""
        return sum(not row.done.done() for row in {*self._waiting, *self._rows})

    async def pause(self, *, abort: bool = False) -> None:
        """Wait for the step that runs, and start no other; ``abort`` ends all rows."""
        if not self._paused:
            self._paused = True
            await asyncio.to_thread(self._stepping.acquire)
        if abort:
            self._end_all("abort")

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._stepping.release()
            with self._wake:
                self._wake.notify()

    async def close(self) -> None:
        self._closed = True
        self.resume()
        with self._wake:
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        error: GymError | None = None
        try:
            while not self._closed:
                with self._wake:
                    self._wake.wait_for(lambda: self._closed or self._busy())
                with self._stepping:
                    if not self._closed:
                        self._turn()
        except Exception as broken:  # whatever an engine raises: the health check tells, the replica restarts
            error = Unavailable(f"the engine broke: {type(broken).__name__}: {broken}")
        self._end_all("abort", error)

    def _busy(self) -> bool:
        return not self._paused and bool(self._waiting or self._rows)

    def _turn(self) -> None:
        """The next token of every row, and of as many of those that wait as there is room for."""
        self._let_go([row for row in self._rows if row.done.cancelled()])
        new: list[Row] = []
        while self._waiting and len(new) < self._steps.room:
            row = self._waiting[0]
            if not row.done.cancelled():
                new.append(row)
                self._rows.append(row)  # before it leaves the others: `running` counts it all the time
            self._waiting.popleft()
        if new:
            self._steps.add(new)
        if not self._rows:
            return
        ended = []
        for row, token, log_prob in self._steps.step():
            if row.began is None:
                row.began = time.monotonic()
            row.tokens.append(token)
            row.log_probs.append(log_prob)
            refused = row.constraint.take(token) if row.constraint is not None else None
            row.finish = self._finish(row)
            if row.finish or refused is not None:
                ended.append(row)
                self._settle(row, refused)
            elif row.grown is not None:
                self._loop.call_soon_threadsafe(row.grown.set)
        self._let_go(ended)

    def _let_go(self, rows: list[Row]) -> None:
        if rows:
            self._steps.drop(rows)
            self._rows = [row for row in self._rows if row not in rows]

    def _finish(self, row: Row) -> str:
        if row.tokens[-1] in self._ends and (row.constraint is not None or not row.sampling.ignore_eos):
            return "stop"
        if stops := row.sampling.stop:
            recent = self._decode(row.tokens[-8 - max(map(len, stops)) :])
            if any(stop in recent for stop in stops):
                return "stop"
        return "length" if len(row.tokens) >= row.limit else ""

    def _end_all(self, finish: str, error: GymError | None = None) -> None:
        rows = [*self._waiting, *self._rows]
        self._waiting.clear()
        self._let_go(self._rows)
        for row in rows:
            row.finish = finish
            self._settle(row, error)

    def _settle(self, row: Row, error: GymError | None = None) -> None:
        def settle() -> None:
            if row.grown is not None:
                row.grown.set()
            if row.done.done():
                return
            if error is None:
                row.done.set_result(None)
            else:
                row.done.set_exception(error)

        self._loop.call_soon_threadsafe(settle)

"""`Batches`: generations that run together, on one thread of their own.

A batch is made of the rows that wait at a moment; batches take turns, a token each, so that a new row waits
for no other to end. A row that ends, or that nobody waits for any more, leaves its batch at once.

`Row`: one generation, and how its next token is drawn.

A model of ``transformers``: loading it, and changing its weights in place.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from gym_serve.deployments.hf_engine._grammar import Constraint
from gym_serve.deployments.hf_engine.sampling import Sampling
from gym_serve.types.errors import BadRequest, GymError, Unavailable


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


class _Batch:
    def __init__(self, rows: list[Row], device: torch.device) -> None:
        self.rows = rows
        self.cache: Any = None
        longest = max(len(row.prompt) for row in rows)
        padding = [[0] * (longest - len(row.prompt)) for row in rows]
        ids = [pad + row.prompt for pad, row in zip(padding, rows, strict=True)]
        mask = [pad + [1] * len(row.prompt) for pad, row in zip(padding, rows, strict=True)]
        self.ids, self.mask = torch.tensor(ids, device=device), torch.tensor(mask, device=device)
        self.positions = (self.mask.cumsum(-1) - 1).clamp(min=0)

    def step(self, model: Any) -> tuple[list[int], list[float]]:
        """The next token of every row, and its log probability."""
        with torch.inference_mode():
            answer = model(
                input_ids=self.ids,
                attention_mask=self.mask,
                position_ids=self.positions,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
            )
            self.cache = answer.past_key_values
            tokens, log_probs = draw(answer.logits[:, -1].clone(), self.rows)
            self.ids = torch.tensor(tokens, device=self.ids.device)[:, None]
            self.positions = self.positions[:, -1:] + 1
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.rows), 1)], -1)
        return tokens, log_probs

    def keep(self, kept: list[int]) -> None:
        """Drop all rows but those at ``kept``."""
        is_same = len(kept) == len(self.rows)
        self.rows = [self.rows[i] for i in kept]
        if is_same or not kept:
            return
        index = torch.tensor(kept, device=self.ids.device)
        self.ids, self.mask, self.positions = self.ids[index], self.mask[index], self.positions[index]
        with torch.inference_mode():
            self.cache.batch_select_indices(index)


class Batches:
    """The generations of one causal language model of ``transformers``; ``ends`` are the tokens that end a
    turn.
    """

    def __init__(
        self, model: Any, ends: frozenset[int], decode: Callable[[list[int]], str], max_rows: int
    ) -> None:
        self.model = model
        self._ends = ends
        self._decode = decode
        self._max_rows = max_rows
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Row] = deque()
        self._batches: list[_Batch] = []
        self._wake = threading.Condition()
        self._stepping = threading.Lock()
        self._paused = self._closed = False
        self._thread = threading.Thread(target=self._run, name="hf_engine", daemon=True)
        self._thread.start()

    async def generate(
        self, prompt: list[int], sampling: Sampling, limit: int, constraint: Constraint | None = None
    ) -> Row:
        """The finished generation; cancelling the call ends it. Raises BadRequest: the constraint cannot be
        held; Unavailable: the engine broke, or stopped.
        """
        row = Row(prompt, sampling, limit, self._loop.create_future(), constraint)
        self._begin(row)
        try:
            await row.done
        finally:
            row.done.cancel()  # unless it has ended, nobody waits for it any more
        return row

    async def stream(
        self, prompt: list[int], sampling: Sampling, limit: int, constraint: Constraint | None = None
    ) -> AsyncGenerator[Row, None]:
        """The generation, each time that it has grown; closing the generator ends it. It does not wait for
        its reader.
        """
        grown = asyncio.Event()
        row = Row(prompt, sampling, limit, self._loop.create_future(), constraint, grown)
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
        rows = {*self._waiting, *(row for batch in self._batches for row in batch.rows)}
        return sum(not row.done.done() for row in rows)

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
        except Exception as broken:  # whatever torch raises: the health check tells, the replica restarts
            error = Unavailable(f"the engine broke: {type(broken).__name__}: {broken}")
        self._end_all("abort", error)

    def _busy(self) -> bool:
        return not self._paused and bool(self._waiting or self._batches)

    def _turn(self) -> None:
        """One token for every batch, and a batch of the rows that wait."""
        rows = list(islice(self._waiting, self._max_rows))
        if wanted := [row for row in rows if not row.done.cancelled()]:
            self._batches.append(_Batch(wanted, self.model.device))
        for _ in rows:
            self._waiting.popleft()
        for batch in self._batches:
            kept = []
            for i, (token, log_prob) in enumerate(zip(*batch.step(self.model), strict=True)):
                row = batch.rows[i]
                if row.began is None:
                    row.began = time.monotonic()
                row.tokens.append(token)
                row.log_probs.append(log_prob)
                refused = row.constraint.take(token) if row.constraint is not None else None
                row.finish = self._finish(row)
                if row.finish or refused is not None:
                    self._settle(row, refused)
                elif not row.done.cancelled():
                    kept.append(i)
                    if row.grown is not None:
                        self._loop.call_soon_threadsafe(row.grown.set)
            batch.keep(kept)
        self._batches = [batch for batch in self._batches if batch.rows]

    def _finish(self, row: Row) -> str:
        if row.tokens[-1] in self._ends and (row.constraint is not None or not row.sampling.ignore_eos):
            return "stop"
        if stops := row.sampling.stop:
            recent = self._decode(row.tokens[-8 - max(map(len, stops)) :])
            if any(stop in recent for stop in stops):
                return "stop"
        return "length" if len(row.tokens) >= row.limit else ""

    def _end_all(self, finish: str, error: GymError | None = None) -> None:
        rows = [*self._waiting, *(row for batch in self._batches for row in batch.rows)]
        self._waiting.clear()
        self._batches.clear()
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


def load_model(path: str, dtype: str, device: str) -> tuple[Any, Any]:
    """The model and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).to(device)
    return model.eval(), tokenizer


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Ids of the tokens that end a turn."""
    ids = model.generation_config.eos_token_id
    return frozenset([*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id]) - {None}


def new_weights(model: Any, weights: Path | bytes) -> Mapping[str, torch.Tensor]:
    """Weights for `model`, checked. Raises BadRequest: they cannot be read, or their names or shapes are
    others.
    """
    tensors: dict[str, torch.Tensor]
    try:
        if isinstance(weights, bytes):
            tensors = load(weights)
        else:
            files = sorted(weights.glob("*.safetensors")) if weights.is_dir() else [weights]
            tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    except (OSError, SafetensorError, ValueError) as error:
        raise BadRequest(f"the weights cannot be read: {error}") from None
    own = model.state_dict()
    addresses = {own[name].data_ptr() for name in tensors if name in own}
    wrong = [name for name in tensors if name not in own or own[name].shape != tensors[name].shape]
    wrong += [
        name for name in own if name not in tensors and own[name].data_ptr() not in addresses
    ]  # tied ones
    if wrong:
        raise BadRequest(f"not the weights of this model: {', '.join(wrong[:5])} ({len(wrong)} in all)")
    return tensors

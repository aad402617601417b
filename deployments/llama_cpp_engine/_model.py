"""llama.cpp by `cyllama <https://pypi.org/project/cyllama>`_: loading a GGUF file, and its batch.

Each row has a slot, which is a sequence of llama.cpp's cache. A pass over the weights takes the next token of
each row that generates, and as much of the prompts that wait as there is room for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from cyllama.llama import llama_cpp

from gym_serve.deployments.batched import batches
from gym_serve.deployments.batched.batches import Row
from gym_serve.deployments.batched.grammar import Grammars
from gym_serve.deployments.llama_cpp_engine._vocabulary import Vocabulary
from gym_serve.types.errors import GraphError

if TYPE_CHECKING:
    from gym_serve.deployments.llama_cpp_engine import LlamaCppEngine

_MOST_POSITIONS = 8192
_BATCH = 512  # most tokens of a pass


class _Model(llama_cpp.LlamaModel):  # type: ignore[misc]
    @property
    def n_vocab(self) -> int:
        """What `LlamaContext.get_logits_ith` asks for, and cyllama 0.2.18 lacks."""
        return int(self.get_vocab().n_vocab)


def load(config: LlamaCppEngine.Config) -> tuple[LlamaSteps, Vocabulary, int, Grammars]:
    """What `BatchedEngine.begin` takes. Raises GraphError: the file is none that llama.cpp can read."""
    llama_cpp.disable_logging()
    params = llama_cpp.LlamaModelParams()
    params.n_gpu_layers = config.gpu_layers
    path = Path(config.model).expanduser()
    try:
        model = _Model(str(path), params)
        context = config.max_model_len or min(model.n_ctx_train, _MOST_POSITIONS)
        steps = LlamaSteps(model, config.slots, context, config.threads or max((os.cpu_count() or 2) // 2, 1))
    except (ValueError, RuntimeError) as error:
        raise GraphError(f"{path}: llama.cpp cannot use this file: {error}") from None
    template = config.chat_template
    words = Vocabulary(model, None if template is None else Path(template).expanduser().read_text("utf-8"))
    grammars = Grammars(words.for_grammars, words.added, words.size, words.ends)
    return steps, words, context, grammars


@dataclass(eq=False)
class _Slot:
    number: int
    row: Row | None = None
    kept: list[int] = field(default_factory=list)  # tokens in the cache

    @property
    def missing(self) -> list[int]:
        """The tokens of its row that are not in the cache."""
        assert self.row is not None
        return (self.row.prompt + self.row.tokens)[len(self.kept) :]


class LlamaSteps:
    """The batch of a model."""

    def __init__(self, model: Any, slots: int, context: int, threads: int) -> None:
        params = llama_cpp.LlamaContextParams()
        params.n_ctx, params.n_seq_max, params.kv_unified = context * slots, slots, False
        params.n_batch = params.n_ubatch = _BATCH
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.LlamaContext(model, params)
        self._batch = llama_cpp.LlamaBatch(n_tokens=_BATCH, embd=0, n_seq_max=1)
        self._slots = [_Slot(number) for number in range(slots)]

    @property
    def room(self) -> int:
        return sum(slot.row is None for slot in self._slots)

    def add(self, rows: Sequence[Row]) -> None:
        for row in rows:
            free = [slot for slot in self._slots if slot.row is None]
            slot = max(free, key=lambda slot: (_common(slot.kept, row.prompt), -len(slot.kept)))
            row.cached = min(_common(slot.kept, row.prompt), len(row.prompt) - 1)  # the last one gives logits
            slot.row = row
            if not self._context.memory_seq_rm(
                slot.number, row.cached, -1
            ):  # a recurrent model keeps no part
                self._context.memory_seq_rm(slot.number, -1, -1)
                row.cached = 0
            slot.kept = slot.kept[: row.cached]

    def step(self) -> Iterator[tuple[Row, int, float]]:
        self._batch.reset()
        ready: list[tuple[int, _Slot]] = []
        # Who generates comes first: a long prompt of another may not hold it up.
        for slot in sorted((s for s in self._slots if s.row is not None), key=lambda s: len(s.missing)):
            missing = slot.missing
            taken = missing[: _BATCH - self._batch.n_tokens]
            is_whole = len(taken) == len(missing)
            for left, token in zip(reversed(range(len(taken))), taken, strict=True):
                self._batch.add(token, len(slot.kept), [slot.number], is_whole and left == 0)
                slot.kept.append(token)
            if taken and is_whole:
                ready.append((self._batch.n_tokens - 1, slot))
        self._context.decode(self._batch)
        for position, slot in ready:
            assert slot.row is not None
            logits = np.asarray(self._context.get_logits_ith(position), dtype=np.float32)
            yield slot.row, *batches.draw(logits, slot.row)

    def drop(self, rows: Sequence[Row]) -> None:
        for slot in self._slots:
            if slot.row in rows:
                slot.row = None


def _common(one: list[int], other: list[int]) -> int:
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length

"""A model of ``transformers``: loading it, its batches, and changing its weights in place.

A batch is made of the rows that wait at a moment; batches take turns, a token each, so that a new row waits
for no other to end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from gym_serve.deployments.batched import batches
from gym_serve.deployments.batched.batches import Row
from gym_serve.types.errors import BadRequest


class _Batch:
    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        self.rows = list(rows)
        self.cache: Any = None
        longest = max(len(row.prompt) for row in rows)
        padding = [[0] * (longest - len(row.prompt)) for row in rows]
        ids = [pad + row.prompt for pad, row in zip(padding, rows, strict=True)]
        mask = [pad + [1] * len(row.prompt) for pad, row in zip(padding, rows, strict=True)]
        self.ids, self.mask = torch.tensor(ids, device=device), torch.tensor(mask, device=device)
        self.positions = (self.mask.cumsum(-1) - 1).clamp(min=0)

    def step(self, model: Any) -> Iterator[tuple[Row, int, float]]:
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
            logits = answer.logits[:, -1].float().cpu().numpy()
            drawn = [batches.draw(scores, row) for scores, row in zip(logits, self.rows, strict=True)]
            self.ids = torch.tensor([token for token, _ in drawn], device=self.ids.device)[:, None]
            self.positions = self.positions[:, -1:] + 1
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.rows), 1)], -1)
        for row, (token, log_prob) in zip(self.rows, drawn, strict=True):
            yield row, token, log_prob

    def drop(self, rows: Sequence[Row]) -> None:
        kept = [i for i, row in enumerate(self.rows) if row not in rows]
        is_same = len(kept) == len(self.rows)
        self.rows = [self.rows[i] for i in kept]
        if is_same or not kept:
            return
        index = torch.tensor(kept, device=self.ids.device)
        self.ids, self.mask, self.positions = self.ids[index], self.mask[index], self.positions[index]
        with torch.inference_mode():
            self.cache.batch_select_indices(index)


class TorchSteps:
    """The batches of a model; at most ``max_rows`` begin together."""

    def __init__(self, model: Any, max_rows: int) -> None:
        self.model = model
        self.room = max_rows
        self._batches: list[_Batch] = []

    def add(self, rows: Sequence[Row]) -> None:
        self._batches.append(_Batch(rows, self.model.device))

    def step(self) -> Iterator[tuple[Row, int, float]]:
        for batch in self._batches:
            yield from batch.step(self.model)

    def drop(self, rows: Sequence[Row]) -> None:
        for batch in self._batches:
            batch.drop(rows)
        self._batches = [batch for batch in self._batches if batch.rows]


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

"""A model of ``transformers``: loading it, its batches, and changing its weights in place.

A batch is made of the rows that wait at a moment; batches take turns, a token each, so that a new row waits
for no other to end. Rows of a batch with the same prompt (the group of a task, say) read it once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from gym_serve.deployments.batched import batches
from gym_serve.deployments.batched.batches import Row
from gym_serve.types.errors import BadRequest
from gym_serve.types.media import opened


class _Batch:
    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        self.rows = list(rows)
        self.seen: dict[str, Any] = {}  # what the model is given with the prompt beside its tokens
        self.cache: Any = None
        prompts = list(dict.fromkeys(tuple(row.prompt) for row in rows))
        at = {prompt: i for i, prompt in enumerate(prompts)}
        self.copies: torch.Tensor | None = None  # until the prompts are read: that of each row
        if len(prompts) < len(rows):
            self.copies = torch.tensor([at[tuple(row.prompt)] for row in rows], device=device)
        longest = max(map(len, prompts))
        ids = [[0] * (longest - len(prompt)) + [*prompt] for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
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
                **self.seen,
            )
            self.cache, self.seen = answer.past_key_values, {}
            logits = answer.logits[:, -1].float()
            if self.copies is not None:
                logits, index = logits[self.copies], self.copies
                self.copies = None
                self._select(index)
            drawn = _drawn(logits, self.rows)
            self.ids = torch.tensor([token for token, _ in drawn], device=self.ids.device)[:, None]
            self.positions = self.positions[..., -1:] + 1
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
        if self.copies is not None:
            self.copies = self.copies[index]
        else:
            self._select(index)

    def _select(self, index: torch.Tensor) -> None:
        """Go on with some of the rows, or with copies of them."""
        self.ids, self.mask, self.positions = self.ids[index], self.mask[index], self.positions[index]
        if self.cache is not None:
            with torch.inference_mode():
                self.cache.batch_select_indices(index)


def _drawn(logits: torch.Tensor, rows: Sequence[Row]) -> list[tuple[int, float]]:
    """The next token of each row, and its log probability. Where all tokens count, it is drawn on the device:
    the logits of a large batch are too many to copy."""
    temperatures = torch.tensor([row.sampling.temperature for row in rows], device=logits.device)
    greedy = temperatures == 0
    log_probs = (logits / temperatures.masked_fill(greedy, 1.0)[:, None]).log_softmax(-1)
    chosen = torch.multinomial(log_probs.exp(), 1)[:, 0]
    chosen = torch.where(greedy, log_probs.argmax(-1), chosen)
    own = log_probs.gather(1, chosen[:, None])[:, 0]
    drawn = list(zip(chosen.tolist(), own.tolist(), strict=True))
    for i, row in enumerate(rows):
        if not row.plain:
            drawn[i] = batches.draw(logits[i].cpu().numpy(), row)
    return drawn


class TorchSteps:
    """The batches of a model; at most ``max_rows`` begin together. ``processor``: that of a model which reads
    pictures."""

    def __init__(self, model: Any, max_rows: int, processor: Any = None) -> None:
        self.model = model
        self.room = max_rows
        self._processor = processor
        self._batches: list[_Batch] = []

    def add(self, rows: Sequence[Row]) -> None:
        if blind := [row for row in rows if not row.pictures]:
            self._batches.append(_Batch(blind, self.model.device))
        self._batches += [self._seeing(row) for row in rows if row.pictures]

    def _seeing(self, row: Row) -> _Batch:
        """A batch of one row: models differ in how they hold the pictures of several."""
        batch, device = _Batch([row], self.model.device), self.model.device
        images = [[opened(url) for url in row.pictures]]
        shown = self._processor.image_processor(images, return_tensors="pt")
        for name in ("pixel_values", "pixel_attention_mask", "image_grid_thw", "image_sizes"):
            if (value := shown.get(name)) is not None:
                batch.seen[name] = value.to(device, self.model.dtype if name == "pixel_values" else None)
        places = getattr(self.model.base_model, "get_rope_index", None)
        if places is not None:  # positions of a picture's tokens have a time, a row and a column
            kinds = (batch.ids == self._processor.image_token_id).int()
            grid = batch.seen.get("image_grid_thw")
            batch.positions, _ = places(
                batch.ids, mm_token_type_ids=kinds, image_grid_thw=grid, attention_mask=batch.mask
            )
        return batch

    def step(self) -> Iterator[tuple[Row, int, float]]:
        for batch in self._batches:
            yield from batch.step(self.model)

    def drop(self, rows: Sequence[Row]) -> None:
        for batch in self._batches:
            batch.drop(rows)
        self._batches = [batch for batch in self._batches if batch.rows]


def load_model(path: str, config: Any) -> tuple[Any, Any, Any]:
    """The model, its tokenizer, and its processor if it reads pictures."""
    kind = AutoModelForImageTextToText if config.pictures else AutoModelForCausalLM
    model = kind.from_pretrained(path, dtype=getattr(torch, config.dtype)).to(config.device).eval()
    if not config.pictures:
        return model, AutoTokenizer.from_pretrained(path), None
    processor = AutoProcessor.from_pretrained(path)
    return model, processor.tokenizer, processor


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

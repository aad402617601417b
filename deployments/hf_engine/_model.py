"""A model of ``transformers``: loading it, and changing its weights in place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from gym_serve.types.errors import BadRequest


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

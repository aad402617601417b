"""A model of ``transformers``: loading it, rendering conversations, and changing its weights in place."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from gym_serve.types.errors import BadRequest
from gym_serve.types.exact import exact_json
from gym_serve.types.requests import JSON

__all__ = ["end_tokens", "load_model", "new_weights", "render"]

_PARAMETERS = frozenset(signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
_OURS = _PARAMETERS - {"add_generation_prompt", "continue_final_message", "documents"}
"""What is no variable of a template, but decides what its rendering does; another template among them."""


def load_model(path: str, dtype: str, device: str) -> tuple[Any, Any]:
    """The model and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).to(device)
    return model.eval(), tokenizer


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Ids of the tokens that end a turn."""
    ids = model.generation_config.eos_token_id
    return frozenset([*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id]) - {None}


def render(tokenizer: Any, chat: JSON, messages: list[JSON]) -> list[int]:
    """Tokens of a conversation by the model's template, with the opening of the next turn.

    Raises:
        BadRequest: the template refuses the conversation, or there is none.
    """
    arguments = chat.get("chat_template_kwargs") or {}
    if taken := _OURS & arguments.keys():
        raise BadRequest(f"chat_template_kwargs: {', '.join(sorted(taken))} cannot be set by a request")
    try:
        text = tokenizer.apply_chat_template(
            [_plain(message) for message in messages],
            tools=chat.get("tools"),
            tokenize=False,
            **{"add_generation_prompt": True, **arguments},
        )
    except Exception as error:  # a template is code of the model's author, and may raise anything
        raise BadRequest(f"the chat template refuses this: {type(error).__name__}: {error}") from None
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def new_weights(model: Any, weights: Path | bytes) -> Mapping[str, torch.Tensor]:
    """Weights for `model`, checked.

    Raises:
        BadRequest: they cannot be read, or their names or shapes are others.
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
    given = {own[name].data_ptr() for name in tensors if name in own}
    wrong = [name for name in tensors if name not in own or own[name].shape != tensors[name].shape]
    wrong += [name for name in own if name not in tensors and own[name].data_ptr() not in given]  # tied ones
    if wrong:
        raise BadRequest(f"not the weights of this model: {', '.join(wrong[:5])} ({len(wrong)} in all)")
    return tensors


def _plain(message: JSON) -> JSON:
    """A message as templates want it: text as a string, arguments of calls as objects."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]
        content = "".join(str(part.get("text") or part.get("refusal") or "") for part in parts)
    plain = {**message, "content": content}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [{**c, "function": _decoded(c["function"])} for c in calls]
    return plain


def _decoded(function: JSON) -> JSON:
    try:
        arguments = exact_json(function.get("arguments") or "{}")
    except ValueError:
        return function
    return {**function, "arguments": arguments} if isinstance(arguments, dict) else function

"""The weights of a PyTorch model, on their way to an engine in a graph (`Policy.update_weights`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gym_serve.client import Gym
from gym_serve.types.errors import BadRequest, NotFound

if TYPE_CHECKING:
    import torch


def trained_model(gym: Gym, model: str | None) -> str:
    """Name of the model server that is trained; by default the only model of the agents.

    Raises `NotFound` if there is no such model, `BadRequest` if it takes no weights, or the agents have
    several.
    """
    models = gym.graph.get("models") or {}
    if model is None:
        used = {agent.get("model") for agent in (gym.graph.get("agents") or {}).values()} & models.keys()
        if len(used) != 1:
            names = ", ".join(models) or "none"
            raise BadRequest(f"`model` must name the model that is trained, one of {names}")
        (model,) = used
    if model not in models:
        raise NotFound(f"no model {model!r} in {gym.name}; it has {', '.join(models) or 'none'}")
    if not models[model].get("weight_updates"):
        raise BadRequest(f"models.{model} takes no weights: it must be an engine with `weight_updates: true`")
    return model


def encoded(tensors: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """Named tensors in the format of safetensors. Of tensors that share their memory (a head tied to the
    embeddings) the first is kept; engines tie them again."""
    from safetensors.torch import save

    kept: dict[str, torch.Tensor] = {}
    shared: set[tuple[int, torch.Size]] = set()
    for name, tensor in tensors:
        place = (tensor.data_ptr(), tensor.shape)
        if place not in shared:
            shared.add(place)
            kept[name] = tensor.detach().cpu().contiguous()
    data: bytes = save(kept)
    return data

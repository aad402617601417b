"""`ModelControl`: what can be changed of the models of a running graph; a part of `Gym`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gym_serve.client import loop
from gym_serve.graph.spec import Graph
from gym_serve.servers.model import PauseMode
from gym_serve.types.errors import BadRequest
from gym_serve.types.requests import JSON

__all__ = ["ModelControl"]


class ModelControl:
    """Changes the models of a graph while it runs."""

    name: str
    _resolved: Graph | None
    _changed: dict[str, JSON]
    """Settings that were changed since the graph was deployed, by server."""

    def _check(self, server: str) -> None:
        """Raise `NotFound` where there is no such server."""
        raise NotImplementedError

    def _needs_cluster(self, what: str) -> None:
        """Raise `BadRequest` where the graph runs in this process."""
        raise NotImplementedError

    def handle(self, server: str) -> Any:
        """The Serve handle of a server."""
        raise NotImplementedError

    def set_model_endpoints(
        self, model: str, base_urls: Sequence[str], model_name: str | None = None
    ) -> None:
        """Point a model server at other endpoints, live: its replicas go on, new ones know as well.

        Args:
            model: name of a model server of the type ``chat_model`` or ``openai_model``.
            base_urls: the new endpoints.
            model_name: the new name of the model there; None keeps the old one.

        Raises:
            NotFound: no such server.
            BadRequest: another driver deployed the graph, the server has no endpoints, or none are given.
        """
        from gym_serve.client import deployed

        self._check(model)
        self._needs_cluster("set_model_endpoints")
        if self._resolved is None:
            raise BadRequest(f"{self.name} was deployed by another process; change its endpoints there")
        if not base_urls:
            raise BadRequest(f"{model}: at least one endpoint is meant")
        settings: JSON = {"base_url": list(base_urls) if len(base_urls) > 1 else base_urls[0]}
        if model_name is not None:
            settings["model"] = model_name
        changed = {**self._changed, model: {**self._changed.get(model, {}), **settings}}
        deployed.reconfigure(self.name, self._resolved, model, changed)
        self._changed = changed

    def update_weights(
        self,
        model: str,
        version: str,
        *,
        path: str | Path | None = None,
        tensors: bytes | None = None,
        mode: PauseMode = "keep",
    ) -> None:
        """Give all replicas of a model new weights; blocks until they generate with them.

        Calls that begin afterwards carry ``weight_version`` beside their tokens. A replica that starts later
        (autoscaling, or one that died) has the same weights before it takes a call: leave them at their
        path until the next update.

        Args:
            model: a model server with ``weight_updates`` on (``vllm_engine``, ``hf_engine``).
            version: name of the weights, e.g. the trainer's step.
            path: a folder or file of safetensors that the replicas' machines see.
            tensors: or the weights themselves, as ``safetensors.torch.save(state_dict)`` writes them; they
                go through Ray's object store.
            mode: generations that run go on with the new weights (``keep``), or fail as retryable
                (``abort``).

        Raises:
            NotFound: no such server.
            BadRequest: the model takes no weights, or not these; this Gym reaches the graph over HTTP.
            Unavailable: a replica could not be reached, or broke; it is replaced.
        """
        self._check(model)
        self._needs_cluster("update_weights")
        from gym_serve.graph.weights import update_weights

        if (path is None) == (tensors is None):
            raise BadRequest("give path or tensors, one of the two")
        self.handle(model)  # refuses a graph that is reached over HTTP
        where = None if path is None else str(path)
        loop.wait(update_weights(self.name, model, version, path=where, tensors=tensors, mode=mode))

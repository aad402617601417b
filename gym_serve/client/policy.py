"""`gym.policy`: steers the models that a trainer trains. `Policy` blocks, `AsyncPolicy` is awaited."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gym_serve.client import loop
from gym_serve.client.core import Core
from gym_serve.client.policy_service import Generate, PolicyService
from gym_serve.servers.model import HoldMode, PauseMode
from gym_serve.types.errors import BadRequest
from gym_serve.types.requests import JSON


class _Steering:
    """What both have; its coroutines run on the event loop of this package."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def _pause(self, mode: HoldMode, model: str | None) -> None:
        for name in self._core.models(model):
            await self._core.connection.hold(name, mode)

    async def _resume(self, model: str | None) -> None:
        for name in self._core.models(model):
            await self._core.connection.release(name)

    async def _update(
        self, model: str, version: str, path: str | Path | None, tensors: bytes | None, mode: PauseMode
    ) -> None:
        self._core.check(model)
        if path is not None and tensors is not None:
            raise BadRequest("give path or tensors, one of the two")
        begun = time.monotonic()
        await self._core.connection.update_weights(
            model, version, path=None if path is None else str(path), tensors=tensors, mode=mode
        )
        self._core.update_seconds.observe(model, value=time.monotonic() - begun)
        for stream in list(self._core.streams):
            stream.look()

    async def _set_endpoints(
        self, model: str, base_urls: Sequence[str], model_name: str | None, version: str | None
    ) -> None:
        self._core.check(model)
        if not base_urls:
            raise BadRequest(f"{model}: `base_urls` must name at least one endpoint")
        settings: JSON = {"base_url": list(base_urls) if len(base_urls) > 1 else base_urls[0]}
        if model_name is not None:
            settings["model"] = model_name
        await self._core.connection.reconfigure(model, settings)
        if version is not None:
            await self._update(model, version, None, None, "keep")

    def _service(
        self, model: str, generate: Generate | Any, max_batch: int, concurrency: int | None
    ) -> PolicyService:
        """Made where the caller is: an asynchronous ``generate`` runs on the event loop of that place."""
        self._core.models(model)
        replicas = partial(self._core.connection.replicas, model)
        return PolicyService(model, generate, replicas, max_batch, concurrency)

    async def _serve(self, model: str, service: PolicyService) -> None:
        await self._core.connection.replicas(model)  # refuses where it cannot be
        if (before := self._core.services.pop(model, None)) is not None:
            await before.stop()
        self._core.services[model] = service
        service.start()

    async def _version(self) -> str | None:
        core = self._core
        states = [await core.connection.policy(core.transport(name)) for name in core.models(None)]
        versions = {str(state["weight_version"] or "") for state in states}
        if len(versions) > 1:
            raise BadRequest(
                f"the models of {core.name} have different versions: {', '.join(sorted(versions))}"
            )
        return next(iter(versions), None) or None


class Policy(_Steering):
    """The models of a `Gym`, as ``gym.policy``. Its methods block."""

    def pause(self, mode: HoldMode = "keep", *, model: str | None = None) -> None:
        """Let no model call begin until `resume`, while the policy changes. Episodes wait; none fails for it.

        A waiting call spends its time limit: ``model_timeout`` of the agent must exceed the pause. Judges and
        other models go on, unless they are named.

        Args:
            mode: ``keep``: running generations of an engine in the graph stop between two tokens and go on
                afterwards, those of an endpoint end there; ``wait``: returns when none runs any more;
                ``abort``: they are ended now, and made again from their prompt afterwards.
            model: a model server; by default every model of an agent.

        Raises:
            NotFound: no such server.
            BadRequest: the model is not part of this graph's process or cluster, or also runs inside another
                server (``inline``).
            Forbidden: the graph is reached over HTTP, and has no ``auth_token``.
            Unavailable: a replica did not answer.
        """
        loop.wait(self._pause(mode, model))

    def resume(self, *, model: str | None = None) -> None:
        """Release the model calls that were held; arguments and errors as of `pause`."""
        loop.wait(self._resume(model))

    def update_weights(
        self,
        model: str,
        version: str,
        *,
        path: str | Path | None = None,
        tensors: bytes | None = None,
        mode: PauseMode = "keep",
    ) -> None:
        """Give all replicas of a model new weights; ends when they generate with them.

        Calls that begin afterwards carry ``weight_version`` beside their tokens. A replica that starts later
        (autoscaling, or one that died) has the same weights before it takes a call: leave them at their
        path until the next update.

        Args:
            model: a model server with ``weight_updates`` on (``vllm_engine``, ``hf_engine``); any other one
                can be given a version.
            version: name of the weights, e.g. the trainer's step.
            path: a folder or file of safetensors that the replicas' machines see.
            tensors: or the weights themselves, as ``safetensors.torch.save(state_dict)`` writes them; they
                go through Ray's object store. Without both, only the version changes: the trainer has
                replaced the weights itself, for example at the endpoints of a ``chat_model``.
            mode: running generations continue with the new weights (``keep``), or fail as retryable
                (``abort``).

        Raises:
            NotFound: no such server.
            BadRequest: the model takes no weights, or not these; the graph is reached over HTTP, where only
                a version can be told.
            Forbidden: it is, and has no ``auth_token``.
            Unavailable: a replica could not be reached, or broke; it is replaced.
        """
        loop.wait(self._update(model, version, path, tensors, mode))

    def set_endpoints(
        self,
        model: str,
        base_urls: Sequence[str],
        model_name: str | None = None,
        version: str | None = None,
    ) -> None:
        """Point a model server at other endpoints, live: its replicas go on, new ones know as well.

        Args:
            model: name of a model server of the type ``chat_model`` or ``openai_model``.
            base_urls: the new endpoints.
            model_name: the new name of the model there; None keeps the old one.
            version: name of the weights there, which further calls carry; None keeps the old one.

        Raises:
            NotFound: no such server.
            BadRequest: another process owns the graph, or none; it does not run on a cluster; the server has
                no endpoints, or none are given.
            Forbidden: the graph is reached over HTTP, and has no ``auth_token``.
        """
        loop.wait(self._set_endpoints(model, base_urls, model_name, version))

    def serve(
        self, model: str, generate: Generate | Any, *, max_batch: int = 64, concurrency: int | None = None
    ) -> None:
        """Generate for a ``callback_model``, in this process, until `Gym.shutdown` or another call for it.

        Args:
            model: a model server of the type ``callback_model``.
            generate: takes a list of `PolicyRequest` and returns a list of `PolicyAnswer`, in their order. A
                function runs in a thread. An asynchronous one runs on the event loop from which this is
                called, if there is one; do not block that loop. Of a Ray actor, the method ``generate`` is
                called.
            max_batch: most requests in one call: 1 for an engine that batches by itself, as otherwise a
                short answer waits for the longest of its batch.
            concurrency: most calls at the same time; by default 1 for a function, and no limit otherwise.

        Raises:
            NotFound: no such model.
            InvalidRequest: ``generate`` is nothing that can be called, or a number is out of its range.
            BadRequest: the graph is reached over HTTP.
        """
        loop.wait(self._serve(model, self._service(model, generate, max_batch, concurrency)))

    def version(self) -> str | None:
        """Version of the policy's weights, as the model server has it; None if none was set.

        It is that of `update_weights`, or of `set_endpoints` with a ``version``.

        Raises:
            BadRequest: the agents have models of different versions.
        """
        return loop.wait(self._version())


class AsyncPolicy(_Steering):
    """The models of an `AsyncGym`, as ``gym.policy``: the methods of `Policy`, to be awaited."""

    async def pause(self, mode: HoldMode = "keep", *, model: str | None = None) -> None:
        await loop.run(self._pause(mode, model))

    async def resume(self, *, model: str | None = None) -> None:
        await loop.run(self._resume(model))

    async def update_weights(
        self,
        model: str,
        version: str,
        *,
        path: str | Path | None = None,
        tensors: bytes | None = None,
        mode: PauseMode = "keep",
    ) -> None:
        await loop.run(self._update(model, version, path, tensors, mode))

    async def set_endpoints(
        self,
        model: str,
        base_urls: Sequence[str],
        model_name: str | None = None,
        version: str | None = None,
    ) -> None:
        await loop.run(self._set_endpoints(model, base_urls, model_name, version))

    async def serve(
        self, model: str, generate: Generate | Any, *, max_batch: int = 64, concurrency: int | None = None
    ) -> None:
        await loop.run(self._serve(model, self._service(model, generate, max_batch, concurrency)))

    async def version(self) -> str | None:
        return await loop.run(self._version())

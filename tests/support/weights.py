"""A model whose weights are a text, which it says."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, Literal

from gym_serve import ModelServer
from gym_serve.servers.base import Operation
from gym_serve.types.errors import BadRequest


class Weighted(ModelServer):
    """Takes all weights but ``b"wrong"``, and says in which process it has them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.said: dict[str, Any] = {"weights": "first", "version": "0", "paused": False}

    async def update_weights(
        self, weights: Path | bytes, version: str, mode: Literal["keep", "abort"] = "keep"
    ) -> None:
        blob = weights if isinstance(weights, bytes) else await asyncio.to_thread(weights.read_bytes)
        text = blob.decode()
        if text == "wrong":
            raise BadRequest("not the weights of this model")
        self.said |= {"weights": text, "version": version}

    async def responses(self, body: dict[str, Any]) -> dict[str, Any]:
        return {**self.said, "pid": os.getpid()}

    def operations(self) -> dict[str, Operation]:
        any_ = {"type": "object"}
        controls = [Operation(handler, "", any_, any_) for handler in (self._update, self._pause)]
        names = ("weights/update", "weights/pause")
        return {**super().operations(), **dict(zip(names, controls, strict=True))}

    async def _update(self, body: Any) -> Any:
        raise AssertionError("a replica of a graph tells all of them instead")

    async def _pause(self, body: Any) -> Any:
        self.said["paused"] = True
        return {"paused": True}

"""`llama_cpp_engine`: llama.cpp in the server's own process: real weights without a GPU, a key or a server.

The model is one GGUF file. Requests share each pass over the weights, and a slot keeps what it has read for
the next prompt that begins alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from gym_serve.deployments.batched import BatchedEngine
from gym_serve.servers.base import missing_path
from gym_serve.types.errors import BadRequest, GraphError

__all__ = ["LlamaCppEngine"]


class LlamaCppEngine(BatchedEngine):
    """A model of llama.cpp in the server's own process."""

    requires: ClassVar[Mapping[str, str]] = {"cyllama": "gym-serve[local]"}

    class Config(BatchedEngine.Config):
        model: str
        """GGUF file of the weights, with their tokenizer and chat template."""
        chat_template: str | None = None
        """File of a chat template to use instead of the one in the GGUF file."""
        max_model_len: int | None = Field(None, ge=1)
        """Most tokens of a prompt and its generation together; by default the model's positions, 8,192 at
        most. The memory for so many tokens is taken at the start, for each slot."""
        slots: int = Field(4, ge=1, le=64)
        """Generations at the same time; others wait."""
        threads: int | None = Field(None, ge=1)
        """Threads of a pass over the weights; by default half as many as the machine has cores."""
        gpu_layers: int = Field(0, ge=-1)
        """Layers on a GPU, if cyllama was built for one; -1: all."""

    config: Config

    @classmethod
    def preflight(cls, config: Config) -> Iterable[str]:
        yield from super().preflight(config)
        yield from missing_path("model", Path(config.model).expanduser())
        if config.chat_template is not None:
            yield from missing_path("chat_template", Path(config.chat_template).expanduser())
        if config.weight_updates:
            yield "weight_updates: llama_cpp_engine keeps the weights of its file; hf_engine takes others"

    async def start(self) -> None:
        try:
            from gym_serve.deployments.llama_cpp_engine import _model
        except ImportError as error:
            raise GraphError(f"llama_cpp_engine needs {error.name}: pip install 'gym-serve[local]'") from None
        self.begin(*await asyncio.to_thread(_model.load, self.config))

    async def load(self, weights: Path | bytes) -> None:
        raise BadRequest(f"{self.name} keeps the weights of its GGUF file")

"""`hf_engine`: an embedded engine on ``transformers``, for machines without a GPU and for tests.

It starts in seconds, and its default is a tiny model that is made on the spot. It has no paged cache:
policies worth training run on `vllm_engine`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from gym_serve.deployments.batched import BatchedEngine
from gym_serve.deployments.hf_engine.tiny_model import tiny_model
from gym_serve.deployments.token_model import missing_model
from gym_serve.types.errors import GraphError, Unavailable

if TYPE_CHECKING:
    from gym_serve.deployments.hf_engine._model import TorchSteps

__all__ = ["HFEngine"]


class HFEngine(BatchedEngine):
    """A causal language model of ``transformers`` in the server's own process."""

    requires: ClassVar[Mapping[str, str]] = {"torch": "gym-serve[hf]", "transformers": "gym-serve[hf]"}

    class Config(BatchedEngine.Config):
        model: str | None = None
        """Folder or name of the model; by default a tiny one with random weights, made at first use."""
        dtype: Literal["float32", "bfloat16", "float16"] = "float32"
        """Number format of the weights."""
        device: str = "cpu"
        """Device: ``cpu`` or ``cuda``."""
        max_batch: int = Field(64, ge=1)
        """Generations that start together at most."""
        pictures: bool = False
        """Whether the model reads pictures; its folder has its processor. Generations with pictures run one
        by one."""

    config: Config

    @classmethod
    def preflight(cls, config: Config) -> Iterable[str]:
        yield from super().preflight(config)
        if config.model is not None:
            yield from missing_model("model", config.model)

    def __init__(self, *, name: str | None = None, **settings: Any) -> None:
        super().__init__(name=name, **settings)
        self._steps: TorchSteps | None = None

    async def start(self) -> None:
        try:
            from gym_serve.deployments.batched.grammar import Grammars
            from gym_serve.deployments.hf_engine import _model
        except ImportError as error:
            raise GraphError(f"hf_engine needs {error.name}: pip install 'gym-serve[hf]'") from None
        config = self.config
        path = config.model or str(await asyncio.to_thread(tiny_model))
        model, tokenizer, processor = await asyncio.to_thread(_model.load_model, path, config)
        text = model.config.get_text_config()
        context = config.max_model_len or int(text.max_position_embeddings)
        vocabulary, ends = int(text.vocab_size), _model.end_tokens(model, tokenizer)

        def words() -> Any:
            from llguidance.hf import from_tokenizer

            return from_tokenizer(tokenizer, vocabulary, sorted(ends))

        grammars = Grammars(words, tokenizer.get_added_vocab(), vocabulary, ends)
        self._steps = _model.TorchSteps(model, config.max_batch, processor)
        self.begin(self._steps, tokenizer, context, grammars, processor)

    async def load(self, weights: Path | bytes) -> None:
        from gym_serve.deployments.hf_engine import _model

        if self._steps is None:
            raise Unavailable("the engine is not loaded: call start() first")
        tensors = await asyncio.to_thread(_model.new_weights, self._steps.model, weights)
        self._steps.model.load_state_dict(tensors, strict=False)

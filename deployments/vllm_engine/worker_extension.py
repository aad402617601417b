"""What `vllm_engine` adds to vLLM's workers: weights that come as bytes (``--worker-extension-cls``)."""

from __future__ import annotations

from typing import Any


class WeightsExtension:
    """A mixin of vLLM's worker; it holds nothing of its own."""

    model_runner: Any

    def load_named_tensors(self, blob: bytes) -> None:
        """Replace all weights by a file of safetensors, with the names of the model's checkpoint."""
        # Here, as this module is imported by name in vLLM's own processes only.
        from safetensors.torch import load

        self.model_runner.reload_weights(weights_iterator=iter(load(blob).items()))

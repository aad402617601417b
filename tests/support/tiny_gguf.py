"""A tiny model with random weights as a GGUF file, made without torch: for tests of `llama_cpp_engine`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gym_serve.deployments.hf_engine.tiny_model import TEMPLATE
from gym_serve.deployments.llama_cpp_engine._vocabulary import _BYTES

_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_ADDED = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
_MERGES = ["t h", "th e", "i n", "e r", "Ġ t", "Ġ a", "Ġ c", "t y", "Ġ the", "o u", "a t", '" :']
_WIDTH, _HIDDEN, _LAYERS, _HEADS, _POSITIONS = 64, 128, 2, 2, 4096


def make_tiny_gguf(path: Path, *, template: str = TEMPLATE) -> Path:
    """Write the model: a Llama of 0.1 M parameters, a byte-level BPE and a template in Qwen's style."""
    import gguf

    tokens = [*_SPECIAL, *_ADDED, *sorted(_BYTES), *(merge.replace(" ", "") for merge in _MERGES)]
    kinds = [gguf.TokenType.CONTROL] * len(_SPECIAL) + [gguf.TokenType.USER_DEFINED] * len(_ADDED)
    kinds += [gguf.TokenType.NORMAL] * (len(tokens) - len(kinds))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(_POSITIONS)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_HIDDEN)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(_WIDTH // _HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(_MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(template)
    random = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        scale = 1.0 if len(shape) == 1 else 0.2
        values = np.ones(shape) if len(shape) == 1 else random.normal(0, scale, shape)
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))

    add("token_embd", len(tokens), _WIDTH)
    add("output_norm", _WIDTH)
    add("output", len(tokens), _WIDTH)
    for layer in range(_LAYERS):
        add(f"blk.{layer}.attn_norm", _WIDTH)
        add(f"blk.{layer}.ffn_norm", _WIDTH)
        for part in ("q", "k", "v", "output"):
            add(f"blk.{layer}.attn_{part}", _WIDTH, _WIDTH)
        add(f"blk.{layer}.ffn_gate", _HIDDEN, _WIDTH)
        add(f"blk.{layer}.ffn_up", _HIDDEN, _WIDTH)
        add(f"blk.{layer}.ffn_down", _WIDTH, _HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def log_probs_by_llama_cpp(path: Path, prompt: list[int], made: list[int], temperature: float) -> list[float]:
    """Log probabilities of ``made`` after ``prompt``, by one pass of llama.cpp over both."""
    from cyllama.llama import llama_cpp

    from gym_serve.deployments.llama_cpp_engine._model import _Model

    model = _Model(str(path), llama_cpp.LlamaModelParams())
    params = llama_cpp.LlamaContextParams()
    params.n_ctx = params.n_batch = params.n_ubatch = 1024
    context = llama_cpp.LlamaContext(model, params)
    batch = llama_cpp.LlamaBatch(n_tokens=1024, embd=0, n_seq_max=1)
    for position, token in enumerate(prompt + made):
        batch.add(token, position, [0], True)
    context.decode(batch)
    found = []
    for i, token in enumerate(made):
        scores = np.asarray(context.get_logits_ith(len(prompt) + i - 1)) / temperature
        scores -= scores.max()
        found.append(float(scores[token] - np.log(np.exp(scores).sum())))
    return found

"""Attention of packed sequences without a GPU, for TRL's `AsyncGRPOTrainer`."""

from __future__ import annotations

from typing import Any

import torch


def varlen_attention(
    query: Any,
    key: Any,
    value: Any,
    ends_q: Any,
    ends_k: Any,
    *lengths: int,
    softmax_scale: Any,
    **options: Any,
) -> Any:
    """What AsyncGRPOTrainer asks of FlashAttention's kernel, which needs a GPU: causal attention of packed
    sequences, the last of whose keys are those of its queries."""
    made = []
    for i in range(len(ends_q) - 1):
        q, k, v = (
            tensor[ends[i] : ends[i + 1]].transpose(0, 1)
            for tensor, ends in ((query, ends_q), (key, ends_k), (value, ends_k))
        )
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        attended = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=softmax_scale, enable_gqa=True
        )
        made.append(attended.transpose(0, 1))
    return torch.cat(made)

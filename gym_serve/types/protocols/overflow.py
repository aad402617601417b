"""A prompt that does not fit into the model's context.

For a rollout this is the policy's own result (it talked too long), not a failure: the answer is an
empty response, incomplete for ``max_output_tokens``. Most backends say it only in words. Those words are
looked for in what the backend itself says, not in the rest of its answer, which may repeat the request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

__all__ = ["is_context_overflow"]

_STATUSES = (400, 422)  # 422 is TGI's
_CODES = frozenset({"context_length_exceeded", "exceed_context_size_error"})
_LENGTH = 1000  # characters of a message; what comes later is mostly a repeated input

_STATED = re.compile(
    "|".join(
        (
            # vLLM, OpenAI, OpenRouter, DeepSeek; "exceeds the model's maximum context length of" of SGLang
            r"maximum context length (is|of)\b",
            r"model's maximum context length \(\d",
            # Mistral: "... too large for model with 32768 maximum context length"
            r"\d maximum context length",
            # Fireworks: "The prompt is too long: 9000, model maximum context length: 8191"; and Anthropic
            r"prompt is too long: \d",
            # vLLM: "The decoder prompt (length N) is longer than the maximum model length of M."
            r"longer than the maximum model length of \d",
            # older vLLM, where the prompt leaves no room: "max_tokens must be at least 1, got -5."
            r"max_tokens must be at least 1, got -\d",
            # SGLang
            r"longer than the model's context length",
            r"tokens\) exceeds the maximum allowed length",
            # OpenAI's Responses API: "Your input exceeds the context window of this model."
            r"exceeds? the context window of",
            # TensorRT-LLM: "The sum of prompt length (N), query length (0) should not exceed
            # max_num_tokens (M)"; "... = max_seq_len (M) - `splited_prompt_len` (N)"
            r"prompt length \([\d.]+\).{0,60} should not exceed max_num_tokens",
            r"max_seq_len \(\d+\) - `splited_prompt_len`",
            r"prompt length \(\d+\) exceeds maximum sequence length",
            # llama.cpp, Anthropic, Gemini, TGI
            r"exceeds the available context size",
            r"exceed context limit: \d",
            r"input token count.{0,40} exceeds the maximum number of tokens",
            r"`inputs` tokens \+ `max_new_tokens` must be <=",
        )
    )
)


def is_context_overflow(status: int, body_text: str) -> bool:
    """Whether a backend's error says that the prompt (with the tokens to produce) does not fit.

    A limit on the *output* alone ("max_tokens is too large ... supports at most 4096 completion
    tokens") is a mistake of the request, and not meant.
    """
    if status not in _STATUSES:
        return False
    code, message = _said(body_text)
    return code in _CODES or _STATED.search(message[:_LENGTH].lower()) is not None


def _said(body_text: str) -> tuple[str | None, str]:
    """The code and the message of an error body."""
    try:
        body: Any = orjson.loads(body_text)
    except orjson.JSONDecodeError:
        return None, body_text
    error = body.get("error", body) if isinstance(body, Mapping) else body
    if not isinstance(error, Mapping):
        return None, error if isinstance(error, str) else ""
    message = error.get("message") or error.get("detail")
    codes = (error.get("code"), error.get("type"))
    code = next((code for code in codes if isinstance(code, str) and code in _CODES), None)
    return code, message if isinstance(message, str) else ""

"""Whether a backend's error says that the prompt does not fit the model's context.

That is the policy's own result (it wrote too much), and the episode is verified as it stands. Every backend
says it in words of its own, and few have a code for it. `_WORDS` lists them with their source; the texts were
read in the backends' code, their issues, and bug reports of their clients (November 2026).

A limit of the *output* alone ("max_tokens is too large: this model supports at most 4096 completion tokens")
is a mistake of the request, and not meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

_STATUSES = frozenset({400, 413, 422, 500})
"""413: Cerebras, proxies. 422: TGI. 500: SGLang and prime-rl's server, where the engine raised it."""

_CODES = frozenset(
    {
        "context_length_exceeded",
        "exceed_context_size_error",
        "model_context_window_exceeded",
        "string_above_max_length",
    }
)

_WORDS: tuple[tuple[str, str], ...] = (
    (r"maximum context length (is|of)\b", "vLLM, OpenAI, OpenRouter, DeepSeek, SGLang"),
    (r"model's maximum context length \(\d", "vLLM"),
    (r"\d maximum context length", "Mistral: too large for model with 32768 maximum context length"),
    (r"prompt is too long: \d", "Anthropic, Fireworks"),
    (r"longer than the maximum model length of \d", "vLLM: The decoder prompt (length N) is ..."),
    (r"max_tokens must be at least 1, got -\d", "older vLLM, where the prompt leaves no room"),
    (r"passed \d+ input (tokens|characters) and requested \d+ output tokens", "vLLM 0.17 and later"),
    (r"context length is only \d", "vLLM 0.17 and later, the second half of it"),
    (r"prompt contains \d+ characters \(more than \d+ characters, which is the upper bound", "vLLM 0.19"),
    (r"longer than the model's context length", "SGLang"),
    (r"tokens\) exceeds the maximum allowed length", "SGLang"),
    (r"exceeds? the context window of", "OpenAI's Responses API"),
    (r"context window exceeds limit", "MiniMax"),
    (r"exceeded model token limit", "Moonshot"),
    (r"range of input length should be", "DashScope"),
    (r"maximum prompt length is \d", "xAI"),
    (r"prompt length \([\d.]+\).{0,60} should not exceed max_num_tokens", "TensorRT-LLM"),
    (r"max_seq_len \(\d+\) - `splited_prompt_len`", "TensorRT-LLM"),
    (r"prompt length \(\d+\) exceeds maximum sequence length", "TensorRT-LLM"),
    (r"exceeds maximum input sequence length", "tt-inference-server"),
    (r"exceeds the available context size", "llama.cpp"),
    (r"greater than the context length", "LM Studio"),
    (r"prompt has [\d,]+ tokens?, but the configured context size is", "ds4"),
    (r"prompt too long; exceeded (max )?context length", "Ollama"),
    (r"exceed context limit: \d", "Anthropic: input length and `max_tokens` exceed context limit: ..."),
    (r"input token count.{0,40} exceeds the maximum number of tokens", "Gemini"),
    (r"prompt token count of \d+ exceeds the limit of \d", "GitHub Copilot"),
    (r"`inputs` tokens \+ `max_new_tokens` must be <=", "TGI"),
    (r"input is too long for requested model", "Bedrock"),
    (
        r"context[ _](length|window|size|limit)\b.{0,40}\b(exceeded|too small)\b",
        "others",
    ),
    (
        r"\b(prompt|input|conversation|messages)\b.{0,80}\bexceeds?\b.{0,60}\b(context|max_model_len)\b",
        "others",
    ),
)
_STATED = re.compile("|".join(f"(?:{words})" for words, _ in _WORDS), re.DOTALL)
_LENGTH = 1000  # characters of a message; what comes later is mostly a repeated input
_DEEPEST = 6  # errors in errors: OpenRouter's and LiteLLM's have the provider's as a text


def is_context_overflow(status: int, body_text: str) -> bool:
    """Whether a backend's error says that the prompt (with the tokens to produce) does not fit.

    Args:
        status: HTTP status of the answer.
        body_text: its body, whatever its form.
    """
    if status not in _STATUSES:
        return False
    return any(
        said in _CODES or _STATED.search(said[:_LENGTH].lower()) is not None
        for said in _said(_read(body_text), _DEEPEST)
    )


def _read(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def _said(body: Any, deep: int) -> Iterator[str]:
    """The codes and messages of an error body: an object, a list (Gemini's), a text, or one in another."""
    if isinstance(body, str):
        yield body
        start = body.find("{")
        if deep and start >= 0 and isinstance(inner := _read(body[start : body.rfind("}") + 1]), Mapping):
            yield from _said(inner, deep - 1)
    elif isinstance(body, list) and deep:
        for each in body[:4]:
            yield from _said(each, deep - 1)
    elif isinstance(body, Mapping) and deep:
        for key in ("code", "type", "message", "detail", "msg", "error", "errors", "metadata", "raw", "body"):
            if key in body:
                yield from _said(body[key], deep - 1)

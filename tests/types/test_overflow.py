# ruff: noqa: E501  # the words of backends
import pytest

from gym_serve.types.protocols import is_context_overflow


@pytest.mark.parametrize(
    "text",
    [
        # vLLM
        "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens (4000 in the "
        "messages, 1000 in the completion). Please reduce the length of the messages or completion.",
        "This model's maximum context length is 2048 tokens. However, your request has 8 input tokens",
        "Input length (11680) exceeds model's maximum context length (4096).",
        "The decoder prompt (length 16476) is longer than the maximum model length of 16384.",
        "max_tokens must be at least 1, got -7584. (parameter=max_tokens, value=-7584)",
        # SGLang
        "The input (12345 tokens) is longer than the model's context length (8192 tokens).",
        "Requested token count exceeds the model's maximum context length of 8192 tokens.",
        "Input length (160062 tokens) exceeds the maximum allowed length (59862 tokens). Use a shorter input",
        # OpenAI
        '{"error": {"message": "...", "code": "context_length_exceeded"}}',
        "Your input exceeds the context window of this model. Please adjust your input and try again.",
        # TensorRT-LLM
        "The sum of prompt length (72417.0), query length (0) should not exceed max_num_tokens (69632)",
        "`default_max_tokens` (-152) must be greater than 0, `default_max_tokens` (-152) = "
        "max_seq_len (8192) - `splited_prompt_len` (8000) - `query_token_len` (344)",
        "Prompt length (5056) exceeds maximum sequence length (2048)",
        # vLLM from 0.17 on, also behind LiteLLM, and as a body of FastAPI
        "You passed 8193 input tokens and requested 16 output tokens. However, the model's context length is only "
        "8192 tokens, resulting in a maximum input length of 8176 tokens.",
        '{"error": {"message": "litellm.BadRequestError: OpenAIException - {\\"error\\": {\\"message\\": \\"You '
        'passed 9 input tokens and requested 3 output tokens.\\"}}", "type": null, "code": "400"}}',
        '{"detail": [{"msg": "The decoder prompt (length 9) is longer than the maximum model length of 8."}]}',
        # OpenRouter, Moonshot, DashScope, xAI, Gemini
        '{"error": {"message": "Provider returned error", "code": 400, "metadata": {"raw": "{\\"error\\": '
        '{\\"message\\": \\"prompt is too long: 9 tokens > 8 maximum\\"}}", "provider_name": "Anthropic"}}}',
        "Invalid request: Your request exceeded model token limit: 262144 (requested: 291351)",
        '{"error": {"code": "invalid_parameter_error", "message": "Range of input length should be [1, 30720]"}}',
        "This model's maximum prompt length is 131072 but the request contains 537812 tokens.",
        '[{"error": {"code": 400, "message": "The input token count (1200000) exceeds the maximum number of tokens '
        'allowed (1048576).", "status": "INVALID_ARGUMENT"}}]',
        '{"error": "context_length_exceeded"}',
        "This request's prompt exceeds the context of the model",
        # llama.cpp, Anthropic
        "the request exceeds the available context size, try increasing it",
        "prompt is too long: 250000 tokens > 200000 maximum",
    ],
)
def test_context_overflow_in_the_words_of_the_backends(text):
    for status in (400, 413, 422, 500):
        assert is_context_overflow(status, text)
    assert not is_context_overflow(404, text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "temperature must be non-negative, got -1",
        "max_tokens is too large: 5000. This model supports at most 4096 completion tokens",
        "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead.",
        "string too long: the name exceeds the maximum allowed length (64)",
    ],
)
def test_other_errors_are_no_overflow(text):
    assert not is_context_overflow(400, text)

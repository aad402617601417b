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
        # llama.cpp, Anthropic
        "the request exceeds the available context size, try increasing it",
        "prompt is too long: 250000 tokens > 200000 maximum",
    ],
)
def test_context_overflow_in_the_words_of_the_backends(text):
    assert is_context_overflow(400, text)
    assert not is_context_overflow(500, text)


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

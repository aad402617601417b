# ruff: noqa: E501  # the words of backends
import json
import time
from email.utils import formatdate

import pytest
from support.quirks import KEY, REFUSALS, RETRY, ROW, WAIT, said
from support.tables import each

from gym_serve.types.errors import (
    BadRequest,
    EndpointAccessDenied,
    GymError,
)
from gym_serve.types.protocols import (
    refusal,
    says_full,
    wait_of,
)


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
        "Prompt is too long",
        # TGI, Cohere, Vertex, LM Studio, Zhipu, Volcengine, llama-cpp-python, OpenAI
        "`inputs` must have less than 1024 tokens. Given: 2000",
        "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000 `inputs` tokens and 20 `max_new_tokens`",
        "inputs tokens + max_new_tokens must be <= 4096",
        "too many tokens: total number of tokens in the prompt cannot exceed 4081 - received 5000",
        "The input token count (40000) exceeds the maximum number of tokens allowed (32768).",
        "Unable to submit request because the input token count is 40000 but model only supports up to 32768.",
        "Trying to keep the first 5000 tokens when context the overflows. However, the model is loaded with 4096",
        '{"error": {"code": "1261", "message": "Prompt exceeds max length"}}',
        "Total tokens of image and text exceed max message tokens.",
        "Requested tokens (5000) exceed context window of 4096",
        "Input tokens exceed the configured limit of 272000 tokens. Your messages resulted in 280000 tokens.",
        "Prompt length (5000) exceeds maximum input length",
        "length of prompt_tokens (140000) must be less than max_seq_len (131072).",
        "inputs tokens (9000) + max_new_tokens (4) exceeds max sequence length (8192)",
    ],
)
def test_context_overflow_in_the_words_of_the_backends(text):
    for status in (400, 413, 422, 500):
        assert refusal("http://x", status, {}, text) is None
    assert refusal("http://x", 404, {}, text) is not None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "temperature must be non-negative, got -1",
        "max_tokens is too large: 5000. This model supports at most 4096 completion tokens",
        "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead.",
        "string too long: the name exceeds the maximum allowed length (64)",
        "Rate limit reached: too many tokens per minute. Limit 30000, requested 40000",
        "Your input tokens exceed the configured limit of 30000 tokens per minute",
        "Number of input tokens per minute exceeds the limit of your organization",
        "The prompt exceeds your quota of requests",
        "`inputs` must be a string",
        "max_new_tokens must be <= 4096",
    ],
)
def test_other_errors_are_no_overflow(text):
    assert refusal("http://x", 400, {}, text) is not None


@pytest.mark.parametrize(("status", "body", "error"), REFUSALS, ids=lambda value: str(value)[:70])
def test_what_an_error_means(status, body, error):
    text = body if isinstance(body, str) else json.dumps(body)
    assert type(refusal("http://x", status, {}, text)) is error


def test_a_bare_403_of_an_endpoint_that_answers_is_about_the_prompt():
    assert type(refusal("http://x", 403, {}, "no", answered=True)) is BadRequest
    denied = refusal("http://x", 403, {}, json.dumps(said("no", code="invalid_api_key")), answered=True)
    assert type(denied) is EndpointAccessDenied


CHUNK = {"choices": [{"delta": {}, "finish_reason": "error"}]}


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        *each(WAIT, said("slow", code=429), said("slow", code="429"), said("x", code="rate_limit_exceeded")),
        *each(WAIT, {**CHUNK, **said("x", code=429)}),
        *each(WAIT, {"type": "error", "code": "rate_limit_exceeded", "message": "x"}),
        *each(WAIT, {"type": "error", "error": {"type": "overloaded_error", "message": "x"}}),
        *each(WAIT, {"code": 429, "msg": "busy", "success": False}),
        *each(WAIT, {"code": "Throttling", "message": "Requests throttling triggered"}),
        *each(KEY, said("who?", code=401), {"status": 401, "message": "who?"}),
        *each(RETRY, said("gone", code=502), said("x", status=503), said("x", code="server_error")),
        *each(RETRY, said("x", code="engine_crashed"), {"error": "boom"}),
        *each(RETRY, {"choices": [{"error": {"code": 502, "message": "x"}}]}),
        *each(RETRY, {"object": "error", "message": "boom", "type": "InternalServerError", "code": 500}),
        *each(RETRY, {"type": "response.failed", "response": {}}),
        *each(ROW, said("no", code=400), said("x", code="invalid_image_url")),
        *each(ROW, {"type": "response.failed", "response": said("x", code="invalid_prompt")}),
        *each(None, {"object": "response", "status": "completed", "output": []}),
        *each(None, {"error": None, "output": []}, {"type": "response.created", "response": {"error": None}}),
        *each(None, {"choices": []}, {"choices": "x"}, "x", None),
    ],
    ids=lambda value: str(value)[:70],
)
def test_what_an_error_inside_an_answer_means(answer, error):
    found = None
    try:
        assert not says_full("http://x", answer)
    except GymError as raised:
        found = type(raised)
    assert found is error


def test_an_overflow_inside_an_answer():
    for code in (400, "context_length_exceeded"):
        assert says_full("http://x", said("maximum context length is 8 tokens", code=code))


@pytest.mark.parametrize(
    ("headers", "body", "seconds"),
    [
        *(({"Retry-After": value}, None, seconds) for value, seconds in (("3", 3), ("0.5", 0.5), ("-1", 0))),
        *(({"Retry-After": value}, None, None) for value in ("inf", "nan", "soon", "")),
        ({"Retry-After": formatdate(0, usegmt=True)}, None, 0),
        ({"Retry-After": "86400"}, None, 86400),
        ({"Retry-After-Ms": "250"}, None, 0.25),
        ({"X-RateLimit-Reset-Requests": "6m0s"}, None, 360),
        ({"X-RateLimit-Reset-Requests": "1h2m3.5s"}, None, 3723.5),
        ({"X-RateLimit-Reset": "1000"}, None, 1000),
        ({"RateLimit-Reset": "7"}, None, 7),
        ({"X-RateLimit-Reset-Tokens": "12.5s"}, None, 12.5),
        ({}, said("Please try again in 7m12.5s. Visit"), 432.5),
        ({}, said("Please retry in 34s."), 34),
        ({}, said("x", details=[{"@type": "RetryInfo", "retryDelay": "21s"}]), 21),
        ({}, said("slow"), None),
        ({}, None, None),
    ],
)
def test_until_when_an_endpoint_asks_to_wait(headers, body, seconds):
    assert wait_of(headers, body) == seconds


def test_moments():
    assert wait_of({"Retry-After": "Fri, 01 Jan 2100 00:00:00 GMT"}) > 1e6
    for moment in (time.time() + 100, (time.time() + 100) * 1000):
        assert 90 < wait_of({"X-RateLimit-Reset": str(int(moment))}) <= 100

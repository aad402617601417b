"""What an endpoint means when it refuses a call: one table from status, code and words to an error.

It is read for a status of 400 or more, for an error inside a 200 and for one inside a stream. The first row
of `_TABLE` that fits counts, then the status alone (`_STATUSES`):

    meaning    error                  what follows
    OVERFLOW   none                   the prompt does not fit: an empty answer, and the episode is verified
    ROW        BadRequest             this rollout fails, and is not tried again
    KEY        EndpointAccessDenied   key or account: the run stops, its rows stay open
    SETTING    EndpointMisconfigured  model, address or parameter: so too, after a few in a row
    WAIT       Overloaded             tried again after the time that the endpoint names
    RETRY      Unavailable            tried again
An overflow is the policy's own result (it wrote too much). A limit of the *output* alone ("max_tokens is too
large: this model supports at most 4096 completion tokens") is a mistake of the request, and not meant.

Messages repeat what the model wrote, which may not stop a run: words that mean KEY or SETTING count at the
beginning of a message only, and an error in the text of another one only where a proxy puts it.

Source: the backends' code, their documentation, and bug reports of their clients (November 2026).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from enum import Enum
from math import isfinite
from typing import Any, NamedTuple

import orjson

from gym_serve.types.errors import (
    LONGEST_WAIT,
    BadRequest,
    EndpointAccessDenied,
    EndpointMisconfigured,
    GymError,
    Overloaded,
    Unavailable,
    error_from_body,
)


class Meaning(Enum):
    """What an endpoint means; see the module."""

    OVERFLOW = "overflow"
    ROW = "row"
    KEY = "key"
    SETTING = "setting"
    WAIT = "wait"
    RETRY = "retry"


_OVERFLOW_STATUSES = frozenset({400, 413, 422, 500})
"""413: Cerebras, proxies. 422: TGI. 500: SGLang and prime-rl's server, where the engine raised it."""

_OVERFLOW_CODES = frozenset(
    {
        "context_length_exceeded",
        "exceed_context_size_error",
        "model_context_window_exceeded",
        "string_above_max_length",
    }
)

_OVERFLOW: tuple[tuple[str, str], ...] = (
    (r"maximum context length (is|of)\b", "vLLM, OpenAI, OpenRouter, DeepSeek, SGLang"),
    (r"model's maximum context length \(\d", "vLLM"),
    (r"\d maximum context length", "Mistral: too large for model with 32768 maximum context length"),
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
    (r"length of prompt_tokens \(\d+\) must be less than max_seq_len", "SiliconFlow"),
    (r"\btokens\b.{0,60} exceeds? max(imum)? sequence length", "LMDeploy, others"),
    (r"exceeds maximum input sequence length", "tt-inference-server"),
    (r"exceeds the available context size", "llama.cpp"),
    (r"greater than the context length", "LM Studio"),
    (r"prompt has [\d,]+ tokens?, but the configured context size is", "ds4"),
    (r"prompt too long; exceeded (max )?context length", "Ollama"),
    (r"exceed context limit: \d", "Anthropic: input length and `max_tokens` exceed context limit: ..."),
    (r"input token count.{0,40} exceeds the maximum number of tokens", "Gemini"),
    (r"prompt token count of \d+ exceeds the limit of \d", "GitHub Copilot"),
    (r"`?inputs`? (tokens \+ `?max_new_tokens`? must be <=|must have less than \d)", "TGI"),
    (r"too many tokens: .{0,40}\bprompt", "Cohere"),
    (r"input token count is \d+ but model only supports", "Vertex"),
    (r"trying to keep the first \d+ tokens when", "LM Studio"),
    (r"\b(prompt|input) is too long\b", "Anthropic, Fireworks, Bedrock"),
    (r"context[ _](length|window|size|limit)\b.{0,40}\b(exceeded|too small)\b", "others"),
    (
        r"\b(prompt|input|conversation|messages|requested tokens)\b.{0,80}\bexceeds?\b.{0,60}"
        r"\b(context|max_model_len)\b",
        "llama-cpp-python, others",
    ),
    (
        r"\b(prompt|input tokens|prompt length|tokens of image and text)\b.{0,20}\bexceeds? (the )?"
        r"(max\w* (input |message |prompt )?(length|tokens)|configured limit of \d[\d,]* tokens)(?! per )",
        "Zhipu, Volcengine, OpenAI, others",
    ),
)
_STATED = re.compile("|".join(f"(?:{words})" for words, _ in _OVERFLOW), re.DOTALL)


class _Row(NamedTuple):
    meaning: Meaning
    codes: str  # of the error's ``code``, ``type``, ``status`` or ``reason``; a pattern of the whole
    words: str  # with which its message begins; a pattern
    source: str


_TABLE = (
    # Of this prompt: before all that a 403 else means.
    _Row(
        Meaning.ROW,
        "content_policy_violation|content_filter|responsibleaipolicyviolation|data_?inspection_?failed|"
        "sensitive_words_detected|invalid_prompt|bio_policy|cyber_policy|moderation_blocked|safety|"
        "prohibited_content",
        r"the response was filtered|your (request|input) was (flagged|rejected)|input data may contain|"
        r"content exists risk|.{0,40}requires moderation on|.{0,40}content (policy|management policy)|"
        r"output blocked by content filtering",
        "OpenAI, Azure, DashScope, DeepSeek, OpenRouter, Anthropic, Gemini",
    ),
    _Row(
        Meaning.KEY,
        "insufficient_quota|invalid_api_key|api_key_invalid|invalidapikey|invalid_authentication_error|"
        "authentication_error|unauthenticated|permission_denied|permission_error|accessdenied.*|"
        "incorrect_api_key_error|account_deactivated|billing_not_active|billing_hard_limit_reached|"
        "billing_error|arrearage|exceeded_current_quota_error|insufficient_balance|insufficient_credits|"
        "consumer_suspended|consumer_invalid|budget_exceeded|organization_.*|endpoint_access_denied|unauthorized|"
        "unsupported_country_region_territory",
        r"(your )?credit balance is too low|insufficient (balance|credits?|quota|funds)|"
        r"forbidden: .{0,40}key|(api key not valid|(incorrect|invalid|missing|expired) api[ -]?key)|"
        r"api key expired|no auth credentials|"
        r"your account (is|has been)|account [\w-]{1,60} is suspended|"
        r"you have reached your specified api usage limits|your team .{0,60} has either used all|"
        r"the security token included in the request is|login fail\b|user location is not supported|"
        r"no cookie auth|user not found|(please )?(pass a valid|provide an?) api key",
        "OpenAI, Anthropic, Gemini, DashScope, Moonshot, DeepSeek, xAI, Azure, OpenRouter, LiteLLM, "
        "Fireworks, Bedrock, MiniMax",
    ),
    _Row(
        Meaning.SETTING,
        "model_not_found|modelnotfound|model_not_supported|invalid_model|deploymentnotfound|"
        "model_(not_available|decommissioned|deprecated|terms_required)|extra_forbidden|"
        "unsupported_parameter|unsupported_value|unsupported_api_version|endpoint_misconfigured",
        r"model not exist|model .{0,80}(not found|does not exist|is not available|is not supported)|"
        r"[\w./:-]{1,80} is not a valid model|invalid model (name|id)|unsupported (parameter|value):|"
        r"the model .{0,80}(does not exist|not found)|not found the model|no endpoints found|unknown model|"
        r"[\w./:-]{1,80} does not support (parameters|tools|thinking|chat|generate)\b|"
        r'"auto" tool choice requires --|the provided model identifier is invalid|invocation of model id |'
        r"(<html>\s*<head>\s*<title>)?(400 )?the plain http request was sent to https port|"
        r"client sent an http request to an https server|unexpected endpoint or method",
        "OpenAI (o-series: max_tokens), DeepSeek, OpenRouter, Moonshot, LiteLLM, Azure, Groq, Together, "
        "Mistral, Ollama, vLLM, Bedrock, nginx, Go's and LM Studio's servers",
    ),
    _Row(
        Meaning.WAIT,
        "rate_limit_exceeded|rate_limit_error|resource_exhausted|too_?many_?requests|throttling.*|"
        "(engine_)?overloaded_error|capacity_exceeded|rate_limit_reached_error|limitrequests|requests_per_.*|tokens_per_.*",
        r"rate limit (reached|exceeded)|too many (requests|tokens, please wait)",
        "OpenAI, Anthropic, Gemini, DashScope, Moonshot, Bedrock, Groq",
    ),
    _Row(
        Meaning.RETRY,
        "server_error|internal_?server_?error|internal_error|internal|unavailable|api_error|"
        "service_unavailable|vector_store_timeout|timeout_error|deadline_exceeded|modelnotready.*|aborted",
        r".{0,100}/-/routes for available routes",  # Serve's proxy, until it knows which applications run
        "OpenAI, Anthropic, Gemini, Bedrock, Ray Serve",
    ),
    _Row(
        Meaning.ROW,
        "invalid_image.*|image_.*|unsupported_image_.*|empty_image_file|failed_to_download_image|"
        "invalid_base64_image|invalid_request_error|invalid_argument|badrequesterror",
        "(?!)",
        "OpenAI's Responses, Anthropic, Gemini, vLLM",
    ),
)
_ROWS = [(row.meaning, re.compile(row.codes), re.compile(row.words, re.DOTALL)) for row in _TABLE]

_STATUSES = {
    **dict.fromkeys((401, 402, 407), Meaning.KEY),
    # Of the address and the headers, which all calls have alike; but a bare 403 may be about a prompt.
    **dict.fromkeys((403, 404, 405, 406, 410, 411, 414, 421, 426, 431), Meaning.SETTING),
    **dict.fromkeys((408, 409, 424, 425, 499), Meaning.RETRY),  # of proxies and of engines; 424: TGI broke
    **dict.fromkeys((420, 429, 498, 529), Meaning.WAIT),  # 498: Groq, 529: Anthropic have no capacity
}
_ERRORS: Mapping[Meaning, tuple[type[GymError], str]] = {
    Meaning.ROW: (BadRequest, ""),
    Meaning.KEY: (EndpointAccessDenied, " (it refuses the key of this server's api_key, or its account)"),
    Meaning.SETTING: (EndpointMisconfigured, " (see base_url, model and api_key, and what extra_body sends)"),
    Meaning.WAIT: (Overloaded, ""),
    Meaning.RETRY: (Unavailable, ""),
}

_LENGTH = 1000  # characters of a message; what comes later is mostly a repeated input
_DEEPEST = 6  # errors in errors: OpenRouter's and LiteLLM's have the provider's as a text
_PROXY = re.compile(r"litellm\.\w+: (?:\w+ - )?|error code: \d+ - ", re.IGNORECASE)


def meaning_of(status: int, body: Any, *, answered: bool = False) -> Meaning:
    """What an error means; ``status`` is 200 for one inside an answer or a stream. Where the endpoint has
    ``answered`` before, a 403 is not about the key."""
    stated = _status_in(body) if status < 300 else status
    if stated in _OVERFLOW_STATUSES | {200} and _is_overflow(body):
        return Meaning.OVERFLOW
    texts = [
        _PROXY.sub("", text[:_LENGTH].lower().strip(), count=1) for text in _said(body, _DEEPEST, own=True)
    ]
    for meaning, codes, words in _ROWS:
        if _may_mean(meaning, stated) and any(codes.fullmatch(text) or words.match(text) for text in texts):
            return meaning
    if stated == 403 and (answered or _is_flagged(body)):
        return Meaning.ROW
    if stated in _STATUSES:
        return _STATUSES[stated]
    return Meaning.RETRY if stated >= 500 or stated == 200 else Meaning.ROW


def _may_mean(meaning: Meaning, status: int) -> bool:
    """Whether codes and words may say what is no more than likely of a status."""
    if meaning is Meaning.ROW:
        return status < 500 and status not in (401, 402, 404, 408, 409, 425, 429, 499)
    if meaning is Meaning.WAIT:
        return status not in (401, 402)
    return status < 500 or meaning is Meaning.RETRY


def refusal(
    who: str,
    status: int,
    headers: Mapping[str, str],
    text: str,
    secrets: Iterable[str] = (),
    *,
    answered: bool = False,
) -> GymError | None:
    """The error for an HTTP status of 400 or more; None where the prompt does not fit."""
    meaning = meaning_of(status, _read(text), answered=answered)
    if meaning is Meaning.OVERFLOW:
        return None
    for secret in filter(None, secrets):
        text = text.replace(secret, "***")
    body = _read(text)
    error = error_from_body(status if status >= 400 else 500, body)
    wait = error.retry_after if error.retry_after is not None else wait_of(headers, body)
    kind, advice = _ERRORS[meaning]
    message = (
        error.message if status >= 400 else f"the model failed: {error.message.removeprefix('HTTP 500: ')}"
    )
    retried = meaning in (Meaning.WAIT, Meaning.RETRY)
    return kind(f"{who}: {message}{advice}", retry_after=wait if retried else None)


def says_full(who: str, answer: Any, secrets: Iterable[str] = ()) -> bool:
    """Whether an answer with status 200, or an event of a stream, says that the prompt does not fit. Raises
    `GymError`: what else it says went wrong."""
    if not isinstance(answer, dict) or (error := _error_in(answer)) is None:
        return False
    refused = refusal(who, 200, {}, orjson.dumps({"error": error}).decode(), secrets)
    if refused is not None:
        raise refused
    return True


def _error_in(answer: Mapping[str, Any]) -> Any:
    """The error of an answer or event; None for one without."""
    if error := answer.get("error"):
        return error
    if answer.get("type") == "error" or answer.get("object") == "error" or _is_bare(answer):
        return dict(answer)
    base = answer.get("base_resp")  # MiniMax's
    if isinstance(base, dict) and base.get("status_code"):
        return {"message": base.get("status_msg")}
    response = answer.get("response")
    if answer.get("type") == "response.failed":
        error = response.get("error") if isinstance(response, dict) else None
        return error or {"message": "the response failed"}
    choices = answer.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return (first.get("error") or None) if isinstance(first, dict) else None


def _is_bare(answer: Mapping[str, Any]) -> bool:
    """Whether what is no answer is an error without its own key: ``{"code": 429, "msg": "busy"}``."""
    words = answer.get("message", answer.get("msg"))
    return isinstance(words, str) and "choices" not in answer and any(key in answer for key in _STATUS_KEYS)


def generation_in(said: Any) -> str | None:
    """What a model wrote that its endpoint refuses to pass on, as it is no call or no JSON (Groq's
    ``failed_generation``); None for anything else that was said, as an object or as text."""
    body = _read(said) if isinstance(said, str) and '"failed_generation"' in said else said
    error = body.get("error") if isinstance(body, Mapping) else None
    text = error.get("failed_generation") if isinstance(error, Mapping) else None
    return text if isinstance(text, str) else None


def _is_overflow(body: Any) -> bool:
    return any(
        text in _OVERFLOW_CODES or _STATED.search(text[:_LENGTH].lower()) is not None
        for text in _said(body, _DEEPEST)
    )


_IN_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")
_ASKED = re.compile(r"(?:try again|retry|wait) (?:in |after )?((?:\d+(?:\.\d+)?\s*(?:ms|s|m|h|d))+)")
_WAITS = (
    *("Retry-After", "X-RateLimit-Reset", "X-RateLimit-Reset-Requests", "X-RateLimit-Reset-Tokens"),
    "RateLimit-Reset",
)
_STATUS_KEYS = ("code", "status", "status_code", "http_status")


def wait_of(headers: Mapping[str, str], body: Any = None) -> float | None:
    """Seconds until the endpoint takes a call again, as its headers or its body say; None if they do not.

    ``Retry-After`` is a number or a date (RFC 9110); ``retry-after-ms`` is Azure's; ``X-RateLimit-Reset`` is
    a moment (OpenRouter: in milliseconds) or a span (OpenAI, Groq: ``6m0s``). Gemini has a ``retryDelay`` in
    its body; OpenAI and Groq say "try again in 7m12.5s".
    """
    if (stated := headers.get("Retry-After-Ms")) is not None and (wait := _seconds(stated)) is not None:
        return wait / 1000
    for name in _WAITS:
        if (stated := headers.get(name)) is not None:
            wait = _seconds(stated, moment=name.startswith("X-"))
            if wait is not None:
                return wait
    for text in _said(body, _DEEPEST):
        if match := _ASKED.search(text[:_LENGTH].lower()):
            return _seconds(match[1])
    return None


def _seconds(stated: str, *, moment: bool = False) -> float | None:
    """Seconds from now: of a number, a span, a date, or, where one may be meant, a moment since 1970 (also in
    milliseconds)."""
    try:
        value = float(stated)
    except ValueError:
        spans = _SPAN.findall(stated)
        if spans and not _SPAN.sub("", stated).strip():
            return sum(float(number) * _IN_SECONDS[unit] for number, unit in spans)
        try:
            value = parsedate_to_datetime(stated).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    if not isfinite(value):
        return None
    if moment and value > LONGEST_WAIT:
        value = (value / 1000 if value > 1e11 else value) - time.time()
    return min(max(0.0, value), LONGEST_WAIT)


def _status_in(body: Any) -> int:
    """The HTTP status that an error inside a 200 names; 200 if it names none."""
    error = body.get("error", body) if isinstance(body, Mapping) else None
    for key in _STATUS_KEYS:
        value = error.get(key) if isinstance(error, Mapping) else None
        text = str(value) if type(value) in (int, str) else ""
        if text.isascii() and text.isdecimal() and 400 <= int(text[:4]) < 600:
            return int(text)
    return 200


def _is_flagged(body: Any) -> bool:
    """Whether an error is about what the request says: OpenRouter's of a moderated input."""
    error = body.get("error") if isinstance(body, Mapping) else None
    metadata = error.get("metadata") if isinstance(error, Mapping) else None
    return isinstance(metadata, Mapping) and bool(metadata.keys() & {"reasons", "flagged_input"})


def _read(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


_KEYS = (
    "code",
    "type",
    "status",
    "reason",
    "message",
    "detail",
    "details",
    "msg",
    "error",
    "errors",
    "metadata",
)
_DEEPER = ("raw", "body", "retryDelay")


def _said(body: Any, deep: int, *, own: bool = False) -> Iterator[str]:
    """The codes and messages of an error body: an object, a list (Gemini's), a text, or one in another."""
    if isinstance(body, str):
        yield body
        start = body.find("{")
        if own and start > 0 and (begin := _PROXY.match(body)):
            start = start if start == begin.end() else -1
        elif own and start > 0:
            start = -1
        if deep and start >= 0 and isinstance(inner := _read(body[start : body.rfind("}") + 1]), Mapping):
            yield from _said(inner, deep - 1, own=own)
    elif isinstance(body, list) and deep:
        for each in body[:4]:
            yield from _said(each, deep - 1, own=own)
    elif isinstance(body, Mapping) and deep:
        for key in (*_KEYS, *_DEEPER):
            if key in body:
                if key == "retryDelay":
                    yield f"retry in {body[key]}"
                else:
                    yield from _said(body[key], deep - 1, own=own)

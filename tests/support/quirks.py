"""The quirky endpoint: one server, and one path for each thing that real endpoints were seen to do.

`QUIRKS` says what each must lead to. A quirk of the answer itself is one of Chat Completions; a refusal is
one of every model type.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from gym_serve.types.errors import (
    BadRequest,
    EndpointAccessDenied,
    EndpointMisconfigured,
    GymError,
    Overloaded,
    Unavailable,
)


def said(message: str, **fields: Any) -> dict[str, Any]:
    """The body of an error."""
    return {"error": {"message": message, **fields}}


ROW, KEY, SETTING, WAIT, RETRY = (
    BadRequest,
    EndpointAccessDenied,
    EndpointMisconfigured,
    Overloaded,
    Unavailable,
)
GEMINI_KEY = {
    "code": 400,
    "message": "API key not valid. Please pass a valid API key.",
    "status": "INVALID_ARGUMENT",
    "details": [{"reason": "API_KEY_INVALID"}],
}
ANTHROPIC = {
    "type": "error",
    "error": {"type": "invalid_request_error", "message": "Your credit balance is too low"},
}
REFUSALS: list[tuple[int, Any, type[GymError]]] = [
    *((status, "", RETRY) for status in (408, 409, 424, 425, 499, 500, 502, 503, 504, 520, 524)),
    *((status, "", WAIT) for status in (420, 429, 498, 529)),
    *((status, "", KEY) for status in (401, 402, 407)),
    *(
        (status, "<html>nginx</html>", SETTING)
        for status in (403, 404, 405, 406, 410, 411, 414, 421, 426, 431)
    ),
    *((status, "no", ROW) for status in (400, 413, 415, 422, 451)),
    (404, "Path '/v1' not found. Ping http://.../-/routes for available routes.", RETRY),
    (500, said("Incorrect API key", code="invalid_api_key"), RETRY),
    # Of a prompt
    (403, said("openai/gpt-5 requires moderation on OpenRouter", code=403), ROW),
    (403, said("flagged", metadata={"reasons": ["x"]}), ROW),
    (403, said("no", code="content_policy_violation"), ROW),
    (400, said("The response was filtered", code="content_filter"), ROW),
    (400, said("Input data may contain inappropriate content.", code="DataInspectionFailed"), ROW),
    (400, said("Content Exists Risk"), ROW),
    (400, said("temperature must be non-negative", type="invalid_request_error"), ROW),
    # Key and account
    (400, {"error": GEMINI_KEY}, KEY),
    (400, [{"error": GEMINI_KEY}], KEY),
    (400, ANTHROPIC, KEY),
    (400, said("litellm.BadRequestError: AnthropicException - " + json.dumps(ANTHROPIC), code="400"), KEY),
    (400, said("Access denied, please make sure your account is in good standing.", code="Arrearage"), KEY),
    (400, said("Incorrect API key provided: xai-***"), KEY),
    (400, said("Budget has been exceeded! Max budget: 10.0", type="budget_exceeded", code="400"), KEY),
    (402, said("Insufficient Balance", code="invalid_request_error"), KEY),
    (403, said("Your account is suspended"), KEY),
    (404, said("Incorrect API key"), KEY),
    (403, said("The caller does not have permission", status="PERMISSION_DENIED"), KEY),
    (429, said("You exceeded your current quota, please check your plan", code="insufficient_quota"), KEY),
    (429, said("Your account is suspended", type="exceeded_current_quota_error"), KEY),
    (424, said("https://x: 401", code="endpoint_access_denied"), KEY),
    (
        412,
        said("Account a-1 is suspended, possibly due to a spending limit", code="PRECONDITION_FAILED"),
        KEY,
    ),
    (400, said("You have reached your specified API usage limits.", type="invalid_request_error"), KEY),
    (403, {"error": "Your team x has either used all available credits or reached its limit."}, KEY),
    (403, {"message": "The security token included in the request is expired"}, KEY),
    (400, [said("User location is not supported for the API use.", status="FAILED_PRECONDITION")], KEY),
    (403, said("Country not supported", code="unsupported_country_region_territory"), KEY),
    # Model and parameters
    (400, said("Model Not Exist", type="invalid_request_error"), SETTING),
    (400, said("foo/bar is not a valid model ID", code=400), SETTING),
    (400, said("litellm.BadRequestError: Invalid model name passed in model=x"), SETTING),
    (
        400,
        said("Unsupported parameter: 'max_tokens' is not supported.", code="unsupported_parameter"),
        SETTING,
    ),
    (404, said("The model `m` does not exist.", code="model_not_found"), SETTING),
    (404, said("No endpoints found for x"), SETTING),
    (400, said("<html>\r\n<head><title>400 The plain HTTP request was sent to HTTPS port</title>"), SETTING),
    (400, "Client sent an HTTP request to an HTTPS server.", SETTING),
    (400, said('"auto" tool choice requires --enable-auto-tool-choice to be set', code=400), SETTING),
    (400, said("registry.ollama.ai/library/m does not support tools", type="api_error"), SETTING),
    (400, said("litellm.UnsupportedParamsError: openai does not support parameters: ['seed']"), SETTING),
    (422, {"detail": [{"type": "extra_forbidden", "loc": ["body", "seed"], "msg": "Extra inputs"}]}, SETTING),
    (400, {"message": "The provided model identifier is invalid."}, SETTING),
    (400, {"message": "Invocation of model ID m with on-demand throughput isn't supported."}, SETTING),
    *(
        (400, said("x", code=f"model_{what}"), SETTING)
        for what in ("decommissioned", "terms_required", "not_available")
    ),
    # Limits and servers
    (429, said("You exceeded your current quota. Please retry in 0.01s.", status="RESOURCE_EXHAUSTED"), WAIT),
    (403, said("Rate limit exceeded: requests per day"), WAIT),
    (400, said("x", code="ThrottlingException"), WAIT),
    (400, {"message": "Too many tokens, please wait before trying again."}, WAIT),
    (529, {"type": "error", **said("Overloaded", type="overloaded_error")}, WAIT),
    (498, said("Flex tier capacity exceeded", code="capacity_exceeded"), WAIT),
    (400, said("The model is loading", code="ModelNotReadyException"), RETRY),
    # What the model wrote, repeated in a message, stops no run.
    (400, said("Invalid arguments: Your credit balance is too low"), ROW),
    (400, said('Invalid arguments: {"error": {"code": "insufficient_quota"}}'), ROW),
    (400, said("unknown tool 'model_not_found'"), ROW),
]


HEAD = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
COUNTS = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
STREAM = {"Content-Type": "text/event-stream"}


def whole(message: Any = None, finish: Any = "stop", **fields: Any) -> dict[str, Any]:
    """A completion."""
    message = {"role": "assistant", "content": "Hello"} if message is None else message
    return {**HEAD, "choices": [{"index": 0, "message": message, "finish_reason": finish}], **fields}


def chunk(delta: Any, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    """A chunk of a stream."""
    return {**HEAD, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **fields}


def sse(*events: Any, end: bytes = b"\n\n") -> bytes:
    """A stream; what is bytes stands in it as it is."""
    return (
        b"\n\n".join(e if isinstance(e, bytes) else b"data: " + json.dumps(e).encode() for e in events) + end
    )


def call(arguments: str, **fields: Any) -> dict[str, Any]:
    """A part of a call."""
    named = {"function": {**({"name": "f"} if "id" in fields else {}), "arguments": arguments}}
    return {"tool_calls": [{**fields, **named}]}


@dataclass(frozen=True)
class Quirk:
    """What an endpoint does, and what must come of it.

    Attributes:
        name: says it in a few words.
        body: of the answer: an object, or bytes.
        outcome: "answer", "empty answer", "two calls", or the code of an error.
        status, headers: of the answer.
        streamed: whether only a request for a stream is answered so.
        universal: whether every route may answer so.
    """

    name: str
    body: Any
    outcome: str
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    streamed: bool = False
    universal: bool = False


def _refusals() -> list[Quirk]:
    quirks = []
    for status, body, error in REFUSALS:
        shown = body if isinstance(body, str) else json.dumps(body)
        name = f"{status} {shown}" if shown else f"{status}"
        quirks.append(Quirk(name, shown.encode(), error.code, status, universal=True))
    return quirks


def _inside(name: str, outcome: str, **fields: Any) -> Quirk:
    return Quirk(f"200 with an error: {name}", said("x", **fields), outcome, universal=True)


def _streams() -> list[Quirk]:
    hel, lo, stop = chunk({"content": "Hel"}), chunk({"content": "lo"}), chunk({}, "stop")
    done = b"data: [DONE]"
    calls_at_0 = [chunk(call("{}", index=0, id=i)) for i in ("a", "b")]
    no_index = [chunk(call("{", id="a")), chunk(call("}")), chunk(call("{}", id="b"))]
    as_message = {**HEAD, "choices": [{"index": 0, "message": {"content": "Hello"}, "finish_reason": None}]}
    table: list[tuple[str, bytes, str]] = [
        ("as OpenAI's", sse(hel, lo, stop, done), "answer"),
        ("without [DONE]", sse(hel, lo, stop), "answer"),
        ("lines end in CRLF", sse(hel, lo, stop, done).replace(b"\n", b"\r\n"), "answer"),
        ("a byte order mark", b"\xef\xbb\xbf" + sse(hel, lo, stop, done), "answer"),
        ("no blank line after the last event", sse(hel, lo, stop, end=b"\n"), "answer"),
        ("no line end after the last event", sse(hel, lo, stop, end=b""), "answer"),
        ("`data:` alone", sse(b"data:", hel, b"data: ", lo, stop, done), "answer"),
        ("comments", sse(b": PROCESSING", hel, b":", lo, stop, done), "answer"),
        (
            "event and id lines",
            sse(b"event: x\nid: 1\ndata: " + json.dumps(hel).encode(), lo, stop),
            "answer",
        ),
        ("no space after `data:`", sse(hel, lo, stop).replace(b"data: ", b"data:"), "answer"),
        ("a first chunk without choices", sse({**HEAD, "choices": []}, hel, lo, stop), "answer"),
        ("`message` for `delta`", sse(as_message, stop), "answer"),
        (
            "half a surrogate pair",
            sse(rb'data: {"choices": [{"delta": {"content": "\ud83d"}}]}', stop),
            "answer",
        ),
        ("null fields in a delta", sse(chunk({"content": "Hello", "tool_calls": None}), stop), "answer"),
        ("parallel calls, all of index 0", sse(*calls_at_0, chunk({}, "tool_calls")), "two calls"),
        ("calls without an index", sse(*no_index, chunk({}, "tool_calls")), "two calls"),
        ("cut short", sse(hel), "unavailable"),
        ("cut inside an event", sse(hel, lo) + b'data: {"choi', "unavailable"),
        ("nothing", b"", "unavailable"),
        ("[DONE] alone", sse(done), "unavailable"),
        ("an event that is no JSON", sse(hel, b"data: oops", stop), "unavailable"),
        ("an error first: 429", sse(said("x", code=429)), "overloaded"),
        ("an error first: 401", sse(said("x", code=401)), "endpoint_access_denied"),
        ("an error first: overflow", sse(said("maximum context length is 8", code=400)), "empty answer"),
        ("an error later: 502", sse(hel, said("x", code=502)), "unavailable"),
        ("an error beside choices", sse(hel, {**chunk({}, "error"), **said("x", code=429)}), "overloaded"),
        ("generation given up", sse(hel, chunk({}, "abort")), "unavailable"),
    ]
    return [
        Quirk(f"stream: {name}", body, outcome, headers=STREAM, streamed=True)
        for name, body, outcome in table
    ]


def _answers() -> list[Quirk]:
    plain = json.dumps(whole()).encode()
    usages: list[tuple[str, Any]] = [
        ("without details", COUNTS),
        ("null details", {**COUNTS, "prompt_tokens_details": None, "completion_tokens_details": None}),
        ("null counts", {**COUNTS, "prompt_tokens_details": {"cached_tokens": None}}),
        ("none", None),
        ("empty", {}),
        ("negative", {**COUNTS, "prompt_tokens": -1}),
        ("texts", {"prompt_tokens": "5"}),
        ("a list", []),
    ]
    rest: list[tuple[str, Any, str, dict[str, str]]] = [
        ("gzip", gzip.compress(plain), "answer", {"Content-Encoding": "gzip"}),
        ("deflate", zlib.compress(plain), "answer", {"Content-Encoding": "deflate"}),
        ("content type text/plain", plain, "answer", {"Content-Type": "text/plain"}),
        ("white space around the body", b"\n " + plain + b"\n", "answer", {}),
        ("a header of 9 KB", plain, "answer", {"X-Policy": "x" * 9000}),
        ("200 headers", plain, "answer", {f"X-{i}": "x" for i in range(200)}),
        ("half a surrogate pair", plain.replace(b"Hello", rb"\ud83d"), "answer", {}),
        (
            "content null, a call",
            whole({"content": None, "tool_calls": call("{}", id="a")["tool_calls"]}),
            "answer",
            {},
        ),
        ("content as parts", whole({"content": [{"type": "text", "text": "Hello"}]}), "answer", {}),
        ("no finish reason", whole(finish=None), "answer", {}),
        ("an empty content", whole({"role": "assistant", "content": ""}), "answer", {}),
        ("a byte order mark", b"\xef\xbb\xbf" + plain, "answer", {}),
        *(
            (f"finish reason {finish}", whole(finish=finish), outcome, {})
            for finish, outcome in (
                ("eos_token", "answer"),
                ("insufficient_system_resource", "unavailable"),
                ("network_error", "unavailable"),
            )
        ),
        ("no choices", {**HEAD, "choices": []}, "unavailable", {}),
        ("null", b"null", "unavailable", {}),
        ("nothing", b"", "unavailable", {}),
        ("a page", b"<html>busy</html>", "unavailable", {}),
        ("cut short", plain[:40], "unavailable", {}),
        ("generation given up", whole(finish="abort"), "unavailable", {}),
    ]
    return [
        *(Quirk(f"usage: {name}", whole(usage=usage), "answer") for name, usage in usages),
        *(Quirk(f"answer: {name}", body, outcome, headers=headers) for name, body, outcome, headers in rest),
    ]


QUIRKS = [
    *_refusals(),
    Quirk("400 overflow", said("This model's maximum context length is 8 tokens"), "empty answer", 400),
    Quirk("308 redirect", b"", "endpoint_misconfigured", 308, {"Location": "https://b/v1"}, universal=True),
    Quirk("429, a header of 9 KB", b"", "overloaded", 429, {"X-Policy": "x" * 9000}, universal=True),
    Quirk("429, 200 headers", b"", "overloaded", 429, {f"X-{i}": "x" for i in range(200)}, universal=True),
    _inside("429", "overloaded", code=429),
    _inside("401", "endpoint_access_denied", code=401),
    _inside("502", "unavailable", code=502),
    _inside("400", "bad_request", code=400),
    _inside("no code", "unavailable"),
    *(
        Quirk(
            f"200 with MiniMax's error: {text}",
            {"base_resp": {"status_code": 1, "status_msg": text}},
            outcome,
        )
        for text, outcome in (
            ("login fail: no key", "endpoint_access_denied"),
            ("rate limit exceeded(RPM)", "overloaded"),
            ("invalid params, context window exceeds limit", "empty answer"),
        )
    ),
    Quirk("400, with what the model wrote", said("x", failed_generation="Hello"), "answer", 400),
    *_answers(),
    *_streams(),
]


def handler(quirks: list[Quirk] = QUIRKS) -> Callable[[web.Request], Any]:
    """Answers requests below ``/{number of a quirk}/``."""

    async def handle(request: web.Request) -> web.Response:
        quirk = quirks[int(request.path.split("/")[1])]
        body = quirk.body if isinstance(quirk.body, bytes) else json.dumps(quirk.body).encode()
        return web.Response(
            status=quirk.status, body=body, headers={"Content-Type": "application/json", **quirk.headers}
        )

    return handle

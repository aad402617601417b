"""Every failure over HTTP is JSON with a stable code and the right status."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

Failure = Callable[[httpx.Response], dict[str, Any]]

ORDER = {"order": {"lines": [{"item": "tea"}], "payment": {"by": "cash"}}}

BODIES = {
    "no JSON": ("/shop/stock", b"{'item': 'tea'}", 400, "bad_request"),
    "no JSON, streamed": ("/told/v1/responses", b'{"stream": true, "input": }', 400, "bad_request"),
    "NaN": ("/shop/stock", b'{"item": NaN}', 400, "bad_request"),
    "no UTF-8": ("/shop/stock", b'{"item": "\xff\xfe"}', 400, "bad_request"),
    "UTF-16": ("/shop/stock", '{"item": "é"}'.encode("utf-16"), 400, "bad_request"),
    "too deep": ("/shop/stock", b"[" * 100_000 + b"]" * 100_000, 400, "bad_request"),
    "empty row": ("/run", b"", 422, "invalid_request"),
    "empty call of a model": ("/told/v1/responses", b"", 400, "bad_request"),
    "empty arguments": ("/shop/order", b"", 422, "invalid_request"),
    "wrong type": ("/shop/stock", b'{"item": ["tea"]}', 422, "invalid_request"),
    "nested wrong type": (
        "/shop/order",
        b'{"order": {"lines": [{"item": "tea", "count": 0}], "payment": {"by": "cheque"}}}',
        422,
        "invalid_request",
    ),
    "wrong messages": ("/told/v1/chat/completions", b'{"messages": "hi"}', 400, "bad_request"),
    "wrong stream": ("/told/v1/responses", b'{"input": "hi", "stream": "yes"}', 400, "bad_request"),
    "wrong stream options": (
        "/told/v1/chat/completions",
        b'{"messages": [], "stream": true, "stream_options": [1]}',
        400,
        "bad_request",
    ),
    "unknown parameter of an episode": (
        "/parrot/v1/responses",
        b'{"input": "hi", "temprature": 1}',
        422,
        "invalid_request",
    ),
    "wrong metrics": ("/shop/aggregate_metrics", b'{"verify_responses": 1}', 422, "invalid_request"),
    "wrong agent reference": ("/run", b'{"agent_ref": "clerk"}', 422, "invalid_request"),
    "unknown agent": ("/run", b'{"agent_ref": {"name": "clark"}}', 404, "not_found"),
    "agent that is none": ("/run", b'{"agent_ref": {"name": ["shop"]}}', 404, "not_found"),
    "unknown server": ("/shpo/verify", b"{}", 404, "not_found"),
    "route of another kind": ("/told/verify", b"{}", 404, "not_found"),
    "no tool's name": ("/shop/tools/order", b"{}", 404, "not_found"),
    "the name of an operation": ("/shop/tools%2Forder", b"{}", 404, "not_found"),
    "a path out": ("/shop/%2e%2e%2fverify", b"{}", 404, "not_found"),
    "markup": ("/shop/%00%3Cscript%3E", b"{}", 404, "not_found"),
    "no operation": ("/shop", b"{}", 404, "not_found"),
    "inherited route": ("/shop/reset", b"{}", 404, "not_found"),
    "model refuses": ("/told/v1/responses", b'{"input": "refuse"}', 400, "bad_request"),
    "model busy": ("/told/v1/responses", b'{"input": "busy"}', 429, "overloaded"),
    "model down": ("/told/v1/responses", b'{"input": "down"}', 503, "unavailable"),
    "model down, streamed": ("/told/v1/responses", b'{"input": "down", "stream": true}', 503, "unavailable"),
    "model breaks": ("/told/v1/responses", b'{"input": "crash"}', 500, "model_failed"),
    "nonsense, streamed": (
        "/told/v1/responses",
        b'{"input": "nonsense", "stream": true}',
        500,
        "model_failed",
    ),
    "remote model away": ("/away/v1/responses", b'{"input": "hi"}', 503, "unavailable"),
    "the agent's model busy": ("/parrot/v1/responses", b'{"input": "busy"}', 429, "overloaded"),
    "tool breaks": ("/shop/break_down", b"{}", 422, "tool_failed"),
}


@pytest.mark.parametrize("case", BODIES)
def test_a_failure_has_its_code_and_status(http: httpx.Client, failure: Failure, case: str) -> None:
    path, body, status, code = BODIES[case]
    error = failure(http.post(path, content=body))
    assert (error["status"], error["code"]) == (status, code), error


def test_a_wrong_name_gets_the_nearest_right_one(http: httpx.Client, failure: Failure) -> None:
    assert "did you mean 'shop'" in failure(http.post("/shpo/verify"))["message"]
    assert (
        "did you mean 'clerk'" in failure(http.post("/run", json={"agent_ref": {"name": "clark"}}))["message"]
    )
    assert "did you mean 'order'" in failure(http.post("/shop/ordr", json={}))["message"]


def test_wrong_arguments_are_all_named_with_their_places(http: httpx.Client, failure: Failure) -> None:
    path, body, _, _ = BODIES["nested wrong type"]
    message = failure(http.post(path, content=body))["message"]
    assert "order.lines.0.count: must be greater than or equal to 1" in message
    assert "order.payment: Input tag 'cheque'" in message


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/told/v1/responses", "POST"),
        ("GET", "/run", "POST"),
        ("PUT", "/shop/verify", "POST"),
        ("GET", "/shop/order", "POST"),
        ("POST", "/health", "GET, HEAD"),
        ("DELETE", "/graph", "GET, HEAD"),
        ("POST", "/told/v1/models", "GET, HEAD"),
        ("POST", "/shop/reverify_mode", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_told_the_right_one(
    http: httpx.Client, failure: Failure, method: str, path: str, allow: str
) -> None:
    answer = http.request(method, path)
    assert failure(answer)["code"] == "method_not_allowed"
    assert answer.status_code == 405
    assert answer.headers["allow"] == allow


def test_a_busy_model_says_when_to_come_back(http: httpx.Client, failure: Failure) -> None:
    answer = http.post("/told/v1/responses", json={"input": "busy"})
    assert answer.headers["retry-after"] == "7"
    assert failure(answer)["retry_after"] == 6.5


@pytest.mark.parametrize("seconds", ["0", "-1", "soon", "nan", "inf", ""])
def test_a_deadline_is_a_positive_number(http: httpx.Client, failure: Failure, seconds: str) -> None:
    error = failure(
        http.post("/told/v1/responses", json={"input": "hi"}, headers={"x-request-timeout": seconds})
    )
    assert (error["status"], error["code"]) == (400, "bad_request")


def test_an_argument_that_a_tool_does_not_have_is_left_out(http: httpx.Client) -> None:
    answer = http.post("/shop/stock", json={"item": "tea", "session": {"orders": 9}})
    assert (answer.status_code, answer.json()["characters"]) == (200, 3)


def test_nan_from_a_tool_is_null(http: httpx.Client) -> None:
    assert http.post("/shop/stock", json={"item": "nan"}).json()["price"] is None


@pytest.mark.parametrize("session", ["a b; c=d", ".", "%00"])
def test_an_unknown_session_is_not_found(http: httpx.Client, failure: Failure, session: str) -> None:
    error = failure(http.post("/shop/order", json=ORDER, headers={"x-session-id": session}))
    assert (error["status"], error["code"], error["retryable"]) == (404, "session_not_found", False)


def test_the_session_of_a_replica_that_is_gone_is_lost(http: httpx.Client, failure: Failure) -> None:
    error = failure(http.post("/shop/order", json=ORDER, headers={"x-session-id": "gone.abc"}))
    assert (error["status"], error["code"], error["retryable"]) == (409, "session_lost", True)


def test_a_lost_session_does_not_keep_a_client_from_seeding_another(http: httpx.Client) -> None:
    http.cookies.set("gym_session", "gone.abc")
    assert http.post("/shop/seed_session", json={}).status_code == 200

"""Sessions over HTTP, and what the routes of an environment answer."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from gym_serve.testing.conformance import check_conformance
from gym_serve.testing.foreign import Kind

TEA = {"order": {"lines": [{"item": "tea", "count": 2}], "payment": {"by": "card", "number": 7}}}
SAID = {"output": [{"type": "message", "role": "assistant", "content": "Two teas, please."}]}


@pytest.mark.parametrize(
    ("server", "kind"), [("shop", "environment"), ("policy", "model"), ("clerk", "agent")]
)
async def test_they_do_what_the_formats_say_of_servers(url: str, server: str, kind: Kind) -> None:
    results = check_conformance(f"{url}/{server}", kind)
    assert [result async for result in results if result.state == "failed"] == []


def test_the_session_is_in_a_cookie_and_in_a_header(http: httpx.Client) -> None:
    seeded = http.post("/shop/seed_session", json={"orders": 5})
    assert seeded.json() == {}
    session = seeded.headers["x-session-id"]
    assert http.cookies["gym_session"] == session
    cookie = seeded.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "Path=/web/shop;" in cookie
    assert http.post("/shop/order", json=TEA).json() == {"items": 2, "orders": 6}
    http.cookies.clear()
    by_header = http.post("/shop/order", json=TEA, headers={"x-session-id": session})
    assert by_header.json() == {"items": 2, "orders": 7}
    assert by_header.headers["x-session-id"] == session


def test_seeding_again_keeps_the_state(http: httpx.Client) -> None:
    first = http.post("/shop/seed_session", json={"orders": 5, "name": "Zoë"})
    assert http.post("/shop/order", json=TEA).json()["orders"] == 6
    for headers in ({}, {"x-session-id": first.headers["x-session-id"]}):
        again = http.post("/shop/seed_session", json={"orders": 0}, headers=headers)
        assert again.json() == first.json() == {"welcome": "Zoë"}
        assert again.headers["x-session-id"] == first.headers["x-session-id"]
    assert http.post("/shop/order", json=TEA).json()["orders"] == 7
    http.post("/shop/close_session")
    # A session that is closed, was never one, or lived on a replica that is gone.
    for gone in (first.headers["x-session-id"], "never", "no-replica.session"):
        fresh = http.post("/shop/seed_session", json={"orders": 1}, headers={"x-session-id": gone})
        assert fresh.status_code == 200
        assert fresh.headers["x-session-id"] not in (gone, first.headers["x-session-id"])
        session = {"x-session-id": fresh.headers["x-session-id"]}
        assert http.post("/shop/order", json=TEA, headers=session).json()["orders"] == 2


def test_the_header_goes_before_the_cookie(http: httpx.Client) -> None:
    one = http.post("/shop/seed_session", json={"orders": 10}).headers["x-session-id"]
    http.cookies.clear()
    http.post("/shop/seed_session", json={"orders": 20})
    assert http.post("/shop/order", json=TEA).json()["orders"] == 21
    assert http.post("/shop/order", json=TEA, headers={"x-session-id": one}).json()["orders"] == 11


def test_seed_answers_what_the_environment_says(http: httpx.Client) -> None:
    assert http.post("/shop/seed_session", json={"name": "Zoë"}).json() == {"welcome": "Zoë"}


def test_a_tool_called_without_a_session_opens_one(http: httpx.Client) -> None:
    assert http.post("/shop/order", json=TEA).json()["orders"] == 1
    assert http.post("/shop/order", json=TEA).json()["orders"] == 2


def test_the_client_forgets_a_closed_session(http: httpx.Client) -> None:
    http.post("/shop/seed_session", json={})
    assert http.post("/shop/close_session").json() == {}
    assert "gym_session" not in http.cookies
    assert http.post("/shop/close_session").json() == {}


@pytest.mark.parametrize("end", ["close_session", "verify"])
def test_sessions_of_other_kinds_of_server_are_not_looked_at(http: httpx.Client, end: str) -> None:
    headers = {"x-session-id": "gone.abc", "cookie": "gym_session=gone.abc"}
    assert http.post("/told/v1/responses", json={"input": "hi"}, headers=headers).status_code == 200
    assert http.post(f"/told/{end}", json={}, headers=headers).status_code == 404


def test_verify_answers_the_request_with_the_verdict(http: httpx.Client) -> None:
    http.post("/shop/seed_session", json={"orders": 3})
    row = {"responses_create_params": {"input": "Tea?"}, "_rowidx": 0, "deep": {"é": [None, 1.5, "\u2028"]}}
    verdict = http.post("/shop/verify", json={**row, "response": SAID})
    assert verdict.json() == {**row, "response": SAID, "reward": 3.0, "said": "Two teas, please."}
    assert list(verdict.json())[-2:] == ["reward", "said"]


def test_the_verdict_replaces_fields_of_the_request(http: httpx.Client) -> None:
    body = b' {"reward": 9, "said": {"reward": 1}, "response": {"output": []}} \n'
    assert http.post("/shop/verify", content=body).json() == {
        "reward": 0.0,
        "said": "",
        "response": {"output": []},
    }


def test_verify_without_a_session_leaves_none(http: httpx.Client) -> None:
    verdict = http.post("/shop/verify", json={"response": SAID})
    assert verdict.json()["reward"] == 0.0
    assert "x-session-id" not in verdict.headers
    assert "set-cookie" not in verdict.headers


def test_run_by_the_agent_that_the_row_names(http: httpx.Client) -> None:
    row: dict[str, Any] = {
        "responses_create_params": {"input": "Tea?", "tools": []},
        "kept": [{"x": None}],
        "_ng_rollout_id": "r",
    }
    default = http.post("/run", json=row).json()
    assert default["kept"] == row["kept"]
    assert default["said"] == "Tea?"  # the parrot's
    named = http.post(
        "/run", json={**row, "agent_ref": {"type": "responses_api_agents", "name": "clerk"}}
    ).json()
    assert named["said"] == "I do not know. \\boxed{0}"
    asked = http.post("/clerk/run", json=row).json()
    assert asked["response"]["output"] == named["response"]["output"]
    assert http.post("/run", json={**row, "agent_ref": None}).json()["said"] == "Tea?"


def test_a_failed_rollout_is_an_answer(http: httpx.Client) -> None:
    answer = http.post("/run", json={"responses_create_params": {"input": "down"}, "kept": 1})
    rollout = answer.json()
    assert answer.status_code == 200
    assert (rollout["kept"], rollout["mask_sample"]) == (1, True)
    assert (rollout["failure"]["kind"], rollout["failure"]["stage"]) == ("unavailable", "model")

"""A person in a browser shows the token once, and no other page gets anything by that."""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator
from http.cookies import SimpleCookie

import httpx
import pytest
from support.local_site import ROOT, local_site
from support.waiting import until

from gym_serve.gateway import access, pages
from gym_serve.types.errors import Overloaded

TOKEN, OLD = "a-token/with+signs=ä", "an-older-one"
GRAPH = {
    "models": {"policy": {"type": "scripted_model"}},
    "resources": {"echo": {"type": "session_counter"}},
    "agents": {"agent": {"type": "simple_agent", "model": "policy", "resources": "echo"}},
}
BROWSER = {"accept": "text/html,application/xhtml+xml", "sec-fetch-site": "none"}


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with local_site(GRAPH, [TOKEN, OLD]) as (_, client):
        yield client


async def signed_in(http: httpx.AsyncClient, token: str = TOKEN) -> httpx.Response:
    return await http.post("sign-in", data={"token": token, "next": "graph"}, headers=BROWSER)


async def test_a_page_without_a_token_is_a_form_that_leads_back(http: httpx.AsyncClient) -> None:
    asked = await http.get("graph", headers=BROWSER)
    assert asked.status_code == 401
    assert asked.headers["content-type"].startswith("text/html")
    assert "form-action 'self'" in asked.headers["content-security-policy"]
    assert "script" not in asked.text
    fields = dict(re.findall(r"<input type=hidden name=(\w+) value='([^']*)'", asked.text))
    answer = await http.post("sign-in", data={"token": TOKEN, **fields}, headers=BROWSER)
    assert (answer.status_code, answer.headers["location"]) == (303, f"{ROOT}/graph")
    assert (await http.get("graph", headers=BROWSER)).json()["agents"]
    assert (await http.get("health")).json().keys() != {"status"}, "the pass is as good as the token"


@pytest.mark.parametrize("token", [TOKEN, OLD])
async def test_the_pass_is_for_this_graph_and_no_script(http: httpx.AsyncClient, token: str) -> None:
    cookie = SimpleCookie((await signed_in(http, token)).headers["set-cookie"])[access.PASS_COOKIE]
    assert cookie["httponly"]
    assert (cookie["samesite"], cookie["path"], cookie["secure"]) == ("strict", f"{ROOT}/", "")
    assert int(cookie["max-age"]) == access.PASS_SECONDS
    assert token not in cookie.value
    behind = await http.post("sign-in", data={"token": token}, headers={"x-forwarded-proto": "https"})
    assert SimpleCookie(behind.headers["set-cookie"])[access.PASS_COOKIE]["secure"]


async def test_a_wrong_token_is_told_and_logged_without_it(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "gym_serve"):
        answer = await signed_in(http, "guess-ǝ")
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers
    assert "role=alert" in answer.text
    assert "value='graph'" in answer.text
    assert "wrong token" in caplog.text
    assert "guess" not in caplog.text + answer.text


async def test_guessing_tokens_is_slow(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_WRONG_SECONDS", 3600.0)
    guesses = [asyncio.create_task(signed_in(http, f"guess {n}")) for n in range(pages._MOST_WRONG)]
    await until(lambda: sum(pages._wrong.values()) == pages._MOST_WRONG)
    assert (await signed_in(http, TOKEN)).status_code == Overloaded.status  # the right one tells no more
    assert not any(guess.done() for guess in guesses)
    for guess in guesses:
        guess.cancel()
    await asyncio.gather(*guesses, return_exceptions=True)
    await until(lambda: not pages._wrong)
    assert (await signed_in(http, TOKEN)).status_code == 303


async def test_no_answer_is_taken_for_another_type(http: httpx.AsyncClient) -> None:
    for path in ("graph", "health", "no-such-page", "sign-in"):
        assert (await http.get(path)).headers["x-content-type-options"] == "nosniff", path


@pytest.mark.parametrize(
    "page", ["//evil.example", "https://evil.example", "/x", "a\\b", "a//b", "a?b", "'>", "a" * 9999 + "!"]
)
async def test_sign_in_leads_to_no_other_host(http: httpx.AsyncClient, page: str) -> None:
    answer = await http.post("sign-in", data={"token": TOKEN, "next": page})
    assert answer.headers["location"] == f"{ROOT}/"
    refused = await http.post("sign-in", data={"token": "no", "next": page})
    assert "value=''" in refused.text


async def test_only_pages_of_the_graph_use_the_pass(http: httpx.AsyncClient) -> None:
    await signed_in(http)
    for site in ("cross-site", "same-site"):
        answer = await http.get("graph", headers={"sec-fetch-site": site})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
    foreign = await http.get("graph", headers={"origin": "http://127.0.0.1:9000"})
    assert foreign.status_code == 403
    own = {"origin": "http://127.0.0.1:8000", "sec-fetch-site": "same-origin"}
    body = {"rows": [{"prompt": "x"}]}
    refused = await http.post("rollouts", json=body, headers=own)
    assert (refused.status_code, "X-Gym-Serve" in refused.text) == (403, True)
    assert (await http.post("rollouts", json=body, headers={**own, "x-gym-serve": "1"})).status_code == 200


async def test_a_pass_ends(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    await signed_in(http)
    now = time.time()
    monkeypatch.setattr("gym_serve.gateway.access.time.time", lambda: now + access.PASS_SECONDS + 1)
    assert (await http.get("graph")).status_code == 401
    monkeypatch.undo()
    assert (await http.get("graph")).status_code == 200
    gone = await http.delete("sign-in")
    assert gone.status_code == 204
    assert (await http.get("graph")).status_code == 401


@pytest.mark.parametrize(
    "forged", ["", ".", "1.2", f"{2**40}.", f"{2**40}.{'0' * 64}", "9" * 400, "١.x", "\xff.\xff"]
)
async def test_a_pass_cannot_be_made_up(http: httpx.AsyncClient, forged: str) -> None:
    headers = {b"cookie": f"{access.PASS_COOKIE}={forged}".encode()}
    answer = await http.get("graph", headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorized")


async def test_an_end_cannot_be_put_off(http: httpx.AsyncClient) -> None:
    await signed_in(http)
    end, _, seal = http.cookies[access.PASS_COOKIE].partition(".")
    later = {"cookie": f"{access.PASS_COOKIE}={int(end) + 1}.{seal}"}
    http.cookies.clear()
    assert (await http.get("graph", headers=later)).status_code == 401


async def test_a_graph_without_a_token_needs_no_sign_in() -> None:
    async with local_site(GRAPH) as (_, http):
        answer = await http.post("sign-in", data={"token": "any", "next": "docs"})
        assert (answer.status_code, answer.headers["location"]) == (303, f"{ROOT}/docs")
        assert "set-cookie" not in answer.headers
        assert "<form" in (await http.get("sign-in")).text
        assert (await http.put("sign-in")).status_code == 405


async def test_programs_are_still_told_in_json(http: httpx.AsyncClient) -> None:
    for headers in ({}, {"accept": "application/json"}):
        answer = await http.get("graph", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorized")
        assert answer.headers["www-authenticate"].startswith("Bearer")

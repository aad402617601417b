"""Bearer tokens, replicas that are killed, and a graph that cannot start."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import httpx
import openai
import pytest
from support.http_servers import SECRET, Shop, ToldModel

Failure = Callable[[httpx.Response], dict[str, Any]]

TOKEN = "a-token/with+signs=="
OLD_TOKEN = "an-older-one"
PATHS = [
    ("GET", "/"),
    ("GET", "/graph"),
    ("GET", "/pressure"),
    ("GET", "/stats"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/global_config_dict_yaml"),
    ("GET", "/server_instances"),
    ("GET", "/episodes"),
    ("GET", "/episodes/agent.x.1"),
    ("DELETE", "/episodes/agent.x.1"),
    ("GET", "/ui/"),
    ("GET", "/ui/static/live.js"),
    ("GET", "/model/v1/models"),
    ("POST", "/model/v1/responses"),
    ("POST", "/shop/stock"),
    ("POST", "/run"),
    ("POST", "/nothing"),
    ("DELETE", "/graph"),
]


@pytest.fixture(scope="module")
def url(cluster: str) -> Iterator[str]:
    from gym_serve import Gym

    os.environ |= {"HTTP_TESTS_TOKEN": TOKEN, "HTTP_TESTS_OLD_TOKEN": OLD_TOKEN}
    quick: dict[str, Any] = {"health_check_period_s": 0.5}
    graph = {
        "auth_token": ["${HTTP_TESTS_TOKEN}", "${HTTP_TESTS_OLD_TOKEN}"],
        "models": {"model": {"type": ToldModel, "api_key": SECRET, **quick}},
        "resources": {"shop": {"type": Shop, **quick}},
        "agents": {"agent": {"type": "simple_agent", "model": "model", "resources": "shop"}},
    }
    with Gym.from_graph(graph, name="guarded") as gym:
        yield gym.url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        yield client


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_nothing_is_answered_without_the_token(url: str, failure: Failure, method: str, path: str) -> None:
    answer = httpx.request(method, url + path, content=b'{"input": "hi", "stream": true}', timeout=60)
    error = failure(answer)
    assert (error["status"], error["code"], error["retryable"]) == (401, "unauthorized", False)
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert answer.headers["x-request-id"]
    assert TOKEN not in answer.text


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        f"Basic {TOKEN}",
        TOKEN,
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN.upper()}",
        b"Bearer \xff\xfe",
    ],
)
def test_a_wrong_token_is_refused(url: str, authorization: Any) -> None:
    answer = httpx.get(f"{url}/graph", headers={"authorization": authorization}, timeout=60)
    assert answer.status_code == 401


@pytest.mark.parametrize("token", [TOKEN, OLD_TOKEN])
@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER  "])
def test_the_right_token_is_let_in(url: str, scheme: str, token: str) -> None:
    answer = httpx.get(f"{url}/graph", headers={"authorization": scheme + token}, timeout=60)
    assert answer.status_code == 200


def test_a_probe_without_the_token_learns_the_state_alone(url: str) -> None:
    answer = httpx.get(f"{url}/health", timeout=60)
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert httpx.head(f"{url}/health", timeout=60).status_code == 200
    assert httpx.post(f"{url}/health", timeout=60).status_code == 405
    wrong = httpx.get(f"{url}/health", headers={"authorization": "Bearer guess"}, timeout=60)
    assert (wrong.status_code, "servers" in wrong.json()) == (401, False)
    known = httpx.get(f"{url}/health", headers={"x-api-key": OLD_TOKEN}, timeout=60)
    assert set(known.json()["servers"]) == {"model", "shop", "agent"}


@pytest.mark.parametrize("path", ["/graph", "/health", "/run", "/nothing"])
def test_a_websocket_is_refused(url: str, path: str) -> None:
    async def connect() -> aiohttp.WSServerHandshakeError:
        async with aiohttp.ClientSession() as client:
            with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
                await client.ws_connect(url + path)
        return refusal.value

    assert asyncio.run(connect()).status in (400, 403)


def test_the_openai_client_sends_the_token_as_its_key(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/agent/v1", api_key=TOKEN, max_retries=0) as client:
        # Without `tools`, the model would call all those of the shop: one ends its process.
        assert client.responses.create(model="m", input="hello", tools=[]).output_text == "hello"
        events = list(client.responses.create(model="m", input="hello", tools=[], stream=True))
        assert events[-1].type == "response.completed"
        guest = client.with_options(api_key="guess")
        with pytest.raises(openai.AuthenticationError, match="auth_token"):
            guest.responses.create(model="m", input="hello", stream=True)


def test_the_documentation_says_that_a_token_is_needed(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    (scheme,) = document["components"]["securitySchemes"].values()
    assert scheme == {"type": "http", "scheme": "bearer"}
    assert document["security"] == [{"token": []}]
    assert TOKEN not in http.get("/docs").text + http.get("/graph").text


def test_killed_replicas_fail_their_calls_and_come_back(http: httpx.Client, failure: Failure) -> None:
    session = http.post("/shop/seed_session", json={}).headers["x-session-id"]
    http.cookies.clear()
    died = failure(http.post("/model/v1/responses", json={"input": "die"}))
    assert (died["status"], died["code"], died["server"]) == (503, "unavailable", "model")
    pinned = {"x-session-id": session}
    lost = failure(http.post("/shop/burn_down", headers=pinned))
    assert (lost["status"], lost["code"], lost["retryable"]) == (409, "session_lost", True)

    waiting: set[str] = set()
    while (health := http.get("/health")).status_code == 503 or waiting != {"model", "shop"}:
        waiting.update(health.json().get("not_ready", ()))
    assert health.json()["status"] == "ok"

    again = failure(http.post("/shop/close_session", headers=pinned))
    assert (again["status"], again["code"]) == (409, "session_lost")
    assert http.post("/shop/stock", json={"item": "tea"}).json()["characters"] == 3
    row = {"responses_create_params": {"input": "hello", "tools": []}}
    assert http.post("/run", json=row).json()["said"] == "hello"


@pytest.fixture
def stuck(cluster: str) -> Iterator[httpx.Client]:
    """A graph whose model waits for a GPU that is not there."""
    from ray import serve

    from gym_serve.graph import build, resolve
    from gym_serve.graph.spec import GraphSpec

    model = {"type": ToldModel, "num_gpus": 1, "graceful_shutdown_timeout_s": 0}
    spec = GraphSpec(models={"model": model, "policy": {"type": "scripted_model"}})
    target = serve.RunTarget(build(resolve(spec)), name="stuck", route_prefix="/stuck")
    serve.run_many([target], wait_for_applications_running=False)
    with httpx.Client(base_url=f"{cluster}/stuck", timeout=60) as client:
        while client.get("/graph").status_code != 200:
            pass
        yield client
    serve.delete("stuck")


def test_a_graph_that_has_not_started_says_what_it_waits_for(stuck: httpx.Client, failure: Failure) -> None:
    while (health := stuck.get("/health")).json()["not_ready"] != ["model"]:
        pass
    assert health.status_code == 503
    assert health.json()["servers"]["model"]["state"] == "starting"
    headers = {"x-request-timeout": "0.5"}
    error = failure(stuck.post("/model/v1/responses", json={"input": "hi"}, headers=headers))
    assert (error["status"], error["code"]) == (504, "deadline_exceeded")
    assert failure(stuck.post("/run", json={}))["message"].endswith("no default agent; agents: none")
    document = stuck.get("/openapi.json").json()
    assert "/policy/v1/responses" in document["paths"]
    assert document["tags"][0]["description"].endswith("did not describe its routes")

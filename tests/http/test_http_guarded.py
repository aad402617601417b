"""Bearer tokens: nothing is answered without one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from support.http_servers import Shop, ToldModel
from support.in_process import serving

from gym_serve.graph import resolve
from gym_serve.graph.spec import GraphSpec

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
def url() -> Iterator[str]:
    os.environ |= {"HTTP_TESTS_TOKEN": TOKEN, "HTTP_TESTS_OLD_TOKEN": OLD_TOKEN}
    graph = {
        "auth_token": ["${HTTP_TESTS_TOKEN}", "${HTTP_TESTS_OLD_TOKEN}"],
        "models": {"model": {"type": ToldModel}},
        "resources": {"shop": {"type": Shop}},
        "agents": {"agent": {"type": "simple_agent", "model": "model", "resources": "shop"}},
    }
    with serving(lambda url: {"/guarded": resolve(GraphSpec.model_validate(graph))}) as url:
        yield f"{url}/guarded"


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

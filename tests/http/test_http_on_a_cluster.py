"""What the gateway needs a cluster for: Serve's proxy before it, replicas behind it that die or never start.

HAProxy as Serve starts it does not tell that a client leaves where a body follows its headers in a packet of
its own: see docs/http.md.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpx
import jsonschema
import psutil
import pytest
from support import haproxy
from support.http_servers import GRAPH, SECRET, Shop, ToldModel

Failure = Callable[[httpx.Response], dict[str, Any]]
TOKEN = "a-token/with+signs=="


@pytest.fixture(scope="module")
def url(deploy: Callable[..., Any]) -> str:
    """The graph of all tests over HTTP, deployed."""
    url: str = deploy(GRAPH, name="web").url
    return url


def test_the_way_of_these_tests(url: str) -> None:
    port = urlsplit(url).port
    sockets = psutil.net_connections("tcp4")
    pids = {s.pid for s in sockets if s.status == psutil.CONN_LISTEN and s.laddr.port == port}
    name = "haproxy" if haproxy.ENABLED else "ray::ProxyActor"
    assert {psutil.Process(pid).name() for pid in pids} == {name}


def counted(http: httpx.Client, question: str, more_than: int = -1) -> int:
    """What the model counts, once it is more (else the test times out)."""
    while True:
        answer = http.post("/told/v1/responses", json={"input": question}).json()
        if (count := int(answer["output"][-1]["content"][0]["text"])) > more_than:
            return count


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_client_that_leaves_frees_its_slot(http: httpx.Client, url: str, stream: bool) -> None:
    parts = urlsplit(url)
    body = json.dumps({"input": "hang", "stream": stream}).encode()
    headers = f"Host: {parts.netloc}\r\nContent-Length: {len(body)}\r\n"
    head = f"POST {parts.path}/told/v1/responses HTTP/1.1\r\n{headers}\r\n"
    before = counted(http, "cancelled?")
    with socket.create_connection((parts.hostname, parts.port)) as client:
        client.sendall(head.encode())
        time.sleep(0.2)  # else both may be read at once, and HAProxy misses nothing then
        client.sendall(body)
        while not counted(http, "hanging?"):
            pass  # the time limit of the test ends it
    while counted(http, "hanging?"):
        pass
    assert counted(http, "cancelled?") == before + 1


@pytest.mark.parametrize("path", ["/told/v1/responses", "/parrot/v1/responses"])
def test_a_deadline_cancels_the_call(http: httpx.Client, failure: Failure, path: str) -> None:
    before = counted(http, "cancelled?")
    error = failure(http.post(path, json={"input": "hang"}, headers={"x-request-timeout": "2"}))
    assert (error["status"], error["code"], error["retryable"]) == (504, "deadline_exceeded", True)
    assert counted(http, "cancelled?", before) == before + 1


def test_a_body_of_50_megabytes_passes(http: httpx.Client) -> None:
    size = 50 << 20
    assert http.post("/shop/stock", json={"item": "x" * size}).json()["characters"] == size


@pytest.mark.parametrize(
    "head",
    [
        b"POST /web/shop/stock HTTP/1.1\r\nHost: a b:no\r\n",
        b"GET /web/global_config_dict_yaml?%ff\xff HTTP/1.1\r\nHost: [::1\r\n",
        b"GET /web/server_instances HTTP/1.1\r\nHost: x:999999\r\n",
        b"POST /web/../web//shop//stock HTTP/1.1\r\nHost: localhost\r\n",
        b"POST /web/shop/stock HTTP/1.1\r\nHost: [::]\r\nCookie: gym_session=\xff;;=\r\nX-Session-Id: \r\n",
    ],
)
def test_no_request_makes_the_gateway_break(url: str, head: bytes) -> None:
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=30) as connection:
        connection.sendall(head + b"Connection: close\r\nContent-Length: 2\r\n\r\n{}")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert int(answer.split()[1]) in (200, 400, 403, 404, 422), answer


ENDS = {
    "refuse": (400, "bad_request"),
    "busy": (429, "overloaded"),
    "down": (503, "unavailable"),
    "crash": (500, "model_failed"),
    "lost": (409, "session_lost"),
}


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_in_a_replica_keeps_its_code_and_status(
    http: httpx.Client, failure: Failure, stream: bool
) -> None:
    for order, end in ENDS.items():
        error = failure(http.post("/told/v1/responses", json={"input": order, "stream": stream}))
        assert (error["status"], error["code"]) == end
    error = failure(http.post("/shop/break_down", json={}))
    assert (error["status"], error["code"]) == (422, "tool_failed")


class Links(HTMLParser):
    """Where the links of a page go."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [str(value) for name, value in attrs if name in ("href", "src")]


def test_the_links_of_the_root_lead_to_pages_without_a_secret(http: httpx.Client) -> None:
    links = Links(http.get("/").text).links
    assert {link.rpartition("/")[2] for link in links} >= {"docs", "graph", "health", "stats", "ui"}
    for link in [*links, "/web/pressure"]:
        answer = http.get(str(http.base_url.copy_with(path=link)), follow_redirects=True)
        assert answer.status_code in (200, 503)  # 503: /health
        assert SECRET not in answer.text


def test_pressure_names_what_limits(http: httpx.Client) -> None:
    http.post("/clerk/run", json={"responses_create_params": {"input": "order"}})
    pressure = http.get("/pressure").json()
    assert pressure.keys() == {"bottleneck", "reason", "load", "rollouts", "concurrency", "servers"}
    assert {"shop", "clerk"} < pressure["servers"].keys()
    assert "away" not in pressure["servers"]  # another graph's, or nobody's
    assert pressure["servers"]["shop"]["replicas"] == 1


def test_what_replicas_tell_is_as_documented(http: httpx.Client) -> None:
    """What graphs without a cluster do not answer; the rest has Schemathesis (test_openapi.py)."""
    document = http.get("/openapi.json").json()
    told = [
        path for path in document["paths"] if path.endswith(("/health", "/pressure", "/stats", "/version"))
    ]
    assert len(told) >= 4, document["paths"].keys()
    for path in told:
        answer = http.get(path)
        documented = document["paths"][path]["get"]["responses"]["200" if answer.is_success else "default"]
        if "$ref" in documented:
            documented = document["components"]["responses"][documented["$ref"].rpartition("/")[2]]
        schema = documented["content"]["application/json"]["schema"]
        whole = {**schema, "components": document["components"]}
        jsonschema.Draft202012Validator(whole).validate(answer.json())


@pytest.fixture(scope="module")
def guarded(deploy: Callable[..., Any]) -> str:
    """A graph with a token."""
    os.environ["HTTP_TESTS_TOKEN"] = TOKEN
    quick: dict[str, Any] = {"health_check_period_s": 0.5}
    graph = {
        "auth_token": ["${HTTP_TESTS_TOKEN}"],
        "models": {"model": {"type": ToldModel, "api_key": SECRET, **quick}},
        "resources": {"shop": {"type": Shop, **quick}},
        "agents": {"agent": {"type": "simple_agent", "model": "model", "resources": "shop"}},
    }
    url: str = deploy(graph, name="guarded").url
    return url


@pytest.mark.parametrize("path", ["/graph", "/health", "/run", "/nothing"])
def test_a_websocket_is_refused(guarded: str, path: str) -> None:
    async def connect() -> aiohttp.WSServerHandshakeError:
        async with aiohttp.ClientSession() as client:
            with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
                await client.ws_connect(guarded + path)
        return refusal.value

    assert asyncio.run(connect()).status in (400, 403)


def test_killed_replicas_fail_their_calls_and_come_back(guarded: str, failure: Failure) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    http = httpx.Client(base_url=guarded, headers=headers, timeout=60)
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
    http.close()


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

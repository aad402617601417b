"""The gateway by itself, over servers that are a table of replies: no Ray, no sockets."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr
from starlette.requests import Request
from starlette.responses import Response

from gym_serve.assembly import ThisProcess
from gym_serve.cluster import deploy, ingress
from gym_serve.gateway import api_docs, pages, wire
from gym_serve.gateway.gateway import Gateway
from gym_serve.gateway.pages import Page
from gym_serve.gateway.wire import find_route
from gym_serve.graph import resolve
from gym_serve.graph.spec import GatewayOptions, Graph, GraphSpec, Node
from gym_serve.interop.nemo_gym import head_server
from gym_serve.servers.base import Operation, Server
from gym_serve.servers.runner import ServerRunner
from gym_serve.servers.tools import RESERVED
from gym_serve.servers.transport import Call, Reply
from gym_serve.types.errors import GraphError, NotFound, Overloaded, SessionLost, Unauthorized

NODES = {
    "model": Node("model", "model", "m:Model"),
    "far": Node("far", "model", "http", url="http://far:1"),
    "shop": Node("shop", "resources", "m:Shop"),
    "far_shop": Node("far_shop", "resources", "http", url="http://far:2"),
    "agent": Node("agent", "agent", "m:Agent", references={"model": "model", "resources": "shop"}),
    "other": Node("other", "agent", "m:Agent", references={"model": "far", "judges[0]": "model"}),
}
HEADERS = st.dictionaries(
    st.sampled_from(["host", "cookie", "x-session-id", "x-request-id", "x-request-timeout"]),
    st.binary(max_size=30),
)
TEXT = st.text(max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(["reward", "said", "reward ", 'a"b', "é", "response"]) | TEXT
OBJECTS = st.dictionaries(KEYS, JSON, max_size=4)
PATHS = (
    st.sampled_from(
        ["/run", "/shop/verify", "/shop/buy", "/model/v1/responses", "/far/v1/responses", "/docs"]
    )
    | st.builds("/{}".format, st.text(max_size=12))
    | st.builds("/shop/{}".format, st.text(max_size=12))
    | st.builds("/rollouts/{}".format, st.text(max_size=12))
    | st.sampled_from(["/rollouts", "/rollouts/x", "/episodes/local.x", "/model/policy/pause"])
)
BODIES = st.binary(max_size=20) | st.builds(orjson.dumps, JSON | OBJECTS) | st.just(b'{"stream": true}')


class Table:
    """A transport that answers every call alike and keeps the calls."""

    def __init__(self, answer: Reply | BaseException) -> None:
        self.server = "table"
        self.answer = answer
        self.calls: list[Call] = []

    async def call(self, call: Call) -> Reply:
        self.calls.append(call)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    async def stream(self, call: Call) -> AsyncGenerator[bytes, None]:
        (await self.call(call)).json()
        yield b"data: {}\n\n"

    async def close(self) -> None:
        pass


def ask(
    answer: Reply | BaseException,
    path: str,
    body: bytes = b"{}",
    *,
    method: str = "POST",
    headers: dict[str, bytes] | None = None,
    plan: Graph | None = None,
) -> tuple[Response, list[Call]]:
    """The answer of a gateway all of whose servers give ``answer``, and the calls that they got."""
    plan, table = plan or Graph(NODES), Table(answer)
    gateway = Gateway(plan, dict.fromkeys(NODES, table), ThisProcess(plan, []))
    gateway.public = plan.public()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    raw = [(name.encode(), value) for name, value in (headers or {}).items()]
    if body and "content-length" not in (headers or {}):
        raw.append((b"content-length", str(len(body)).encode()))
    scope = {
        "type": "http",
        "method": method,
        "path": f"/root{path}",
        "root_path": "/root",
        "scheme": "http",
        "query_string": b"",
        "headers": raw,
    }
    return asyncio.run(gateway.answer(Request(scope, receive))), table.calls


def code_of(response: Response) -> str:
    return str(orjson.loads(response.body)["error"]["code"])


REFUSALS = (
    *("bad_request", "forbidden", "invalid_request", "method_not_allowed", "not_found"),
    *("session_lost", "session_not_found"),
)
OK = Reply.of({"reward": 1.0}, "shop.1")


@given(
    method=st.sampled_from(["GET", "POST", "HEAD", "PUT", "OPTIONS"]),
    path=PATHS,
    headers=HEADERS,
    body=BODIES,
    reply=st.builds(Reply, st.sampled_from([200, 404, 429, 500, 503]), BODIES, notes=st.none()),
)
def test_whatever_is_sent_and_whatever_servers_say_there_is_an_answer(
    method: str, path: str, headers: dict[str, bytes], body: bytes, reply: Reply
) -> None:
    response, calls = ask(reply, path, body, method=method, headers=headers)
    if not calls and response.status_code >= 400:
        assert code_of(response) in REFUSALS
    if path.startswith("/far/") and calls and response.status_code >= 400:
        assert code_of(response)


@given(st.text(max_size=30))
def test_no_path_below_an_environment_reaches_another_operation(path: str) -> None:
    try:
        route = find_route("POST", f"shop/{path}", NODES)
    except NotFound:
        return
    if route.op.startswith("tools/"):
        assert route.op == f"tools/{path}"
        assert path not in RESERVED
        assert "/" not in path
    else:
        assert route.op in RESERVED | {"operations.json", "v1/models"}


@pytest.mark.parametrize(
    "path", ["/run", "/agent/run", "/shop/buy", "/shop/seed_session", "/model/v1/responses"]
)
def test_a_body_passes_as_it_is(path: str) -> None:
    body = b' {"a": 1.0,\n "a": 1e2} '
    plan = Graph(NODES, default_agent="agent")
    response, (call,) = ask(OK, path, body, plan=plan)
    assert call.body == body
    assert response.body == OK.body


@given(OBJECTS, OBJECTS, st.booleans())
def test_a_verdict_is_merged_into_its_request(row: Any, verdict: Any, ascii_only: bool) -> None:
    body = json.dumps(row, ensure_ascii=ascii_only, indent=1).encode() + b"\n"
    merged = wire.merged(body, Reply(200, b" " + orjson.dumps(verdict), "s.1"))
    assert json.loads(merged.body, object_pairs_hook=unique) == {**row, **verdict}
    assert merged.session == "s.1"


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def test_a_remote_environment_has_merged_its_verdict_itself() -> None:
    response, _ = ask(OK, "/far_shop/verify", b'{"response": {}}')
    assert response.body == OK.body


def test_what_a_call_carries() -> None:
    headers = {
        "x-session-id": b"shop.7",
        "x-request-id": b"r-1",
        "x-session-affinity": b"0-3",
        "x-request-timeout": b"2.5",
    }
    for path, op, session in [
        ("/shop/buy", "tools/buy", "shop.7"),
        ("/shop/verify", "verify", "shop.7"),
        ("/shop/close_session", "close_session", "shop.7"),
        ("/shop/seed_session", "seed_session", "shop.7"),
        ("/shop/aggregate_metrics", "aggregate_metrics", None),
        ("/agent/run", "run", None),
        ("/model/v1/responses", "v1/responses", None),
    ]:
        _, (call,) = ask(OK, path, headers=headers)
        assert (call.op, call.session) == (op, session)
        affinity = None if op == "seed_session" else "0-3"
        assert (call.request_id, call.affinity, call.timeout) == ("r-1", affinity, 2.5)


def test_the_keys_of_a_stream_reach_no_agent_and_no_model() -> None:
    body = {"input": "hi", "stream": True, "stream_options": {"include_usage": True}, "model": "m"}
    _, (call,) = ask(Reply.of({"output": []}), "/agent/v1/responses", orjson.dumps({**body, "stream": False}))
    assert orjson.loads(call.body) == {"input": "hi", "model": "m"}
    _, (call,) = ask(Reply.of({"output": []}), "/model/v1/responses", orjson.dumps(body))
    assert orjson.loads(call.body) == body  # its runner reads them
    seen: list[Any] = []

    class Agent(Server):
        kind = "agent"

        def operations(self) -> dict[str, Operation]:
            return {"v1/responses": Operation(self.respond, "")}

        async def respond(self, body: Any) -> Any:
            seen.append(body)
            return {"output": [], "status": "completed"}

    async def stream() -> bytes:
        call = Call("v1/responses", orjson.dumps(body))
        return b"".join([part async for part in ServerRunner(Agent()).stream(call)])

    assert b"event: response.completed" in asyncio.run(stream())
    assert seen == [{"input": "hi", "model": "m"}]
    _, (call,) = ask(OK, "/shop/buy", orjson.dumps(body))
    assert orjson.loads(call.body) == body


@pytest.mark.parametrize(
    ("status", "body", "code", "message"),
    [
        (429, b'{"object": "error", "message": "slow down", "code": 429}', "overloaded", "slow down"),
        (404, b'{"detail": "Not Found"}', "not_found", "Not Found"),
        (502, b"<html>Bad Gateway</html>", "unavailable", "Bad Gateway"),
        (500, b"", "unavailable", "500"),
        (400, b"[1]", "bad_request", "HTTP 400: 1"),
        (400, b"[1, 2]", "bad_request", "[1, 2]"),
    ],
)
def test_failures_of_foreign_servers_get_a_code(status: int, body: bytes, code: str, message: str) -> None:
    response, _ = ask(Reply(status, body), "/far/v1/responses")
    error = orjson.loads(response.body)["error"]
    assert (error["code"], error["server"]) == (code, "far")
    assert message in error["message"]


def test_what_a_foreign_tool_says_is_not_touched() -> None:
    response, _ = ask(Reply(422, b'{"detail": "no such city"}'), "/far_shop/buy")
    assert (response.status_code, response.body) == (422, b'{"detail": "no such city"}')


@pytest.mark.parametrize("after", [0.2, 3.0, 3.1])
def test_retry_after_is_in_whole_seconds(after: float) -> None:
    response, _ = ask(Overloaded("full", retry_after=after), "/model/v1/responses")
    assert (response.status_code, code_of(response)) == (429, "overloaded")
    assert after <= int(response.headers["retry-after"]) < after + 1


def test_a_failure_keeps_no_session() -> None:
    response, _ = ask(
        Reply.failed(SessionLost("gone"), "shop.7"), "/shop/buy", headers={"x-session-id": b"shop.7"}
    )
    assert response.status_code == 409
    assert "set-cookie" not in response.headers


def test_a_bug_is_a_failure_with_the_id_of_its_request() -> None:
    response, _ = ask(KeyError("secret"), "/model/v1/responses", headers={"x-request-id": b"r-1"})
    assert (response.status_code, code_of(response)) == (500, "gym_error")
    assert b"r-1" in response.body
    assert b"secret" not in response.body


@pytest.mark.parametrize(
    ("default", "agents", "status"),
    [("agent", NODES, 200), (None, NODES, 422), (None, {"shop": NODES["shop"]}, 422)],
)
def test_rows_that_name_no_agent(default: str | None, agents: dict[str, Node], status: int) -> None:
    response, _ = ask(OK, "/run", plan=Graph(agents, default_agent=default))
    assert response.status_code == status


def test_a_token_may_have_any_characters() -> None:
    plan = Graph(NODES, (SecretStr("tökén ☃"),))
    assert ask(OK, "/shop/buy", plan=plan)[0].status_code == 401
    good = {"authorization": "Bearer tökén ☃".encode()}
    assert ask(OK, "/shop/buy", plan=plan, headers=good)[0].status_code == 200


def test_a_models_own_refusal_of_its_key_has_a_challenge_too() -> None:
    response, _ = ask(Unauthorized("bad key"), "/model/v1/responses")
    assert response.status_code == 401
    assert response.headers["www-authenticate"]


@pytest.mark.parametrize(
    ("scheme", "host", "address"),
    [
        ("http", b"gym.example:8000", ("gym.example", 8000)),
        ("http", b"gym.example", ("gym.example", 80)),
        ("https", b"gym.example", ("gym.example", 443)),
        ("http", b"[::1]:8000", ("[::1]", 8000)),
        ("http", b"gym.example:port", ("127.0.0.1", 80)),
        ("http", b"", ("127.0.0.1", 80)),
    ],
)
def test_the_head_server_gives_the_address_that_its_client_used(
    scheme: str, host: bytes, address: tuple[str, int]
) -> None:
    request = Request(
        {"type": "http", "scheme": scheme, "path": "/", "root_path": "/r", "headers": [(b"host", host)]}
    )
    first = head_server.server_instances(request, NODES)[0]
    assert (first["host"], first["port"]) == address
    assert first["url"] == f"{scheme}://{address[0]}:{address[1]}/r/model"
    assert f"port: {address[1]}/r/agent\n" in head_server.global_config_yaml(request, NODES)


def test_a_package_adds_a_page_to_every_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page("Names of the servers", {"type": "array"}, lambda request, nodes: sorted(nodes))
    monkeypatch.setattr(pages, "_load_pages", lambda: {"names": page})
    response, calls = ask(OK, "/names", b"", method="GET")
    assert (response.status_code, orjson.loads(response.body), calls) == (200, sorted(NODES), [])
    assert ask(OK, "/names")[0].status_code == 405
    assert ask(OK, "/names/x", b"", method="GET")[0].status_code == 404
    document = orjson.loads(ask(OK, "/openapi.json", b"", method="GET")[0].body)
    assert document["paths"]["/names"]["get"]["summary"] == "Names of the servers"


def test_definitions_of_the_same_name_do_not_meet_in_the_document() -> None:
    def operation(kind: str) -> dict[str, Any]:
        schema = {"$ref": "#/$defs/Item", "$defs": {"Item": {"type": kind}}}
        return {"method": "POST", "summary": "", "request": schema, "response": None}

    described = {"shop": {"tools/buy": operation("string"), "tools/sell": operation("number")}}
    document = api_docs.openapi("", NODES, described)
    schemas = document["components"]["schemas"]
    assert schemas["shop.buy.Item"] == {"type": "string"}
    assert schemas["shop.sell.Item"] == {"type": "number"}


def test_nothing_of_a_graph_is_markup_on_the_page() -> None:
    markup = {"x": Node("x", "model", "<script>")}
    assert "<script>" not in pages.reference(api_docs.openapi("", markup, {"x": None}))


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        (None, "gym.example", 200),
        ("http://gym.example", "gym.example", 200),
        ("https://gym.example", "gym.example:443", 200),
        ("http://GYM.example:8000", "gym.example:8000", 200),
        ("http://gym.example:8000", "gym.example", 403),
        ("http://evil.example", "gym.example", 403),
        ("http://gym.example.evil.example", "gym.example", 403),
        ("http://gym.example@evil.example", "gym.example", 403),
        ("null", "gym.example", 403),
        ("", "", 403),
        ("http://[", "gym.example", 403),
    ],
)
def test_pages_of_another_origin_are_refused(origin: str | None, host: str, status: int) -> None:
    plan = Graph(NODES, insecure=True)
    headers = {"host": host.encode()} | ({} if origin is None else {"origin": origin.encode()})
    response, calls = ask(OK, "/shop/buy", plan=plan, headers=headers)
    assert response.status_code == status
    assert bool(calls) == (status == 200)


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_no_page_reads_a_route_of_the_graph(method: str) -> None:
    headers = {"host": b"127.0.0.1:8000", "origin": b"http://evil.example"}
    for path in ("/health", "/graph", "/docs", "/run", "/nothing", "/shop/mcp"):
        response, calls = ask(OK, path, method=method, headers=headers)
        assert (response.status_code, code_of(response), calls) == (403, "forbidden", [])


def test_an_open_graph_has_no_name_that_a_page_could_have() -> None:
    """A page whose name was made to lead to this machine has no foreign origin."""
    page = {"host": b"evil.example:8000", "origin": b"http://evil.example:8000"}
    assert ask(OK, "/shop/buy", headers=page)[0].status_code == 403
    for host in (b"127.0.0.1:8000", b"localhost:8000", b"10.0.0.7", b"[::1]:8000", b"x.localhost"):
        assert ask(OK, "/shop/buy", headers={"host": host})[0].status_code == 200
    token = {**page, "authorization": b"Bearer t"}
    assert ask(OK, "/shop/buy", plan=Graph(NODES, (SecretStr("t"),)), headers=token)[0].status_code == 200


def test_of_several_tokens_each_lets_in() -> None:
    plan = Graph(NODES, (SecretStr("new"), SecretStr("old")))
    status = {
        token: ask(OK, "/shop/buy", plan=plan, headers={"authorization": b"Bearer " + token})[0].status_code
        for token in (b"new", b"old", b"older", b"")
    }
    assert status == {b"new": 200, b"old": 200, b"older": 401, b"": 401}


@pytest.mark.parametrize("length", [b"101", b"1" * 30])
def test_a_body_over_the_limit_is_not_read(length: bytes) -> None:
    plan = Graph(NODES, gateway=GatewayOptions(max_request_bytes=100))
    for path in ("/shop/buy", "/run", "/shop/mcp"):
        response, calls = ask(OK, path, b"x", plan=plan, headers={"content-length": length})
        assert (response.status_code, code_of(response), calls) == (413, "too_large", [])


@pytest.mark.parametrize(
    ("name", "value"), [("transfer-encoding", b"chunked"), ("content-encoding", b"gzip")]
)
def test_a_body_of_unknown_length_and_a_compressed_one_are_refused(name: str, value: bytes) -> None:
    response, calls = ask(OK, "/shop/buy", b"{}", headers={name: value})
    assert name.encode() in response.body
    assert (response.status_code, code_of(response), calls) == (400, "bad_request", [])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "gym.example"])
def test_an_open_graph_starts_only_where_nobody_else_reaches_it(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """However it was deployed: the builder refuses, and so does the gateway where Serve started later."""
    for module in (deploy, ingress):
        monkeypatch.setattr(module, "http_host", lambda: host)
    content = GraphSpec(models={"policy": {"type": "scripted_model"}})
    with pytest.raises(GraphError, match="the graph has no token"):
        deploy.app(content)
    with pytest.raises(GraphError, match="the graph has no token"):
        ingress.Ingress(Graph({}), {})
    deploy.app(content.model_copy(update={"insecure": True}))
    deploy.build(resolve(content.model_copy(update={"auth_token": SecretStr("t")})))
    monkeypatch.setattr(deploy, "http_host", lambda: "::1")
    deploy.app(content)


def test_no_client_makes_itself_an_episode() -> None:
    """By its key a server knows the sessions of episodes, of which it may have more."""
    key = {"x-session-affinity": b"rollout-1"}
    for path in ("/shop/seed_session", "/shop/buy"):
        _, calls = ask(OK, path, b"{}", headers=key)
        assert [call.affinity for call in calls] == [None]
    _, calls = ask(OK, "/model/v1/responses", b"{}", headers=key)
    assert [call.affinity for call in calls] == ["rollout-1"]


async def test_many_probes_without_a_token_cost_one_look() -> None:
    looks = 0

    class Probed(ThisProcess):
        async def states(self) -> dict[str, dict[str, Any]]:
            nonlocal looks
            looks += 1
            await asyncio.sleep(0.01)
            return {"shop": {"state": "ready", "url": "http://not.for.everyone"}}

    graph = Graph({}, (SecretStr("t"),))
    gateway = Gateway(graph, {}, Probed(graph, []))
    scope = {"type": "http", "method": "GET", "path": "/health", "query_string": b"", "headers": []}
    answers = await asyncio.gather(*(gateway.answer(Request(dict(scope))) for _ in range(200)))
    assert {bytes(answer.body) for answer in answers} == {b'{"status":"ok"}'}
    assert looks == 1

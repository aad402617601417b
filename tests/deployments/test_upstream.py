"""Errors, retries and deadlines of the HTTP calls, through `chat_model` and a real server."""

import asyncio
import ssl
from functools import partial

import pytest
import trustme
from aiohttp import web
from pydantic import ValidationError
from support.letters import LettersSglang
from support.threaded import ThreadedServer
from yarl import URL

from gym_serve.deployments import http_client
from gym_serve.deployments.chat_model import ChatModel
from gym_serve.deployments.http_client import proxy_of
from gym_serve.deployments.openai_model import OpenAIModel
from gym_serve.servers.context import CallContext, time_limit, use
from gym_serve.types.errors import (
    BadRequest,
    DeadlineExceeded,
    EndpointAccessDenied,
    EndpointMisconfigured,
    Overloaded,
    Unavailable,
)

ASK = {"input": [{"role": "user", "content": "hi"}]}
MODELS = {
    "chat_model": ChatModel,
    "openai_model": partial(OpenAIModel, api_key="k"),
    "sglang_model": partial(LettersSglang, tokenizer="letters"),
}
KEY = "sk-very-secret"


@pytest.fixture
async def model(backend, monkeypatch):
    monkeypatch.setattr(http_client, "_PAUSE", 0.0)
    server = ChatModel(base_url=backend.url, model="m", api_key=KEY, max_retries=2)
    await server.start()
    yield server
    await server.stop()


@pytest.mark.parametrize(
    "reply",
    [
        (429, {"error": "slow down"}),
        (500, b"boom"),
        (503, {"detail": "starting"}),
        (
            404,
            b"Path '/v1' not found. Ping http://.../-/routes for available routes.",
        ),  # Serve's proxy starts
        "drop",
    ],
)
async def test_what_may_pass_is_tried_again(model, backend, completed, reply):
    backend.replies = [reply, reply, completed("there")]
    response = await model.responses(ASK)
    assert response["output"][0]["content"][0]["text"] == "there"
    assert len(backend.requests) == 3


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        ((429, {"error": {"message": "slow down"}}), Overloaded, "slow down"),
        ((500, b"<html>boom</html>"), Unavailable, "boom"),
        ((504, b"gateway"), Unavailable, "HTTP 504"),
        ("drop", Unavailable, "broke off"),
    ],
)
async def test_retries_end(model, backend, reply, error, message):
    backend.replies = [reply]
    with pytest.raises(error, match=message):
        await model.responses(ASK)
    assert len(backend.requests) == 3


NO_MODEL = {"message": "The model `m` does not exist."}


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        ((400, {"error": {"message": "temperature must be non-negative"}}), BadRequest, "must be non-neg"),
        ((400, {"object": "error", "message": "bad tool"}), BadRequest, "bad tool"),
        ((422, {"detail": [{"loc": ["body"]}]}), BadRequest, "loc"),
        ((401, {"error": {"message": f"Incorrect API key: {KEY}"}}), EndpointAccessDenied, "api_key"),
        ((402, {"error": {"message": "Insufficient Balance"}}), EndpointAccessDenied, "Insufficient"),
        ((403, b"forbidden"), EndpointMisconfigured, "api_key"),
        ((403, {"error": {"code": "permission_denied"}}), EndpointAccessDenied, "api_key"),
        ((429, {"error": {"type": "insufficient_quota"}}), EndpointAccessDenied, "insufficient_quota"),
        ((404, {"error": NO_MODEL}), EndpointMisconfigured, "`m` does not exist. .see base_url, model"),
        ((404, b"<html>nginx"), EndpointMisconfigured, "nginx"),
        ((405, {"detail": "Method Not Allowed"}), EndpointMisconfigured, "Method Not Allowed"),
        (
            (400, {"error": {**NO_MODEL, "code": "model_not_found"}}),
            EndpointMisconfigured,
            "see base_url, model",
        ),
        ((308, b"", {"Location": "https://b/v1"}), EndpointMisconfigured, "'https://b/v1': set base_url"),
        ((302, b""), EndpointMisconfigured, "redirects"),
    ],
)
async def test_a_refusal_is_final_and_names_the_reason(model, backend, reply, error, message):
    await refused(model, backend, reply, error, message)


async def refused(model, backend, reply, error, message):
    backend.replies = [reply]
    with pytest.raises(error, match=message) as caught:
        await model.responses(ASK)
    assert type(caught.value) is error
    assert len(backend.requests) == 1
    assert backend.url in caught.value.message
    assert KEY not in repr(caught.value.to_body())


@pytest.mark.parametrize("reply", [b"not json", b"[]", b"{}", b'{"choices": []}', b'"text"', b"\xff\xfe"])
async def test_a_malformed_answer_is_not_tried_again(model, backend, reply):
    backend.replies = [reply]
    with pytest.raises(Unavailable):
        await model.responses(ASK)
    assert len(backend.requests) == 1


async def test_the_key_is_a_bearer_token(model, backend):
    await model.responses(ASK)
    assert backend.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert KEY not in repr(model.config)


@pytest.mark.parametrize(
    ("error", "seconds"), [(Overloaded("x", retry_after=7.0), 7.25), (Unavailable("x"), 0.25)]
)
def test_what_the_backend_asks_for_is_waited_in_addition(monkeypatch, error, seconds):
    monkeypatch.setattr(http_client.random, "uniform", lambda low, high: high)
    monkeypatch.setattr(http_client, "_PAUSE", 0.25)
    assert http_client.pause_after(error, 0) == seconds


@pytest.fixture
def proxies(monkeypatch):
    """Sets variables of the environment that name proxies."""

    def name(**variables):
        proxy_of.cache_clear()
        for key, value in variables.items():
            monkeypatch.setenv(key, value)

    yield name
    proxy_of.cache_clear()


@pytest.mark.parametrize(
    ("variables", "url", "proxy"),
    [
        ({"http_proxy": "host:3128"}, "http://a/v1", "http://host:3128"),
        ({"all_proxy": "http://p:1"}, "http://a/v1", "http://p:1"),
        ({"https_proxy": "http://p:1"}, "http://a/v1", None),
        ({"https_proxy": "http://me:secret@p:1"}, "https://a/v1", "http://me:secret@p:1"),
        *(
            ({"http_proxy": "http://p:1", "no_proxy": direct}, url, None)
            for direct, url in (
                ("10.0.0.0/8", "http://10.1.2.3:8000/v1"),
                ("a:8000", "http://a:8000/v1"),
                ("[::1]", "http://[::1]:8/v1"),
                ("::1", "http://[::1]:8/v1"),
                (".inside", "http://a.inside/v1"),
                ("*", "http://a/v1"),
            )
        ),
        ({"http_proxy": "http://p:1", "no_proxy": "a:8000"}, "http://a:9000/v1", "http://p:1"),
    ],
)
def test_which_proxy(proxies, variables, url, proxy):
    proxies(**variables)
    assert proxy_of(url) == (proxy and URL(proxy))


def test_a_proxy_that_is_none_of_http_is_told_by_its_variable(proxies):
    proxies(all_proxy="socks5://me:secret@p:1")
    with pytest.raises(
        EndpointMisconfigured, match="must be an HTTP proxy, got socks5://p: change"
    ) as caught:
        proxy_of("https://a/v1")
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("model", MODELS)
async def test_the_proxy_of_the_environment(proxies, model):
    async def answer(reader, writer):
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno")
        writer.close()

    seen = []
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as proxy:
        port = proxy.sockets[0].getsockname()[1]
        proxies(http_proxy=f"http://me:secret@127.0.0.1:{port}", no_proxy="inside.example")
        assert proxy_of("http://inside.example/v1") is None
        server = MODELS[model](base_url="http://model.example/v1", model="m")
        await server.start()
        with pytest.raises(BadRequest, match="no"):
            await server.responses(ASK)
        await server.stop()
    assert seen[0].startswith(b"POST http://model.example/")
    assert b"Proxy-Authorization: Basic bWU6c2VjcmV0" in seen[0]


@pytest.mark.parametrize("model", MODELS)
async def test_a_proxy_that_refuses_is_not_shown_with_its_password(proxies, model):
    async def refuse(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 407 Who are you\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as proxy:
        proxies(https_proxy=f"http://me:pass-word@127.0.0.1:{proxy.sockets[0].getsockname()[1]}")
        server = MODELS[model](base_url="https://model.example/v1", model="m", max_retries=0)
        await server.start()
        with pytest.raises(Unavailable, match="407: Who are you") as caught:
            await server.responses(ASK)
        await server.stop()
    assert "pass-word" not in caught.value.message


async def test_a_proxy_that_is_not_there_is_told_as_one(proxies, model):
    proxies(http_proxy="127.0.0.1:9")
    model.reconfigure({"base_url": "http://model.example/v1", "max_retries": 0})
    with pytest.raises(
        Unavailable, match=r"no connection to http://model.* by the proxy of the environment: "
    ):
        await model.responses(ASK)


async def test_what_is_wrong_with_tls_is_a_setting(backend):
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    runner = web.ServerRunner(web.Server(backend.handle))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    port = runner.addresses[0][1]
    server = ChatModel(base_url="http://localhost/v1", model="m", max_retries=0)
    await server.start()
    for url, told in (
        (f"https://localhost:{port}/v1", "certificate that is not trusted .*SSL_CERT_FILE"),
        (backend.url.replace("http", "https"), "does not speak HTTPS"),
    ):
        server.reconfigure({"base_url": url})
        with pytest.raises(EndpointMisconfigured, match=told):
            await server.responses(ASK)
    await server.stop()
    await runner.cleanup()


async def test_a_redirect_takes_the_key_nowhere(model, backend):
    backend.replies = [(307, b"", {"Location": "http://169.254.169.254/v1"})]
    with pytest.raises(
        EndpointMisconfigured, match=r"redirects to 'http://169\.254\.169\.254/v1': set base_url"
    ):
        await model.responses(ASK)
    assert len(backend.requests) == 1


async def test_no_error_shows_secrets_of_headers_or_the_query(backend):
    backend.replies = [(400, {"error": "bad header topsecret, bad title t"})]
    server = ChatModel(
        base_url=backend.url,
        model="m",
        headers={"X-Key": "topsecret", "X-Title": "t"},
        query={"sig": "signature"},
    )
    await server.start()
    with pytest.raises(BadRequest, match="bad title t") as caught:
        await server.responses(ASK)
    backend.replies = [b"no JSON"]
    with pytest.raises(Unavailable) as broken:
        await server.responses(ASK)
    await server.stop()
    assert backend.queries == ["sig=signature"] * 2
    for error in (caught.value, broken.value):
        assert not {"topsecret", "signature"} & set(error.message.replace("=", " ").replace(",", " ").split())


@pytest.mark.parametrize(
    "url",
    [
        *("http://me:pw@host/v1", "http://host/v1?key=1", "http://host/v1#x", "host/v1", "http:///v1"),
        *("http://host:99999/v1", "http://host:x/v1", "http://a..b/v1", "http://[::1/v1"),
    ],
)
def test_a_base_url_holds_no_credentials_and_no_query(url):
    with pytest.raises(ValidationError, match="base_url"):
        ChatModel(base_url=url, model="m")


@pytest.mark.parametrize("wait", ["NaN", "Infinity", "-5", "1" + "0" * 400, '"soon"'])
async def test_what_a_body_says_of_waiting_may_be_nonsense(model, backend, wait):
    backend.replies = [
        (429, b'{"error": {"code": "overloaded", "message": "x", "retry_after": %s}}' % wait.encode())
    ]
    with use(CallContext().within(30)), pytest.raises(Overloaded) as caught:
        await model.responses(ASK)
    assert caught.value.retry_after is None
    assert len(backend.requests) == 3


async def test_the_header_reaches_the_error(model, backend):
    backend.replies = [(503, {}, {"Retry-After": "0.01"})]
    with pytest.raises(Unavailable) as caught:
        await model.responses(ASK)
    assert caught.value.retry_after == 0.01


async def test_no_retry_begins_after_the_deadline(model, backend):
    backend.replies = [(429, {"error": "slow down"}, {"Retry-After": "60"})]
    with use(CallContext().within(30)), pytest.raises(Overloaded) as caught:
        await model.responses(ASK)
    assert caught.value.retry_after == 60
    assert len(backend.requests) == 1


@pytest.fixture
async def any_model(backend, monkeypatch, model_type):
    """Of each type that shares the calls of this file."""
    monkeypatch.setattr(http_client, "_PAUSE", 0.0)
    server = MODELS[model_type](base_url=backend.url, model="m", max_retries=1)
    yield server
    await server.stop()


EVERY_MODEL = pytest.mark.parametrize("model_type", MODELS)


@EVERY_MODEL
async def test_the_deadline_of_the_call_ends_a_hanging_one(any_model, backend):
    await any_model.start()
    backend.replies = ["hang"]
    with use(CallContext().within(2.0)), pytest.raises(DeadlineExceeded, match="in time"):
        await any_model.responses(ASK)
    await backend.cancelled.wait()


async def test_an_endpoint_that_hangs_is_known_for_it_whoever_ends_the_call(model, backend, monkeypatch):
    monkeypatch.setattr("gym_serve.servers.context._COARSE_SECONDS", 0.0)  # one timer for both limits
    backend.replies = ["hang"]
    (endpoint,) = model._upstream.pool.endpoints
    for _ in range(5):
        assert endpoint.breaker.allows(0.0)
        with (
            use(CallContext().within(0.01)),
            pytest.raises((asyncio.TimeoutError, DeadlineExceeded)),
            time_limit(0.01),
        ):
            await model.responses(ASK)
    assert not endpoint.breaker.allows(0.0)


async def test_a_call_past_its_deadline_is_not_sent(model, backend):
    with use(CallContext().within(0.0)), pytest.raises(DeadlineExceeded):
        await model.responses(ASK)
    assert backend.requests == []


async def test_the_timeout_setting_holds_without_a_deadline(backend):
    backend.replies = ["hang"]
    server = ChatModel(base_url=backend.url, model="m", timeout=0.2)
    await server.start()
    with pytest.raises(DeadlineExceeded):
        await server.responses(ASK)
    await server.stop()


@EVERY_MODEL
async def test_cancelling_closes_the_request(any_model, backend):
    await any_model.start()
    backend.replies = ["hang"]
    call = asyncio.create_task(any_model.responses(ASK))
    await backend.waiting.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await backend.cancelled.wait()


async def test_an_endpoint_that_is_gone_is_passed_over(backend, monkeypatch):
    monkeypatch.setattr(http_client, "_PAUSE", 0.0)
    gone = "http://127.0.0.1:9/v1"
    server = ChatModel(base_url=[gone, backend.url], model="m", max_retries=1)
    await server.start()
    for i in range(8):
        with use(CallContext(affinity=f"episode-{i}")):
            await server.responses(ASK)
    assert len(backend.requests) == 8
    await server.stop()


@EVERY_MODEL
async def test_calls_before_the_start_and_without_an_endpoint_say_so(any_model):
    any_model.reconfigure({"base_url": "http://127.0.0.1:9/v1", "max_retries": 0})
    with pytest.raises(Unavailable, match="start"):
        await any_model.responses(ASK)
    await any_model.start()
    with pytest.raises(Unavailable, match=r"no connection to http://127\.0\.0\.1:9/"):
        await any_model.responses(ASK)


async def test_an_episode_stays_at_one_endpoint(backends):
    server = ChatModel(base_url=[b.url for b in backends], model="m")
    await server.start()
    for i in range(10):
        before = [len(b.requests) for b in backends]
        for _ in range(3):
            with use(CallContext(affinity=f"episode-{i}")):
                await server.responses(ASK)
        assert sorted(len(b.requests) - n for b, n in zip(backends, before, strict=True)) == [0, 3]
    assert all(b.requests for b in backends)
    await server.stop()


async def test_reconfigure_moves_later_calls(backends):
    first, second = backends
    server = ChatModel(base_url=first.url, model="old")
    await server.start()
    await server.responses(ASK)
    server.reconfigure({"base_url": [second.url], "model": "new"})
    await server.responses(ASK)
    assert [body["model"] for body in first.bodies] == ["old"]
    assert [body["model"] for body in second.bodies] == ["new"]
    await server.stop()


async def test_a_request_that_is_no_json(model):
    with pytest.raises(BadRequest, match="JSON"):
        await model.responses({**ASK, "temperature": 2**70})


class Engine(ThreadedServer):
    """Refuses what does not fit its 100 tokens, a limit that it publishes, as vLLM does; a letter is one."""

    def __init__(self, words, answer):
        self.words, self.answer, self.asked = words, answer, set()
        super().__init__({"/{path:.*}": self.handle})

    async def handle(self, request):
        self.asked.add(request.path)
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m", "max_model_len": 100}]})
        body = await request.json()
        count = len(body["messages"][-1]["content"])
        if request.path == "/tokenize":
            return web.json_response({"count": count, "max_model_len": 100, "tokens": [1] * count})
        if count + body.get("max_tokens", 1) > 100:
            return web.json_response({"error": {"message": self.words}}, status=400)
        return web.json_response(self.answer)


KNOWN, UNKNOWN = "This model's maximum context length is 100 tokens.", "Zu lang!"
FITS, IS_FULL = (False, {"/v1/chat/completions"}), (True, {"/v1/chat/completions"})


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        (KNOWN, 50, 10, FITS),
        (KNOWN, 50, 90, FITS),  # the answer may be shorter
        (KNOWN, 100, 10, IS_FULL),
        (KNOWN, 100, None, IS_FULL),
        (UNKNOWN, 50, 10, FITS),
        (UNKNOWN, 50, 90, "bad_request"),
        (UNKNOWN, 100, 10, (True, {"/v1/chat/completions", "/v1/models", "/tokenize"})),
    ],
)
async def test_a_prompt_that_does_not_fit_is_known_by_words_or_by_its_length(completed, streamed, case):
    words, length, limit, outcome = case
    ask = {"input": [{"role": "user", "content": "x" * length}], "max_output_tokens": limit}
    with Engine(words, completed("There")) as engine:
        server = ChatModel(base_url=f"{engine.url}/v1", model="m")
        await server.start()
        try:
            if streamed:
                response = [event async for event in server.stream_responses(ask)][-1]["response"]
            else:
                response = await server.responses(ask)
            found = (response["incomplete_details"] is not None, engine.asked)
        except BadRequest as error:
            found = error.code
        await server.stop()
    assert found == outcome


@pytest.mark.parametrize("status", [200, 400, 500])
async def test_more_than_a_model_can_write_comes_from_a_broken_endpoint(backend, monkeypatch, status):
    monkeypatch.setattr(http_client, "_PAUSE", 0.0)
    server = ChatModel(base_url=backend.url, model="m", max_retries=1, max_answer_mb=1)
    await server.start()
    backend.replies = [(status, b" " * (2**20 + 1))]
    with pytest.raises(Unavailable, match="over 1 MB"):
        await server.responses(ASK)
    assert len(backend.requests) == 2
    await server.stop()

"""Several endpoints of one model, through `chat_model` and real servers."""

import asyncio

import pytest
from support.waiting import until

from gym_serve.deployments import http_client
from gym_serve.deployments.chat_model import ChatModel
from gym_serve.deployments.endpoints import hedged
from gym_serve.deployments.openai_model import OpenAIModel
from gym_serve.observe.catalogue import ENDPOINT_UP, ENDPOINT_WAIT, MODEL_RETRIES
from gym_serve.servers.context import CallContext, use
from gym_serve.types.errors import BadRequest, Overloaded, Unavailable

ASK = {"input": "hi"}
GONE = "http://127.0.0.1:9/v1"


@pytest.fixture
async def model_at(monkeypatch):
    """Makes a started model."""
    monkeypatch.setattr(http_client, "_PAUSE", 0.0)
    servers = []

    async def make(*urls, kind=ChatModel, **settings):
        server = kind(base_url=list(urls), model="m", **settings)
        servers.append(server)
        await server.start()
        return server

    yield make
    for server in servers:
        await server.stop()


async def ask(model, episode):
    with use(CallContext(affinity=str(episode))):
        return await model.responses(ASK)


async def test_a_dead_endpoint_costs_no_attempt(model_at, backends):
    model = await model_at(GONE, *(b.url for b in backends), max_retries=0)
    await asyncio.gather(*(ask(model, i) for i in range(30)))
    assert sum(len(b.requests) for b in backends) == 30
    assert all(b.requests for b in backends)


async def test_openai_model_has_the_same_pool(model_at, backend):
    backend.replies = [{"object": "response", "output": [], "error": None}]
    model = await model_at(GONE, backend.url, kind=OpenAIModel, api_key="k", max_retries=0)
    for i in range(8):
        await ask(model, i)
    assert len(backend.requests) == 8


async def test_an_endpoint_that_only_fails_is_left_alone(model_at, backends):
    ill, well = backends
    ill.replies = [(500, b"boom")]
    model = await model_at(ill.url, well.url, max_retries=6)
    for i in range(40):
        await ask(model, i)
    assert len(ill.requests) == 5
    assert len(well.requests) == 40


@pytest.mark.timeout(60)
async def test_new_episodes_go_where_there_is_least_to_do(model_at, backends):
    busy, idle = backends
    busy.replies = idle.replies = ["hang"]
    model = await model_at(busy.url, idle.url)
    first = asyncio.create_task(ask(model, 0))
    await asyncio.wait(
        [asyncio.create_task(b.waiting.wait()) for b in backends], return_when=asyncio.FIRST_COMPLETED
    )
    if not busy.waiting.is_set():
        busy, idle = idle, busy
    second = asyncio.create_task(ask(model, 1))
    await idle.waiting.wait()
    assert [len(backend.requests) for backend in (busy, idle)] == [1, 1]
    first.cancel()
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)


async def test_a_slow_call_is_made_elsewhere_as_well(model_at, backends, completed):
    slow, quick = backends
    slow.replies, quick.replies = ["hang"], [completed("quick")]
    model = await model_at(slow.url, quick.url, hedge_after=0.05)
    for i in range(60):  # with which endpoint an episode begins depends on their ports
        response = await ask(model, i)
        assert response["output"][0]["content"][0]["text"] == "quick"
        if slow.requests:
            break
    assert slow.requests
    await slow.cancelled.wait()
    assert len(quick.requests) == i + 1


async def test_health_checks_find_a_dead_endpoint_before_any_call(model_at, backend):
    model = await model_at(GONE, backend.url, health_interval=0.05)
    gone, well = model._upstream.pool.endpoints
    await until(lambda: not gone.breaker.allows(0.0))
    assert well.breaker.allows(0.0)


async def test_limits_refuse_what_cannot_begin_in_time(model_at, backend):
    model = await model_at(backend.url, requests_per_minute=1, max_retries=0)
    await ask(model, 1)
    with use(CallContext().within(5.0)), pytest.raises(Overloaded, match="rate limit") as caught:
        await model.responses(ASK)
    assert 50 < caught.value.retry_after <= 60
    assert len(backend.requests) == 1


async def test_limits_let_calls_wait(model_at, backend, completed):
    backend.replies = [completed(usage={"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2})]
    model = await model_at(backend.url, requests_per_minute=6000, tokens_per_minute=60_000)
    for _ in range(3):
        await model.responses({**ASK, "max_output_tokens": 5000})
    (endpoint,) = model._upstream.pool.endpoints
    assert endpoint.limit.begin(0.0, 1.0) == 0.0  # the clock stands: only what was used is gone


async def test_azure(model_at, backend):
    url = backend.url.removesuffix("/v1") + "/openai/deployments/gpt"
    model = await model_at(
        url,
        api_key="k",
        api_key_header="api-key",
        query={"api-version": "2024-10-21"},
        headers={"X-Title": "t"},
    )
    await model.responses(ASK)
    assert backend.requests[0][0] == "/openai/deployments/gpt/chat/completions"
    assert backend.queries == ["api-version=2024-10-21"]
    assert (backend.headers[0]["api-key"], backend.headers[0]["X-Title"]) == ("k", "t")
    assert "Authorization" not in backend.headers[0]


async def test_members_change_live(model_at, backends):
    first, second = backends
    model = await model_at(first.url, GONE)
    await ask(model, 1)
    model.reconfigure({"base_url": [first.url, second.url]})
    for i in range(20):
        await ask(model, i)
    assert len(first.requests) + len(second.requests) == 21
    assert second.requests


async def test_no_call_fails_while_members_and_limits_change(model_at, backends):
    first, second = backends
    model = await model_at(first.url, second.url, max_retries=0)
    limited = {"requests_per_minute": 1e6, "tokens_per_minute": 1e9}
    unlimited = dict.fromkeys(limited)
    calls = []
    for i in range(10):
        for urls, limits in (
            ([first.url], limited),
            ([second.url, GONE], unlimited),
            ([GONE, first.url], limited),
            ([second.url], unlimited),
        ):
            model.reconfigure({"base_url": urls, **limits})
            calls += [asyncio.create_task(ask(model, f"{i} {n}")) for n in range(5)]
            await asyncio.sleep(0)  # they are under way when the next change comes
    await asyncio.gather(*calls)
    assert len(first.requests) + len(second.requests) == 200
    assert first.requests
    assert second.requests


async def test_a_call_under_way_outlives_its_limits(model_at, backend, monkeypatch):
    model = await model_at(backend.url, tokens_per_minute=600, max_retries=0)
    connections = model._upstream._connections
    send = connections.send

    async def sent(endpoint, request):
        answer = await send(endpoint, request)
        model.reconfigure({"tokens_per_minute": None})
        return answer

    monkeypatch.setattr(connections, "send", sent)
    await ask(model, 1)
    await ask(model, 2)
    assert len(backend.requests) == 2


@pytest.mark.parametrize("reply", [(503, b"down"), (429, {}), (400, {"message": "no"}), "drop"])
async def test_calls_that_were_refused_took_no_tokens(model_at, backend, reply):
    backend.replies = [reply]
    model = await model_at(backend.url, tokens_per_minute=600, max_retries=4)
    with use(CallContext().within(30.0)), pytest.raises((BadRequest, Overloaded, Unavailable)):
        await model.responses({**ASK, "max_output_tokens": 40})
    (endpoint,) = model._upstream.pool.endpoints
    assert endpoint.limit.begin(0.0, 60.0) == 0.0


async def test_who_waits_for_a_limit_counts_as_a_call_there(model_at, backends):
    model = await model_at(*(b.url for b in backends), requests_per_minute=1)
    calls = [asyncio.create_task(ask(model, i)) for i in range(10)]
    await until(lambda: sum(e.calls for e in model._upstream.pool.endpoints) == 8)  # two are answered
    assert [e.calls for e in model._upstream.pool.endpoints] == [4, 4]
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert [e.calls for e in model._upstream.pool.endpoints] == [0, 0]


async def raises(error):
    raise error


async def answers(value, after):
    await after.wait()
    return value


async def test_hedging():
    never, now = asyncio.Event(), asyncio.Event()
    now.set()
    assert await hedged(answers(1, now), lambda: raises(AssertionError()), 10.0) == 1
    assert await hedged(answers(1, never), lambda: answers(2, now), 0.0) == 2
    with pytest.raises(Unavailable, match="one"):
        await hedged(raises(Unavailable("one")), lambda: None, 10.0)
    with pytest.raises(BadRequest):
        await hedged(answers(1, never), lambda: raises(BadRequest("no use")), 0.0)


async def test_the_answer_says_which_endpoint_gave_it_and_how_many_failed(model_at, backends):
    """In the notes of the reply, and in the metrics."""
    for metric in (MODEL_RETRIES, ENDPOINT_UP, ENDPOINT_WAIT):
        metric.clear()
    ill, well = backends
    ill.replies = [(500, b"boom")]
    model = await model_at(ill.url, well.url, max_retries=6)
    noted = []
    for episode in range(40):
        context = CallContext(affinity=str(episode))
        with use(context):
            await model.responses(ASK)
        noted.append(context.notes)
    assert {notes["endpoint"] for notes in noted} == {well.url}
    retries_ = sum(notes.get("retries", 0) for notes in noted)
    assert retries_ == len(ill.requests) > 0
    assert [(p.labels, p.value) for p in MODEL_RETRIES.points()] == [
        ({"model": model.name, "endpoint": ill.url, "reason": "unavailable"}, retries_)
    ]
    model.observe()
    up = {point.labels["endpoint"]: point.value for point in ENDPOINT_UP.points()}
    assert up == {ill.url: 0, well.url: 1}
    well.replies = [(429, b"daily quota", {"Retry-After": "86400"})]
    with pytest.raises(Overloaded, match="daily quota"):
        await model.responses(ASK)
    model.reconfigure({"base_url": well.url})
    model.observe()
    assert {point.labels["endpoint"] for point in ENDPOINT_UP.points()} == {well.url}
    [wait] = ENDPOINT_WAIT.points()
    assert (wait.labels["endpoint"], wait.value) == (well.url, pytest.approx(86400, abs=60))

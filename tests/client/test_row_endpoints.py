"""The endpoint of a row's model (`_ng_model`): who may name one, where calls go, and where no key is."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from support.upstream import ChatEndpoint

from gym_serve import Gym, InvalidRequest, OperatorError
from gym_serve.servers.transport import Call, encode
from gym_serve.transports import HttpTransport
from gym_serve.types.errors import EndpointMisconfigured
from gym_serve.types.model_endpoint import ModelEndpoint, public_row

KEY = "sk-of-the-row-1234567890"
OWN = "sk-of-the-server-0987654321"


class Watched(ChatEndpoint):
    """Keeps the headers, and can repeat the key in a refusal."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.keys: list[str | None] = []
        self.echoes = False

    async def _complete(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("authorization"))
        if self.echoes:
            said = f"wrong key {request.headers.get('authorization')}, {request.headers.get('x-lease')}"
            return web.json_response({"error": {"message": said}}, status=500)
        return await super()._complete(request)


@pytest.fixture
def endpoints() -> Iterator[tuple[Watched, Watched]]:
    with Watched("own") as own, Watched("row") as named:
        yield own, named


def graph(own: ChatEndpoint, **settings: Any) -> dict[str, Any]:
    model = {"base_url": own.url, "model": "m", "api_key": OWN, "max_retries": 0}
    return {
        "models": {
            "policy": {"type": "chat_model", **model, **settings},
            "scripted": {"type": "scripted_model"},
        },
        "resources": {"mcqa": {"type": "mcqa"}},
        "agents": {
            "agent": {"type": "simple_agent", "model": "policy", "resources": "mcqa"},
            "other": {"type": "simple_agent", "model": "scripted", "resources": "mcqa"},
        },
    }


def row(**fields: Any) -> dict[str, Any]:
    options = [{"A": "one"}, {"B": "two"}]
    asked = {"prompt": "Which?", "options": options, "expected_answer": "A"}
    return {**asked, "agent_ref": {"name": "agent"}, **fields}


def named(endpoint: ChatEndpoint, **fields: Any) -> dict[str, Any]:
    return {"base_url": endpoint.url, "api_key": KEY, "model": "lease-7", **fields}


def text_of(rollout: Any) -> str:
    return str(rollout["response"]["output"][-1]["content"][0]["text"])


def test_calls_go_where_the_row_says_with_its_key_alone(endpoints: tuple[Watched, Watched]) -> None:
    own, other = endpoints
    with Gym.from_graph(graph(own, row_endpoints=True), ray=False) as gym:
        first, second = gym.run([row(), row(_ng_model=named(other, headers={"X-Lease": "a-lease-of-42"}))])
    assert (text_of(first), text_of(second)) == ("own", "row")
    assert own.keys == [f"Bearer {OWN}"]
    assert other.keys == [f"Bearer {KEY}"]
    assert other.requests[0]["model"] == "lease-7"
    assert second["_ng_model"] == {"base_url": other.url, "model": "lease-7"}
    assert "_ng_model" not in first
    assert KEY not in json.dumps(second)
    assert "a-lease-of-42" not in json.dumps(second)
    assert first.task_index == second.task_index  # the endpoint is no part of the task


def test_an_endpoint_for_all_rows_and_one_of_its_own_for_a_row(endpoints: tuple[Watched, Watched]) -> None:
    own, other = endpoints
    with Watched("third") as third, Gym.from_graph(graph(own, row_endpoints=True), ray=False) as gym:
        rows = [row(), row(_ng_model={"base_url": third.url})]
        found = gym.run(rows, endpoint=named(other))
    assert [text_of(rollout) for rollout in found] == ["row", "third"]
    assert third.keys == [None]  # no key is sent but the row's, and it has none


def test_by_default_no_row_moves_a_call(endpoints: tuple[Watched, Watched]) -> None:
    own, other = endpoints
    with Gym.from_graph(graph(own), ray=False) as gym, pytest.raises(OperatorError, match="row_endpoints"):
        gym.run([row(_ng_model=named(other))] * 8)
    assert not own.requests
    assert not other.requests


def test_only_hosts_that_are_allowed(endpoints: tuple[Watched, Watched]) -> None:
    own, other = endpoints
    host = other.url.removeprefix("http://").removesuffix("/v1")
    with Gym.from_graph(graph(own, row_endpoints=[host]), ray=False) as gym:
        good, bad = gym.run([row(_ng_model=named(other)), row(_ng_model=named(own))])
    assert text_of(good) == "row"
    assert bad.failure
    assert bad.failure["kind"] == "bad_request"
    assert not bad.failure["retryable"]
    assert not own.requests


def test_a_model_that_cannot_says_so(endpoints: tuple[Watched, Watched]) -> None:
    own, other = endpoints
    with (
        Gym.from_graph(graph(own, row_endpoints=True), ray=False) as gym,
        pytest.raises(OperatorError, match="scripted cannot use the endpoint"),
    ):
        gym.run([row(_ng_model=named(other))] * 8, agent="other")


def test_a_row_over_http_names_none_unless_that_is_allowed(endpoints: tuple[Watched, Watched]) -> None:
    own, other = endpoints
    asked = row(_ng_model=named(other))
    with Gym.from_graph(graph(own, row_endpoints=True), ray=False) as gym:  # `call` is what the gateway does
        refused = gym.call("agent", "run", asked)
    assert "over HTTP" in refused["failure"]["detail"]
    assert KEY not in json.dumps(refused)
    assert not own.requests
    assert not other.requests
    settings = {"row_endpoints": True, "row_endpoints_over_http": True}
    with Gym.from_graph(graph(own, **settings), ray=False) as gym:
        allowed = gym.call("agent", "run", asked)
    assert text_of(allowed) == "row"
    assert KEY not in json.dumps(allowed)


def test_a_dead_endpoint_of_a_row_is_not_replaced_by_the_servers_own(
    endpoints: tuple[Watched, Watched],
) -> None:
    own, _ = endpoints
    asked = row(_ng_model={"base_url": "http://127.0.0.1:9/v1", "api_key": KEY})
    with Gym.from_graph(graph(own, row_endpoints=True, hedge_after=0.01), ray=False) as gym:
        (rollout,) = gym.run([asked])
    assert rollout.failure
    assert rollout.failure["retryable"]
    assert not own.requests
    assert KEY not in json.dumps(rollout)


def test_the_key_is_in_no_failure_no_file_and_no_log(
    endpoints: tuple[Watched, Watched], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own, other = endpoints
    other.echoes = True
    caplog.set_level(logging.DEBUG)
    endpoint = named(other, headers={"X-Lease": "a-lease-of-42"})
    with Gym.from_graph(graph(own, row_endpoints=True), ray=False) as gym:
        (failed,) = gym.run([row(_ng_model=endpoint)])
        report = gym.collect([row()], tmp_path / "out.jsonl", endpoint=endpoint, attempts=1)
        other.echoes = False
        gym.collect([row()], tmp_path / "well.jsonl", endpoint=endpoint)
    assert failed.failure
    assert "wrong key" in failed.failure["detail"]
    assert report.progress.failed == 1
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir() if path.is_file())
    assert other.url.encode() in written
    for text in (json.dumps(failed), written.decode(), caplog.text, repr(ModelEndpoint.read(endpoint))):
        assert KEY not in text
        assert "a-lease-of-42" not in text


def test_files_hold_no_key_so_rows_with_one_are_not_collected(
    endpoints: tuple[Watched, Watched], tmp_path: Path
) -> None:
    own, other = endpoints
    with Gym.from_graph(graph(own, row_endpoints=True), ray=False) as gym:
        with pytest.raises(InvalidRequest, match="endpoint=") as caught:
            gym.collect([row(_ng_model=named(other))], tmp_path / "out.jsonl")
        bare = row(_ng_model={"base_url": other.url})
        gym.collect([bare], tmp_path / "bare.jsonl")
    assert KEY not in str(caught.value)
    assert len(other.requests) == 1


def test_groups_and_examples_keep_the_key_to_themselves(endpoints: tuple[Watched, Watched]) -> None:
    own, other = endpoints

    async def both(gym: Gym) -> tuple[Any, Any]:
        asked = row(_ng_model=named(other))
        groups = [group async for group in gym.groups([asked], size=2)]
        return groups[0].rollouts, [await pair for pair in gym.run_examples([asked])]

    with Gym.from_graph(graph(own, row_endpoints=True), ray=False) as gym:
        rollouts, pairs = asyncio.run(both(gym))
    assert len(rollouts) == 2
    assert KEY not in json.dumps(rollouts)
    assert KEY not in json.dumps(pairs)
    assert len(other.requests) == 3
    assert not own.requests


def test_a_capture_asks_the_endpoint_of_its_rollout(endpoints: tuple[Watched, Watched]) -> None:
    from gym_serve.deployments.chat_model import ChatModel
    from gym_serve.servers.runner import ServerRunner

    own, other = endpoints

    async def captured() -> Any:
        model = ChatModel(base_url=own.url, model="m", api_key=OWN, row_endpoints=True)
        runner = ServerRunner(model)
        await runner.start()
        try:
            opened = await runner.dispatch(Call("rollouts", b"{}", endpoint=ModelEndpoint.read(named(other))))
            body = encode({"model": "x", "messages": [{"role": "user", "content": "hi"}]})
            # The harness's own request: it comes through the gateway, without any endpoint.
            answer = await runner.dispatch(Call("rollouts/v1/chat/completions", body, opened.session))
            held = await runner.dispatch(Call("rollouts/trajectories", b"", opened.session))
        finally:
            await runner.stop()
        return answer.json(), held.body.decode()

    answer, held = asyncio.run(captured())
    assert answer["choices"][0]["message"]["content"] == "row"
    assert other.keys == [f"Bearer {KEY}"]
    assert not own.requests
    assert KEY not in held
    assert KEY not in json.dumps(answer)


async def test_another_graph_gets_it_with_the_row_and_a_model_by_url_never() -> None:
    received: list[Any] = []

    async def run(request: web.Request) -> web.Response:
        received.append(await request.json())
        return web.json_response({**received[-1], "reward": 1.0})

    app = web.Application()
    app.router.add_post("/agent/run", run)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    transport = HttpTransport("agent", f"http://127.0.0.1:{runner.addresses[0][1]}/agent")
    endpoint = ModelEndpoint.read({"base_url": "http://10.0.0.7/v1", "api_key": KEY})
    try:
        reply = await transport.call(Call("run", encode(row()), endpoint=endpoint))
        with pytest.raises(EndpointMisconfigured, match="http"):
            await transport.call(Call("v1/responses", b"{}", endpoint=endpoint))
    finally:
        await transport.close()
        await runner.cleanup()
    assert received[0]["_ng_model"]["api_key"] == KEY  # it makes the model calls
    assert KEY.encode() not in reply.body  # and sent the row back


@pytest.mark.parametrize(
    "wrong",
    [
        "http://host/v1",
        {"model": KEY},
        {"base_url": f"http://{KEY}@host/v1"},
        {"base_url": f"http://host/v1?key={KEY}"},
        {"base_url": "file:///etc/passwd"},
        {"base_url": "http://host/v1", "api_key": f"{KEY}\r\nX-Evil: 1"},
        {"base_url": "http://host/v1", "headers": {"Host": "internal"}},
        {"base_url": "http://host/v1", "headers": {"X-A": f"{KEY}\n"}},
        {"base_url": "http://host/v1", "headers": {"X A": "b"}},
        {"base_url": "http://host/v1", "key": KEY},
    ],
)
def test_what_is_no_endpoint_is_refused_without_being_repeated(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="_ng_model") as caught:
        ModelEndpoint.read(wrong)
    assert KEY not in str(caught.value)


@given(
    st.dictionaries(st.sampled_from(["base_url", "model", "api_key", "headers", "x"]), st.text() | st.none())
)
def test_public_rows_never_hold_a_key(given_: dict[str, Any]) -> None:
    shown = public_row({"_ng_model": given_})["_ng_model"]
    assert shown is None or shown.keys() <= {"base_url", "model"}

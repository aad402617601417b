"""`remote_agent` over real HTTP: what it sends, whose word counts, and everything that can go wrong."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support.quirks import REFUSALS

from gym_serve import (
    EnvironmentClient,
    GymError,
    InvalidRequest,
    ResourcesServer,
    ServerRunner,
    Verdict,
    VerifyRequest,
    tool,
)
from gym_serve.deployments.remote_agent import RemoteAgent, rollout_of
from gym_serve.servers.transport import Call
from gym_serve.transports import InlineTransport
from gym_serve.types.errors import LONGEST_WAIT
from gym_serve.types.model_endpoint import ModelEndpoint

ROW: dict[str, Any] = {
    "responses_create_params": {"input": "go"},
    "verifier_metadata": {"wanted": 2},
    "agent_ref": {"name": "agent"},
    "_ng_rollout_id": "3-1",
}
MESSAGE = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello"}]}
TOKENS = {"prompt_token_ids": [1], "generation_token_ids": [2, 3], "generation_log_probs": [-0.5, 0]}
RESPONSE = {"id": "r", "output": [{**MESSAGE, **TOKENS}]}
ANSWER = {"reward": 0.5, "response": RESPONSE, "mine": 1}


class Bells(ResourcesServer):
    closed = rung = 0

    @tool
    async def ring(self) -> int:
        self.rung += 1
        return self.rung

    async def verify(self, request: VerifyRequest) -> Verdict:
        return Verdict(reward=float(self.rung == request.verifier_metadata["wanted"]))  # type: ignore[attr-defined]

    async def close(self, session: Any) -> None:
        self.closed += 1


@contextlib.asynccontextmanager
async def remote(url: str, env: Bells | None = None, **options: Any) -> AsyncIterator[RemoteAgent]:
    if env is not None:
        options |= {
            "protocol": "responses",
            "resources": EnvironmentClient(InlineTransport(ServerRunner(env))),
        }
    agent = RemoteAgent(name="agent", url=url, **options)
    await agent.start()
    try:
        yield agent
    finally:
        await agent.stop()


async def run(backend: Any, row: Any = ROW, **options: Any) -> dict[str, Any]:
    async with remote(backend.url, **options) as agent:
        return await agent.run(row)


async def test_a_row_goes_out_and_a_rollout_comes_back(backend: Any) -> None:
    backend.replies = [{**ROW, **ANSWER, "reward_components": {"a": 0.5}}]
    rollout = await run(backend, headers={"Authorization": "Bearer t-1"})
    assert rollout == {**ROW, **ANSWER, "reward_components": {"a": 0.5}}
    assert backend.requests == [("/v1/run", ROW)]
    assert backend.headers[0]["Authorization"] == "Bearer t-1"
    assert backend.headers[0]["X-Session-Affinity"] == "3-1"


async def test_the_agent_is_told_the_span_of_the_episode(backend: Any) -> None:
    backend.replies = [{**ROW, **ANSWER}]
    span = f"00-{'a' * 32}-{'b' * 16}-01"
    async with remote(backend.url) as agent:
        await ServerRunner(agent).dispatch(Call("run", orjson.dumps(ROW), traceparent=span))
    assert backend.headers[0]["traceparent"] == span  # this process records none of its own


async def test_the_endpoint_of_a_row_goes_to_an_agent_that_may_have_it(backend: Any) -> None:
    lease = {"base_url": "http://10.0.0.7/v1", "api_key": "sk-1234567890"}
    backend.replies = [{**ANSWER, "_ng_model": lease, "mine": "sk-1234567890"}]
    call = Call("run", orjson.dumps(ROW), endpoint=ModelEndpoint.read(lease))
    foreign = Call("run", orjson.dumps({**ROW, "_ng_model": lease}))
    found = []
    for allowed, each in ((False, call), (True, foreign), (True, call)):
        async with remote(backend.url, row_endpoints=allowed) as agent:
            found.append(orjson.loads((await ServerRunner(agent).dispatch(each)).body))
    refused, over_http, sent = found
    assert refused["error"]["code"] == "endpoint_misconfigured"
    assert "over HTTP" in over_http["failure"]["detail"]
    assert [body["_ng_model"]["api_key"] for body in backend.bodies] == ["sk-1234567890"]
    assert sent["_ng_model"] == {"base_url": "http://10.0.0.7/v1"}
    assert b"sk-1234567890" not in orjson.dumps(found)


async def test_the_row_and_the_metadata_are_the_graphs(backend: Any) -> None:
    hostile = {
        "agent_ref": {"name": "other"},
        "_ng_rollout_id": "0-0",
        "_ng_task_index": 99,
        "responses_create_params": 7,
    }
    backend.replies = [{**ANSWER, **hostile}]
    assert await run(backend) == {**ROW, **ANSWER}


async def test_what_an_earlier_run_left_in_a_row_is_not_sent_and_not_believed(backend: Any) -> None:
    stale = {"reward": 1.0, "response": {}, "_ng_failure_class": "x", "failure": {}, "mask_sample": True}
    backend.replies = [ANSWER]
    assert await run(backend, {**ROW, **stale}) == {**ROW, **ANSWER}
    assert backend.bodies == [ROW]


@pytest.mark.parametrize(
    ("answer", "kind", "detail"),
    [
        (b"<html>", "unavailable", "must answer JSON"),
        ([1], "unavailable", "must answer a JSON object"),
        ({"reward": 1.0}, "unavailable", "did not answer a Response object"),
        ({**ANSWER, "response": {"output": ["x"]}}, "unavailable", "did not answer a Response object"),
        ({**ANSWER, "response": {"output": [{"type": 3}]}}, "unavailable", "type must be a string, got 3"),
        ({"response": RESPONSE}, "unavailable", "`reward` must be a finite number"),
        ({**ANSWER, "reward": "1.0"}, "unavailable", "`reward` must be a finite number"),
        ({**ANSWER, "reward": True}, "unavailable", "`reward` must be a finite number"),
        (b'{"response":{"output":[]},"reward":1e999}', "unavailable", "must answer JSON"),
        ({**ANSWER, "reward_components": [1]}, "unavailable", "reward_components"),
        ({**ANSWER, "reward_components": {"a": None}}, "unavailable", "reward_components.a"),
        (
            {**ANSWER, "response": {"output": [{**MESSAGE, "generation_token_ids": [1]}]}},
            "unavailable",
            "prompt_token_ids is not a list",
        ),
        (
            b'{"response":{"output":[]},"reward":1,"x":' + b"[" * 500 + b"]" * 500 + b"}",
            "unavailable",
            "nested",
        ),
        (b"[" * 100_000, "unavailable", "must answer JSON"),
        (b'"' + b"x" * (1 << 20) + b'"', "unavailable", "more than 1048576 bytes"),
        ("drop", "unavailable", "broke off"),
        ("hang", "episode_timeout", "in time"),
        ((500, {"error": "oops"}), "unavailable", "oops"),
        ((422, {"detail": "no such row"}), "bad_request", "no such row"),
        ((401, b"who?"), "endpoint_access_denied", "who?"),
        ((404, b"where?"), "endpoint_misconfigured", "where?"),
        ((307, b"", {"Location": "http://169.254.169.254/"}), "endpoint_misconfigured", "169.254.169.254"),
        ((400, {"error": {"code": {"a": []}, "message": [1]}}), "bad_request", "HTTP 400"),
        ((503, {"error": {"code": "session_lost", "message": "gone", "stage": [1]}}), "session_lost", "gone"),
    ],
)
async def test_answers_that_are_no_rollout(backend: Any, answer: Any, kind: str, detail: str) -> None:
    backend.replies = [answer]
    limit = 0.3 if answer == "hang" else 60.0
    rollout = await run(backend, episode_timeout=limit, max_answer_mb=1)
    failure = rollout["failure"]
    assert failure["kind"] == kind
    assert detail in failure["detail"]
    assert (failure["stage"], failure["server"]) == ("episode", "agent")
    assert rollout["mask_sample"] is True
    assert ROW.items() <= rollout.items()


async def test_refusals_mean_what_they_mean_of_a_model(backend: Any) -> None:
    async with remote(backend.url) as agent:
        for status, body, error in REFUSALS:
            backend.replies = [(status, body.encode() if isinstance(body, str) else body)]
            failure = (await agent.run(ROW))["failure"]
            assert failure["kind"] == error.code, (status, body, failure)


async def test_nobody_is_there() -> None:
    async with remote("http://127.0.0.1:9") as agent:
        rollout = await agent.run(ROW)
    assert "no connection" in rollout["failure"]["detail"]
    assert rollout["failure"]["retryable"] is True


@pytest.mark.parametrize(
    ("reply", "seconds"),
    [
        ((429, {}, {"Retry-After": "7"}), 7.0),
        ((503, {}, {"Retry-After": "1e9"}), LONGEST_WAIT),
        ((503, {}, {"Retry-After": "soon"}), None),
        ((429, {"error": {"code": "overloaded", "message": "busy", "retry_after": 3}}), 3.0),
        ({"_ng_failure_class": "overloaded", "failure": {"retry_after": 4}}, 4.0),
    ],
)
async def test_how_long_to_wait(backend: Any, reply: Any, seconds: float | None) -> None:
    backend.replies = [reply]
    assert (await run(backend))["failure"].get("retry_after") == seconds


async def test_a_secret_that_the_agent_repeats_is_not_shown(backend: Any) -> None:
    backend.replies = [(400, {"error": {"message": "bad key s3cret"}})]
    rollout = await run(backend, headers={"X-Key": "s3cret"})
    assert "bad key ***" in rollout["failure"]["detail"]


@pytest.mark.parametrize(
    ("answer", "kind", "stage", "terminal"),
    [
        (
            {
                "_ng_failure_class": "verify_timeout",
                "failure": {"stage": "verify", "detail": "slow"},
                "reward": 0.0,
            },
            "verify_timeout",
            "verify",
            False,
        ),
        ({"_ng_failure_class": "remote_agent_error", "error": "slow"}, "unavailable", "episode", False),
        (
            {"_ng_failure_class": "x", "_ng_failure_terminal": True, "error": "slow"},
            "bad_request",
            "episode",
            True,
        ),
        (
            {"_ng_failure_class": "verifier_failed", "failure": {"detail": "slow", "stage": "verify"}},
            "verifier_failed",
            "verify",
            False,
        ),
        (
            {"_ng_failure_class": ["slow"], "failure": {"stage": {}, "retry_after": "x"}},
            "unavailable",
            "episode",
            False,
        ),
    ],
)
async def test_a_failure_that_the_agent_reports(
    backend: Any, answer: Any, kind: str, stage: str, terminal: bool
) -> None:
    backend.replies = [answer]
    rollout = await run(backend)
    assert (rollout["_ng_failure_class"], rollout["failure"]["stage"]) == (kind, stage)
    assert rollout["_ng_failure_terminal"] is terminal
    assert "slow" in rollout["failure"]["detail"]


async def test_cancelling_closes_the_request(backend: Any) -> None:
    backend.replies = ["hang"]
    async with remote(backend.url) as agent:
        task = asyncio.create_task(agent.run(ROW))
        await backend.waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await backend.cancelled.wait()


async def test_it_can_stand_where_a_model_does_and_gives_its_metrics(backend: Any) -> None:
    backend.replies = [RESPONSE, {"output": 1}, {"agent_metrics": {}}, [1]]
    async with remote(backend.url) as agent:
        assert await agent.responses({"input": "go"}) == RESPONSE
        with pytest.raises(GymError, match="did not answer a Response"):
            await agent.responses({"input": "go"})
        aggregate = agent.operations()["aggregate_metrics"].handler
        assert await aggregate({"verify_responses": []}) == {"agent_metrics": {}}
        with pytest.raises(GymError, match="must answer its metrics"):
            await aggregate({"verify_responses": []})
        with pytest.raises(InvalidRequest):
            await agent.run({})
    assert [path for path, _ in backend.requests][1:] == ["/v1/v1/responses"] + ["/v1/aggregate_metrics"] * 2


def called(call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "ring", "arguments": "{}"}


async def test_its_open_calls_are_run_here_and_the_rewards_are_this_graphs(backend: Any) -> None:
    own = {"type": "function_call_output", "call_id": "own", "output": "from within"}
    turns = [[called("a"), called("own"), own], [called("b")], [{**MESSAGE, **TOKENS}]]
    backend.replies = [{"id": "r", "output": turn} for turn in turns]
    backend.replies[0] = (200, backend.replies[0], {"Set-Cookie": "seat=7; Path=/"})
    env = Bells()
    rollout = await run(backend, env=env)
    assert (rollout["reward"], env.rung, env.closed) == (1.0, 2, 1)
    assert [item.get("call_id") for item in rollout["response"]["output"]] == [
        "a",
        "own",
        "own",
        "a",
        "b",
        "b",
        None,
    ]
    # Its cookies come back to it; the row's answer does not reach it.
    assert [headers.get("Cookie") for headers in backend.headers] == [None, "seat=7", "seat=7"]
    assert all("verifier_metadata" not in body for body in backend.bodies)
    assert backend.bodies[1]["input"] == [
        {"role": "user", "content": "go"},
        *rollout["response"]["output"][:4],
    ]


async def test_calls_with_ids_that_are_none_are_no_calls(backend: Any) -> None:
    backend.replies = [{"id": "r", "output": [{**called("a"), "call_id": ["a"]}]}]
    env = Bells()
    assert (await run(backend, env=env))["failure"]["kind"] == "unavailable"
    assert (env.rung, env.closed) == (0, 1)


async def test_a_rollout_of_any_name_is_sent(backend: Any) -> None:
    backend.replies = [ANSWER]
    assert (await run(backend, row={**ROW, "_ng_rollout_id": "日\r\nX-Other: 1"}))["reward"] == 0.5
    assert backend.headers[0]["X-Session-Affinity"] == "%E6%97%A5%0D%0AX-Other:%201"


@pytest.mark.parametrize(
    ("reply", "kind"),
    [("hang", "model_timeout"), ({"output": [1]}, "unavailable"), ((429, {}), "overloaded")],
)
async def test_a_turn_that_fails(backend: Any, reply: Any, kind: str) -> None:
    backend.replies = [reply]
    env = Bells()
    rollout = await run(backend, env=env, model_timeout=0.3 if reply == "hang" else 60.0)
    assert (rollout["failure"]["kind"], rollout["failure"]["stage"]) == (kind, "model")
    assert env.closed == 1


@pytest.mark.parametrize(
    "url", ["ftp://x", "http://", "http://u:p@x", "http://x/?a=1", "http://x#a", "http://x y", ""]
)
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ValidationError):
        RemoteAgent(url=url)


def test_what_the_protocols_need() -> None:
    assert RemoteAgent(url="https://x.example/agents/a/").config.url == "https://x.example/agents/a"
    with pytest.raises(ValidationError, match="needs resources"):
        RemoteAgent(url="http://x", protocol="responses")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
keys = st.sampled_from(
    [
        "reward",
        "response",
        "output",
        "failure",
        "error",
        "type",
        "_ng_failure_class",
        "reward_components",
        "prompt_token_ids",
        "generation_token_ids",
        "generation_log_probs",
    ]
)
answers = st.recursive(
    json_values,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=6),
    max_leaves=20,
)


@pytest.mark.thorough
@settings(deadline=None, max_examples=300)
@given(answers | st.dictionaries(keys, answers))
def test_whatever_it_answers_is_a_rollout_or_a_failure(answer: Any) -> None:
    try:
        rollout = rollout_of(ROW, answer)
    except GymError:
        return
    assert ROW.items() <= rollout.items()
    assert isinstance(rollout["reward"], int | float)
    orjson.dumps(rollout)

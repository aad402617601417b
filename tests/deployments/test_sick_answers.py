"""A sick endpoint: what it answers with status 200 is a failure to try again, and never scored."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import orjson
import pytest

from gym_serve import (
    AgentClient,
    EnvironmentClient,
    ModelClient,
    ResourcesServer,
    ServerRunner,
    Verdict,
    VerifyRequest,
)
from gym_serve.deployments import http_client
from gym_serve.deployments.chat_model import ChatModel
from gym_serve.deployments.openai_model import OpenAIModel
from gym_serve.deployments.pooling_model import PoolingModel
from gym_serve.deployments.simple_agent import SimpleAgent
from gym_serve.judging import JudgeCalls, label_of
from gym_serve.transports import InlineTransport
from gym_serve.types.errors import BadRequest, EndpointMisconfigured, Unavailable

JSON = dict[str, Any]

ASK = {"input": [{"role": "user", "content": "hi"}]}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
HEAD = {"id": "x", "object": "chat.completion", "created": 1, "model": "m"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ENTRY = {"token": "token_id:3", "logprob": -0.5}
TOKENS = {"token_ids": [3], "logprobs": {"content": [ENTRY]}}
BUNDLE = {"prompt_token_ids": [1], "generation_token_ids": [3], "generation_log_probs": [-0.5]}

NAN = b'{"object": "chat.completion", "choices": [{"message": {"content": "Hello"}}], "usage": {"cost": NaN}}'

# Of a chat completion: sick messages, choices and whole answers.
MESSAGES: list[Any] = [
    *(None, [], "Hello", {}, {"answer": "Hello"}),
    *(
        {"content": content}
        for content in (5, True, {"text": "Hello"}, ["Hello"], [None], [{"text": "Hello"}])
    ),
    {"content": [{"type": "text", "text": 5}]},
    *(
        {"content": "Hello", **more}
        for more in ({"refusal": 5}, {"reasoning_content": {}}, {"reasoning": ["Hm"]})
    ),
    *(
        {"content": None, "tool_calls": calls}
        for calls in ("x", {}, [None], ["x"], [[]], [{}], [{"id": "c2"}])
    ),
    *({"content": None, "tool_calls": [{**CALL, **wrong}]} for wrong in ({"id": 5}, {"function": "f"})),
    {"content": None, "tool_calls": [CALL, None]},
]
CHOICES: list[Any] = [
    *(None, "Hello", [], {}, {"text": "Hello", "finish_reason": "stop"}),
    *({"message": message, "finish_reason": "stop"} for message in MESSAGES),
    *({"message": {"content": "Hello"}, "finish_reason": end} for end in (5, ["stop"], "abort", "error")),
    *(
        {"message": {"content": "Hello"}, "finish_reason": "stop", "logprobs": logprobs}
        for logprobs in ("x", {"content": {}}, {"content": [None]})
    ),
]
COMPLETIONS: list[Any] = [
    *(None, False, 0, "Hello", [], {}, {"choices": None}, {"choices": {}}, {"choices": []}),
    {"error": {"code": 502, "message": "Provider returned error"}},
    {"detail": "Internal error"},
    *({**HEAD, "choices": [choice]} for choice in CHOICES),
    {**HEAD, "choices": [{"message": {"content": "Hello"}, "finish_reason": "stop"}, None]},
    *(b"", b"<html>busy</html>", b'{"choices": [', b"[" * 100_000, NAN),
]

# Tokens that contradict one another, where they are asked for.
TOKEN_CHOICES: list[JSON] = [
    *({"token_ids": tokens} for tokens in ([3, 4], [], "3", [-1], [True], ["3"], [3.0])),
    {"logprobs": {"content": [ENTRY, ENTRY]}},
    *(
        {"logprobs": {"content": [{"token": "a", **more}]}}
        for more in ({}, {"logprob": None}, {"logprob": True})
    ),
]

# Deltas of a chat stream; the rest of a chunk is sick in the same ways as a choice.
DELTAS: list[Any] = [
    *("Hello", [], 5, {"content": 5}, {"content": ["Hello"]}, {"refusal": 5}, {"reasoning_content": 5}),
    *({"tool_calls": calls} for calls in ("x", {}, [None], ["x"], [{**CALL, "index": "0"}])),
    *(
        {"tool_calls": [{**CALL, "function": function}]}
        for function in ("f", {"name": 5}, {"name": "f", "arguments": {}})
    ),
]
CHUNKS: list[Any] = [
    *(None, 5, "Hello", [], {}, {"choices": None}, {"choices": "x"}, {"error": {"message": "gone"}}),
    *({"choices": [choice]} for choice in (None, "x", {"index": "0", "delta": {"content": "Hello"}})),
    *({"choices": [{"index": 0, "delta": {}, "finish_reason": end}]} for end in (5, "error", "abort")),
    {"choices": [{"index": 0, "delta": {}, "logprobs": "x"}]},
    *({"choices": [{"index": 0, "delta": delta}]} for delta in DELTAS),
]

MESSAGE = {"id": "msg", "type": "message", "role": "assistant", "status": "completed"}
TEXT = {"type": "output_text", "text": "Hello", "annotations": []}
SOUND = [{**MESSAGE, "content": [TEXT]}]
ITEMS: list[Any] = [
    *(None, "Hello", [], {"type": 5}, {"type": None}),
    *({**MESSAGE, "content": content} for content in (None, 5, {}, [None], ["Hello"], [{"text": "Hello"}])),
    {**MESSAGE, "content": [{"type": "output_text", "text": 5}]},
    {**MESSAGE, "content": [{"type": "refusal", "refusal": []}]},
    {"type": "message", "content": [TEXT]},
    {**MESSAGE, "role": 5, "content": [TEXT]},
    {"type": "function_call"},
    *(
        {"type": "function_call", "name": "f", **call}
        for call in (
            {"call_id": "c", "arguments": None},
            {"call_id": "c", "arguments": {"a": 1}},
            {"call_id": 5, "arguments": "{}"},
            {"arguments": "{}"},
        )
    ),
    *({"type": "reasoning", "summary": s} for s in ("Hm", [None], [{"type": "summary_text", "text": 5}])),
    *({"type": "reasoning", "summary": [], **more} for more in ({"content": 5}, {"encrypted_content": 5})),
    *(
        {**SOUND[0], **BUNDLE, **wrong}
        for wrong in (
            {"generation_token_ids": [3, 4]},
            {"generation_log_probs": None},
            {"generation_log_probs": ["x"]},
            {"prompt_token_ids": "x"},
        )
    ),
]
RESPONSES: list[Any] = [
    *(None, False, "Hello", [], {}, {"output": None}, {"output": {}}, {"output": "Hello"}),
    *({"id": "r", "status": "completed", "output": [item]} for item in ITEMS),
    *({"output": SOUND, "error": error} for error in ("boom", {"code": "server_error", "message": "boom"})),
    *({"output": SOUND, "status": status} for status in ("failed", "cancelled", "in_progress", 5)),
    {"output": SOUND, "incomplete_details": "x"},
    *(b"", b"<html>busy</html>", b'{"output": ['),
]
EVENTS: list[Any] = [
    *(None, 5, "Hello", [], {}, {"type": 5}, {"type": []}),
    {"type": "error", "code": "server_error", "message": "boom"},
    {"type": "response.failed", "response": {"error": {"code": "server_error", "message": "boom"}}},
    *({"type": f"response.{kind}", "response": {}} for kind in ("failed", "created")),
    {"type": "response.completed"},
    *({"type": "response.completed", "response": r} for r in RESPONSES if not isinstance(r, bytes)),
]


def stream(*events: Any) -> tuple[int, bytes, dict[str, str]]:
    data = b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    return 200, data, {"Content-Type": "text/event-stream"}


def named(answers: list[Any]) -> Any:
    return pytest.mark.parametrize("answer", answers, ids=lambda answer: str(answer)[:60])


async def last_of(events: AsyncIterator[JSON]) -> JSON:
    *_, last = [event async for event in events]
    return last


@pytest.fixture
async def ask(backend: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Asks a model in front of the backend, with a method and a body, streamed or not."""
    monkeypatch.setattr(http_client, "_PAUSE", 0.0)
    started = []

    async def ask(kind: type[Any], method: str, body: JSON, *, streamed: bool, **settings: Any) -> Any:
        server = kind(base_url=backend.url, model="m", api_key="k", max_retries=0, **settings)
        await server.start()
        started.append(server)
        asked = getattr(server, f"stream_{'chat' if 'chat' in method else method}" if streamed else method)
        return await (last_of(asked(body)) if streamed else asked(body))

    yield ask
    for server in started:
        await server.stop()


Ask = Callable[..., Awaitable[Any]]


async def refused(asking: Awaitable[Any]) -> None:
    with pytest.raises(Unavailable) as caught:
        await asking
    assert caught.value.retryable


async def test_the_place_that_is_no_json_is_told(ask: Ask, backend: Any) -> None:
    backend.replies = [(200, NAN)]
    told = r"answered what is no JSON: b'.{0,30}NaN\}\}' \(unexpected character"
    with pytest.raises(Unavailable, match=told):
        await ask(ChatModel, "responses", ASK, streamed=False)


@named(COMPLETIONS)
@pytest.mark.parametrize("streamed", [False, True])
async def test_completions(ask: Ask, backend: Any, answer: Any, streamed: bool) -> None:
    backend.replies = [(200, answer)]
    await refused(ask(ChatModel, "responses", ASK, streamed=streamed))
    await refused(ask(ChatModel, "chat_completions", CHAT, streamed=streamed))
    await refused(ask(OpenAIModel, "chat_completions", CHAT, streamed=streamed))


@pytest.mark.parametrize("said", [b"\xff\xfe", b"\xed\xa0\xbd", rb"\ud83d"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_bytes_that_are_no_text(ask: Ask, backend: Any, said: bytes, streamed: bool) -> None:
    backend.replies = [(200, b'{"choices": [{"message": {"content": "so %s"}}]}' % said)]
    answer = await ask(ChatModel, "responses", ASK, streamed=streamed)
    assert "so \ufffd" in str(answer)


@named(TOKEN_CHOICES)
@pytest.mark.parametrize("streamed", [False, True])
async def test_tokens(ask: Ask, backend: Any, answer: JSON, streamed: bool) -> None:
    choice = {"message": {"content": "Hello"}, "finish_reason": "stop", **TOKENS, **answer}
    backend.replies = [(200, {**HEAD, "prompt_token_ids": [1], "choices": [choice]})]
    await refused(ask(ChatModel, "responses", ASK, streamed=streamed, return_token_ids=True))
    await refused(ask(ChatModel, "chat_completions", CHAT, streamed=streamed, return_token_ids=True))


@pytest.mark.parametrize("logprob", ["x", True, [], {}])
@pytest.mark.parametrize("streamed", [False, True])
async def test_log_probabilities(ask: Ask, backend: Any, logprob: Any, streamed: bool) -> None:
    said = {
        "index": 0,
        "logprobs": {"content": [{"token": "a", "logprob": logprob}]},
        "finish_reason": "stop",
    }
    asked = {**ASK, "top_logprobs": 1}
    backend.replies = [(200, {**HEAD, "choices": [{**said, "message": {"content": "a"}}]})]
    await refused(ask(ChatModel, "responses", asked, streamed=streamed))
    backend.replies = [stream({**HEAD, "choices": [{**said, "delta": {"content": "a"}}]})]
    await refused(ask(ChatModel, "responses", asked, streamed=True))


@named(CHUNKS)
async def test_chunks(ask: Ask, backend: Any, answer: Any) -> None:
    begun = {**HEAD, "choices": [{"index": 0, "delta": {"role": "assistant", "content": "He"}}]}
    end = {**HEAD, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    for events in ([answer, end], [begun, answer, end]):
        backend.replies = [stream(*events)]
        await refused(ask(ChatModel, "responses", ASK, streamed=True))
        await refused(ask(ChatModel, "chat_completions", CHAT, streamed=True))
        await refused(ask(OpenAIModel, "chat_completions", CHAT, streamed=True))


@named(RESPONSES)
@pytest.mark.parametrize("streamed", [False, True])
async def test_responses(ask: Ask, backend: Any, answer: Any, streamed: bool) -> None:
    backend.replies = [(200, answer)]
    await refused(ask(OpenAIModel, "responses", ASK, streamed=streamed))


@pytest.mark.parametrize("streamed", [False, True])
async def test_another_protocol_stops_the_run(ask: Ask, backend: Any, streamed: bool) -> None:
    spoken = {
        "Responses": (
            OpenAIModel,
            "responses",
            ASK,
            {**HEAD, "choices": [{"message": {"content": "Hello"}}]},
        ),
        "Chat Completions": (ChatModel, "responses", ASK, {"id": "r", "object": "response", "output": []}),
    }
    for protocol, (kind, method, body, answer) in spoken.items():
        backend.replies = [(200, answer)]
        with pytest.raises(EndpointMisconfigured, match=f"does not speak {protocol}"):
            await ask(kind, method, body, streamed=streamed)


@named(EVENTS)
async def test_events(ask: Ask, backend: Any, answer: Any) -> None:
    backend.replies = [stream({"type": "response.created", "response": {"id": "r"}}, answer)]
    await refused(ask(OpenAIModel, "responses", ASK, streamed=True))


@named([*COMPLETIONS[:12], {"data": []}, {"data": [None]}, {"data": [{}]}, {"data": [{"data": []}]}])
@pytest.mark.parametrize("route", ["pooling", "classify"])
async def test_scores(backend: Any, answer: Any, route: str) -> None:
    server = PoolingModel(base_url=backend.url, model="m", max_retries=0)
    await server.start()
    backend.replies = [(200, answer)]
    await refused(server.score(route, CHAT))
    key = "probs" if route == "classify" else "data"
    for scores in (["x"], [None], [True], [[]], {"a": 1}, 5):
        backend.replies = [(200, {"data": [{"index": 0, key: scores}]})]
        await refused(server.score(route, CHAT))
    backend.replies = [(200, {"data": [{"index": 0, key: [0.5, 1]}]})]
    assert await server.score(route, CHAT) == {"data": [{"index": 0, key: [0.5, 1]}]}
    await refused(server.score(route, {"input": ["a", "b"]}))
    await server.stop()


SAID: list[JSON] = [
    *({"content": ""}, {"content": None}, {"role": "assistant"}),
    {"content": [{"type": "text", "text": "Hello"}]},
    {"content": "Hello", "tool_calls": None, "refusal": None, "reasoning": None, "function_call": None},
    {"content": "maximum context length is 5 tokens"},
    {"content": "\x00\x7f<think></think></think>"},
    *({"content": None, "tool_calls": calls} for calls in ([], [{"function": {"name": "f"}}])),
    *(
        {"content": None, "tool_calls": [{**CALL, "function": {"name": name, "arguments": arguments}}]}
        for name, arguments in (
            ("", ""),
            ("\n" * 9, "[" * 9),
            ("f", [1, {"a": None}]),
            (None, "{}"),
            (["f"], 5),
        )
    ),
]


@named(SAID)
async def test_what_a_model_may_say_is_an_answer(ask: Ask, backend: Any, answer: JSON) -> None:
    """Else a policy could turn its own zeros into failures."""
    completion = {**HEAD, "choices": [{"message": answer, "finish_reason": "stop"}]}
    backend.replies = [(200, completion)]
    response = await ask(ChatModel, "responses", ASK, streamed=False)
    assert response["status"] == "completed"
    assert await ask(OpenAIModel, "chat_completions", CHAT, streamed=False)


NO_OVERFLOWS = [
    {"error": {"message": "Unknown parameter: 'context_length'"}},
    {"error": {"message": "extra_body.max_seq_len: extra inputs are not permitted"}},
    {
        "error": {
            "message": "bad image",
            "param": "the prompt is too long, it exceeds the context window of x",
        }
    },
    {"error": {"message": "messages[3]: invalid", "input": "maximum context length is 4096 tokens"}},
    {"error": {"message": f"invalid: {'x' * 1000} 'This model's maximum context length is 4096 tokens'"}},
    {"error": "max_tokens must be at least 1, got 0"},
    {"error": {"message": 5, "code": 5}},
    {"error": None},
    "context window",
    None,
]


@named(NO_OVERFLOWS)
async def test_only_a_stated_overflow_is_one(ask: Ask, backend: Any, answer: Any) -> None:
    backend.replies = [(400, answer)]
    with pytest.raises(BadRequest):
        await ask(ChatModel, "responses", ASK, streamed=False)
    with pytest.raises(BadRequest):
        await ask(OpenAIModel, "responses", ASK, streamed=False)


class Zero(ResourcesServer):
    """Scores whatever it gets."""

    async def verify(self, request: VerifyRequest) -> Verdict:
        return Verdict(reward=0.0)


@named([None, *({**HEAD, "choices": [choice]} for choice in CHOICES[5:20])])
async def test_an_episode_is_a_failure_and_no_zero(backend: Any, answer: Any) -> None:
    backend.replies = [(200, answer)]
    model = ChatModel(name="policy", base_url=backend.url, model="m", max_retries=0)
    agent = SimpleAgent(
        name="agent",
        model=ModelClient(InlineTransport(ServerRunner(model))),
        resources=EnvironmentClient(InlineTransport(ServerRunner(Zero()))),
    )
    await model.start()
    rollout = await AgentClient(InlineTransport(ServerRunner(agent))).run({"responses_create_params": ASK})
    await model.stop()
    assert rollout["mask_sample"]
    failure = rollout["failure"]
    assert (failure["kind"], failure["stage"], failure["server"]) == ("unavailable", "model", "policy")
    assert failure["retryable"]
    assert not rollout["_ng_failure_terminal"]


class Told:
    """A server of another language, that answers whatever it is told to."""

    server = "judge"

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    async def call(self, call: Any) -> Any:
        from gym_serve.servers.transport import Reply

        return Reply(200, orjson.dumps(self.answer))

    async def close(self) -> None:
        return None


@named([answer for answer in RESPONSES if not isinstance(answer, bytes)])
async def test_models_behind_http_and_judges(answer: Any) -> None:
    model = ModelClient(Told(answer))
    with pytest.raises(Unavailable) as caught:
        await model.responses(ASK)
    assert caught.value.server == "judge"
    calls = JudgeCalls(1)
    with pytest.raises(Unavailable):
        await calls.ask(model, ASK, lambda said: label_of(said, "", ["A"]))


@named([answer for answer in COMPLETIONS if not isinstance(answer, bytes)])
async def test_judges_that_chat(answer: Any) -> None:
    with pytest.raises(Unavailable):
        await JudgeCalls(1).ask(
            ModelClient(Told(answer)), CHAT, lambda said: "A", protocol="chat_completions"
        )

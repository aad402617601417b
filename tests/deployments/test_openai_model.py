import pytest

from gym_serve.deployments import http_client
from gym_serve.deployments.openai_model import OpenAIModel
from gym_serve.types.errors import (
    BadRequest,
    EndpointAccessDenied,
    Overloaded,
    Unavailable,
)

KEY = "sk-very-secret"
ANSWER = {"id": "resp_1", "object": "response", "output": [], "status": "completed", "error": None}
ASK = {"input": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def model(backend, monkeypatch):
    monkeypatch.setattr(http_client, "_PAUSE", 0.0)
    backend.replies = [ANSWER]
    server = OpenAIModel(
        base_url=backend.url,
        model="served",
        api_key=KEY,
        max_retries=1,
        extra_body={"store": False, "temperature": 0.1},
        sampling_overrides={"top_p": 1.0},
    )
    await server.start()
    yield server
    await server.stop()


async def test_responses_pass_through(model, backend):
    said = {
        "type": "message",
        "role": "assistant",
        "content": [],
        "prompt_token_ids": [1],
        "generation_token_ids": [2],
        "generation_log_probs": [-1.0],
    }
    metadata = {"id": "7", "extra_body": '{"top_p": 0.2, "service_tier": "flex"}'}
    body = {
        "input": [*ASK["input"], said],
        "model": "asked",
        "temperature": 0.7,
        "user": None,
        "metadata": metadata,
    }
    assert await model.responses(body) == ANSWER
    assert backend.requests == [
        (
            "/v1/responses",
            {
                "input": [*ASK["input"], {"type": "message", "role": "assistant", "content": []}],
                "model": "served",
                "store": False,
                "temperature": 0.7,
                "top_p": 1.0,
                "service_tier": "flex",
                "metadata": {"id": "7"},
            },
        )
    ]
    assert backend.headers[0]["Authorization"] == f"Bearer {KEY}"


async def test_a_history_in_chat_form_reaches_the_api_as_items(model, backend):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [
        {"role": "user", "content": [{"type": "text", "text": "go"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
    ]
    assert await model.responses({"input": history}) == ANSWER
    assert backend.bodies[0]["input"] == [
        {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "f",
            "arguments": "{}",
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "c1", "output": "1", "status": "completed"},
    ]


async def test_chat_passes_through(model, backend, completed):
    backend.replies = [completed()]
    assert await model.chat_completions({"messages": []}) == completed()
    assert backend.requests[0][0] == "/v1/chat/completions"


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        ((401, {"error": {"message": f"Incorrect API key: {KEY}"}}), EndpointAccessDenied, "api_key"),
        (b"not json", Unavailable, "no JSON"),
        (b"{}", Unavailable, "did not answer a Response"),
        ({**ANSWER, "error": {"code": "server_error", "message": "x"}}, Unavailable, "model failed"),
        ({**ANSWER, "error": {"code": "rate_limit_exceeded", "message": "x"}}, Overloaded, "failed"),
        ({**ANSWER, "error": {"code": "invalid_prompt", "message": "policy"}}, BadRequest, "policy"),
    ],
)
async def test_errors(model, backend, reply, error, message):
    backend.replies = [reply]
    with pytest.raises(error, match=message) as caught:
        await model.responses(ASK)
    assert KEY not in repr(caught.value.to_body())
    may_pass = error in (Overloaded, Unavailable) and not isinstance(reply, bytes)
    assert len(backend.requests) == (2 if may_pass else 1)


async def test_context_overflow_is_an_answer(model, backend):
    backend.replies = [(400, {"error": {"code": "context_length_exceeded", "message": "too long"}})]
    response = await model.responses(ASK)
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    completion = await model.chat_completions({"messages": []})
    assert completion["choices"][0]["finish_reason"] == "length"


async def test_a_chat_answer_that_is_none(model, backend):
    backend.replies = [{"outputs": []}]
    with pytest.raises(Unavailable, match="not a chat completion"):
        await model.chat_completions({"messages": []})


async def test_reconfigure_moves_later_calls(backends):
    first, second = backends
    first.replies = second.replies = [ANSWER]
    server = OpenAIModel(base_url=first.url, model="old", api_key="one")
    await server.start()
    await server.responses(ASK)
    server.reconfigure({"base_url": second.url, "model": "new", "api_key": "two"})
    await server.responses(ASK)
    await server.stop()
    assert [body["model"] for body in first.bodies + second.bodies] == ["old", "new"]
    assert second.headers[0]["Authorization"] == "Bearer two"

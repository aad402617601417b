"""Hosts and engines as docs/models.md configures them, on servers that answer in the ways of each."""

from contextlib import asynccontextmanager

import orjson
import pytest

from gym_serve.deployments import http_client
from gym_serve.deployments.chat_model import ChatModel
from gym_serve.deployments.openai_model import OpenAIModel
from gym_serve.types.errors import BadRequest, EndpointAccessDenied, Overloaded, Unavailable

ASK = {"input": [{"role": "user", "content": "hi"}]}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
STREAM = {"Content-Type": "text/event-stream; charset=utf-8"}
SAID = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Hello", "annotations": []}],
}


@pytest.fixture
def at(backend, monkeypatch):
    """Runs a model at the backend, below a path."""
    monkeypatch.setattr(http_client, "_PAUSE", 0.0)

    @asynccontextmanager
    async def running(path, kind=ChatModel, **settings):
        url = backend.url.removesuffix("/v1") + path
        server = kind(base_url=url, max_retries=1, **settings)
        await server.start()
        try:
            yield server
        finally:
            await server.stop()

    return running


def text_of(response):
    return "".join(
        part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]
    )


def sse(*events):
    """A stream; what is bytes stands in it as it is."""
    written = (e if isinstance(e, bytes) else b"data: " + orjson.dumps(e) for e in events)
    return 200, b"\n\n".join(written) + b"\n\n", STREAM


def chunk(delta, finish_reason=None, **fields):
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, **fields}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


USAGE = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
END = {**chunk({}), "choices": [], "usage": USAGE}


async def streamed(server, body=ASK):
    """The response of a stream, and the kinds of its events."""
    events = [event async for event in server.stream_responses(body)]
    return events[-1]["response"], [event["type"] for event in events]


async def test_openai(at, backend):
    """Responses with a key, also as a stream; it refuses keys that it does not know."""
    whole = {"id": "resp_1", "object": "response", "status": "completed", "output": [SAID], "error": None}
    begun = {**whole, "status": "in_progress", "output": []}
    backend.replies = [
        (429, {"error": {"message": "Rate limit", "code": "rate_limit_exceeded"}}, {"Retry-After": "0"}),
        whole,
        sse(
            {"type": "response.created", "response": begun}, {"type": "response.completed", "response": whole}
        ),
        sse({"type": "response.created", "response": begun}),
        sse({"type": "response.failed", "response": {**begun, "error": "no object"}}),
    ]
    async with at("/v1", OpenAIModel, model="gpt-5", api_key="sk-1") as server:
        metadata = {"extra_body": '{"service_tier": "flex"}'}
        assert text_of(await server.responses({**ASK, "metadata": metadata})) == "Hello"
        assert backend.requests[1] == ("/v1/responses", {**ASK, "model": "gpt-5", "service_tier": "flex"})
        assert backend.headers[1]["Authorization"] == "Bearer sk-1"
        response, kinds = await streamed(server)
        assert (text_of(response), kinds) == ("Hello", ["response.created", "response.completed"])
        with pytest.raises(Unavailable, match=r"ended before its answer, with 'response\.created'"):
            await streamed(server)
        with pytest.raises(Unavailable, match="no object"):
            await streamed(server)


async def test_azure_v1(at, backend, completed):
    """The path of API v1, the key in a header of its own; its content filter is an error that says so."""
    filtered = {"error": {"code": "content_filter", "message": "The response was filtered", "status": 400}}
    backend.replies = [completed(), (400, filtered)]
    async with at(
        "/openai/v1", OpenAIModel, model="deployment", api_key="k-1", api_key_header="api-key"
    ) as server:
        await server.chat_completions(CHAT)
        with pytest.raises(BadRequest, match="was filtered"):
            await server.chat_completions(CHAT)
    assert backend.requests[0] == ("/openai/v1/chat/completions", {**CHAT, "model": "deployment"})
    assert backend.headers[0]["api-key"] == "k-1"
    assert "Authorization" not in backend.headers[0]


async def test_azure_deployments(at, backend):
    """The API version in the query; a stream begins with a chunk about the prompt, without choices."""
    first = {**chunk({}), "choices": [], "prompt_filter_results": [{"prompt_index": 0}]}
    last = chunk({}, "stop", content_filter_results={})
    backend.replies = [
        sse(first, chunk({"content": "Hel"}), chunk({"content": "lo"}), last, END, b"data: [DONE]")
    ]
    path = "/openai/deployments/gpt"
    async with at(
        path, model="gpt", api_key="k", api_key_header="api-key", query={"api-version": "2024-10-21"}
    ) as server:
        response, kinds = await streamed(server)
    assert text_of(response) == "Hello"
    assert response["usage"]["total_tokens"] == 5
    assert kinds.count("response.output_text.delta") == 2
    assert backend.requests[0][0] == f"{path}/chat/completions"
    assert backend.queries == ["api-version=2024-10-21"]


async def test_openrouter(at, backend):
    """A path before /v1, titles in headers; comments keep a stream alive; failures have status 200."""
    failed = {**chunk({}, "error"), "error": {"code": 502, "message": "Provider disconnected"}}
    backend.replies = [
        sse(
            b": OPENROUTER PROCESSING",
            chunk({"role": "assistant", "content": "", "reasoning": "Hm."}),
            b": OPENROUTER PROCESSING",
            chunk({"content": "Hello"}),
            chunk({}, "stop", native_finish_reason="stop"),
            END,
            b"data: [DONE]",
        ),
        {"error": {"code": 502, "message": "Provider returned error"}},
        {"error": {"code": 502, "message": "Provider returned error"}},
        sse(chunk({"content": "Hel"}), failed),
        (402, {"error": {"code": 402, "message": "Insufficient credits"}}),
    ]
    async with at("/api/v1", model="qwen/qwen3-8b", api_key="k", headers={"X-Title": "t"}) as server:
        response, _ = await streamed(server)
        assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
        with pytest.raises(Unavailable, match="Provider returned error"):
            await server.responses(ASK)
        with pytest.raises(Unavailable, match="Provider disconnected"):
            await streamed(server)
        with pytest.raises(EndpointAccessDenied, match="Insufficient credits"):
            await server.responses(ASK)
    assert {path for path, _ in backend.requests} == {"/api/v1/chat/completions"}
    assert backend.headers[0]["X-Title"] == "t"


@pytest.mark.parametrize("path", ["/v1", "/inference/v1"])
async def test_together_and_fireworks(at, backend, completed, path):
    """Names of models with slashes; a 503 while the model is loaded."""
    model = "accounts/fireworks/models/qwen3-8b"
    backend.replies = [
        (503, {"error": {"message": "Model is loading", "type": "service_unavailable"}}),
        completed(),
    ]
    async with at(path, model=model, api_key="k") as server:
        assert text_of(await server.responses(ASK)) == "Hello"
    assert [(url, body["model"]) for url, body in backend.requests] == [
        (f"{path}/chat/completions", model)
    ] * 2


async def test_litellm(at, backend, completed):
    """A proxy's alias and key; codes are strings, and the words are the provider's behind it."""
    overflow = "litellm.ContextWindowExceededError: This model's maximum context length is 8192 tokens."
    limited = {"message": "Rate limit of the key", "type": "None", "param": "None", "code": "429"}
    backend.replies = [
        completed(),
        (400, {"error": {"message": overflow, "type": None, "param": None, "code": "400"}}),
        (429, {"error": limited}),
        (429, {"error": limited}),
        (401, {"error": {"message": "Invalid proxy server token: sk-master", "code": "401"}}),
    ]
    async with at("", model="alias", api_key="sk-master") as server:
        assert text_of(await server.responses(ASK)) == "Hello"
        assert (await server.responses(ASK))["incomplete_details"] == {"reason": "max_output_tokens"}
        with pytest.raises(Overloaded, match="Rate limit of the key"):
            await server.responses(ASK)
        with pytest.raises(EndpointAccessDenied, match="api_key") as caught:
            await server.responses(ASK)
    assert "sk-master" not in caught.value.message
    assert backend.requests[0][0] == "/chat/completions"


@pytest.mark.parametrize(
    "said",
    [
        "The input (9000 tokens) is longer than the model's context length (8192 tokens).",  # SGLang
        "The sum of prompt length (9000), query length (0) should not exceed max_num_tokens (8192)",
    ],
)
async def test_sglang_and_tensorrt_llm(at, backend, completed, said):
    """No key is needed; errors are flat objects; reasoning stands beside the content."""
    answer = completed()
    answer["choices"][0]["message"]["reasoning_content"] = "Hm."
    answer["choices"][0]["matched_stop"] = 151645
    flat = {"object": "error", "message": said, "type": "BadRequestError", "param": None, "code": 400}
    backend.replies = [answer, (400, flat), (400, {**flat, "message": "temperature must be positive"})]
    async with at("/v1", model="served") as server:
        response = await server.responses(ASK)
        assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
        assert (await server.responses(ASK))["incomplete_details"] == {"reason": "max_output_tokens"}
        with pytest.raises(BadRequest, match="temperature must be positive"):
            await server.responses(ASK)
    sent = backend.bodies[0]
    assert not {"return_token_ids", "return_tokens_as_token_ids", "logprobs"} & sent.keys()


async def test_a_trainers_own_server(at, backend, completed):
    """It finds the tokens of the last turn on its message, and sends its own as vLLM does, inline."""
    answer = completed(prompt_token_ids=[1, 2, 3, 4, 5])
    entry = {"token": "token_id:6", "logprob": -0.5}
    answer["choices"][0] |= {"token_ids": [6], "logprobs": {"content": [entry]}}
    backend.replies = [answer]
    bundle = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.1]}
    items = [*ASK["input"], {**SAID, **bundle}, {"role": "user", "content": "go on"}]
    async with at("/v1", model="policy", return_token_ids=True) as server:
        response = await server.responses({"input": items})
    assert bundle.items() <= backend.bodies[0]["messages"][1].items()
    last = response["output"][-1]
    assert (last["prompt_token_ids"], last["generation_token_ids"]) == ([1, 2, 3, 4, 5], [6])


@pytest.mark.parametrize("kind", [ChatModel, OpenAIModel])
async def test_a_stream_that_is_cut_short_is_no_answer(at, backend, kind):
    """Some proxies close a broken stream as if it was whole."""
    backend.replies = [sse(chunk({"content": "The answer is no"}))]
    got = []

    async def read(server):
        async for chunk in server.stream_chat(CHAT):
            got.append(chunk)  # those before the failure as well

    async with at("/v1", kind, model="m", api_key="k") as server:
        with pytest.raises(Unavailable, match="in the middle of its answer"):
            await read(server)
    assert len(got) == len(backend.requests) == 1

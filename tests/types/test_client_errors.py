"""Failures in the form of each protocol, so that the official clients raise their own errors."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import anthropic
import openai
import pytest
from support.loopback import Loopback, chat_and_api

JSON = dict[str, Any]
Ask = Callable[..., Any]

TOKEN = "the-token"
USER: Any = [{"role": "user", "content": "hi"}]


def models(url: str) -> JSON:
    models = chat_and_api(url)
    return {**models, "hasty": {**models["chat"], "timeout": 0.2}}


@pytest.fixture(scope="module")
def backend() -> Iterator[Loopback]:
    with Loopback(models, auth_token=TOKEN) as loopback:
        yield loopback


@pytest.fixture(params=["responses", "chat", "messages"])
def ask(backend: Loopback, request: pytest.FixtureRequest) -> Iterator[Ask]:
    """Asks a model in one of the protocols, streamed or not, and reads the answer to its end."""
    with ExitStack() as clients:

        def ask(
            model: str = "chat", *, token: str = TOKEN, stream: bool = False, body: JSON | None = None
        ) -> None:
            url = f"{backend.url}/{model}"
            made: Any
            if request.param == "messages":
                made = anthropic.Anthropic(base_url=url, api_key=token, max_retries=0)
                call, given = made.messages.create, {"messages": USER, "max_tokens": 9}
            else:
                made = openai.OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0)
                responses = request.param == "responses"
                call = made.responses.create if responses else made.chat.completions.create
                given = {"input": USER} if responses else {"messages": USER}
            clients.enter_context(made)
            answer = call(model="m", stream=stream, extra_body=body, **given)
            if stream:
                list(answer)

        yield ask


def body_of(error: openai.APIStatusError | anthropic.APIStatusError) -> JSON:
    """What stands under ``error`` in the answer, in the form of its protocol."""
    body: JSON = error.response.json()
    if isinstance(error, anthropic.APIStatusError):
        assert body["type"] == "error"
    assert body["error"]["message"]
    inner: JSON = body["error"]
    return inner


CASES = {
    "refused": ((400, {"error": {"message": "bad tool"}}, {}), 400, "invalid_request_error"),
    "unknown model": ((404, {"error": {"message": "no model m"}}, {}), 424, "invalid_request_error"),
    "no key": ((401, {"error": {"message": "bad key"}}, {}), 424, "invalid_request_error"),
    "busy": ((429, {"error": {"message": "slow down"}}, {"Retry-After": "3"}), 429, "rate_limit_error"),
    "broken": ((500, {"error": {"message": "boom"}}, {}), 503, "overloaded_error"),
    "nonsense": ({"object": "nothing"}, 503, "overloaded_error"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", ["chat", "api"])
def test_failures_of_the_backend(ask: Ask, backend: Loopback, model: str, stream: bool, case: str) -> None:
    reply, status, kind = CASES[case]
    backend.reply = lambda path, body: reply
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as caught:
        ask(model, stream=stream)
    error: Any = caught.value
    assert error.status_code == status
    assert (
        type(error).__name__
        == {
            400: "BadRequestError",
            424: "APIStatusError",
            429: "RateLimitError",
            503: "ServiceUnavailableError"
            if isinstance(error, anthropic.APIError)
            else "InternalServerError",
        }[status]
    )
    body = body_of(error)
    if isinstance(error, anthropic.APIStatusError):
        assert body["type"] == kind
    if case == "busy":
        assert error.response.headers["retry-after"] == "3"
    if isinstance(reply, tuple):
        assert reply[1]["error"]["message"] in body["message"]
    assert "key-of-the-api" not in error.response.text


def test_a_backend_that_takes_too_long(ask: Ask, backend: Loopback) -> None:
    backend.reply = lambda path, body: None
    for stream in (False, True):
        with pytest.raises((openai.InternalServerError, anthropic.InternalServerError)) as caught:
            ask("hasty", stream=stream)
        error: Any = caught.value
        assert error.status_code == 504
        if isinstance(error, anthropic.APIStatusError):
            assert body_of(error)["type"] == "timeout_error"


@pytest.mark.parametrize("stream", [False, True])
def test_failures_of_the_client(ask: Ask, backend: Loopback, stream: bool) -> None:
    unauthorized = (openai.AuthenticationError, anthropic.AuthenticationError)
    with pytest.raises(unauthorized) as refused:
        ask(token="a-guess", stream=stream)
    not_found = (openai.NotFoundError, anthropic.NotFoundError)
    with pytest.raises(not_found, match="did you mean 'chat'") as unknown:
        ask("chatt", stream=stream)
    invalid = (
        openai.BadRequestError,
        openai.UnprocessableEntityError,
        anthropic.BadRequestError,
        anthropic.UnprocessableEntityError,
    )
    wrong: JSON = {"tools": {"a": 1}, "tool_choice": [], "input": 5, "messages": 5}
    with pytest.raises(invalid) as malformed:
        ask(body=wrong, stream=stream)
    kinds = ("authentication_error", "not_found_error", "invalid_request_error")
    for caught, kind in zip((refused, unknown, malformed), kinds, strict=True):
        error: Any = caught.value
        if isinstance(error, anthropic.APIStatusError):
            assert body_of(error)["type"] == kind
        else:
            assert body_of(error)["code"] == error.code


def test_tokens_of_a_request(backend: Loopback) -> None:
    with ExitStack() as clients:

        def count(model: str) -> int:
            claude = anthropic.Anthropic(base_url=f"{backend.url}/{model}", api_key=TOKEN, max_retries=0)
            clients.enter_context(claude)
            tools: Any = [{"name": "f", "input_schema": {"type": "object"}}]
            return claude.messages.count_tokens(model="m", messages=USER, tools=tools).input_tokens

        backend.reply = lambda path, body: {"tokens": [1, 2, 3], "count": 3}
        assert count("chat") == 3
        path, body = backend.requests[-1]
        assert (path, body["messages"]) == ("/tokenize", USER)
        assert body["tools"][0]["function"]["name"] == "f"
        backend.reply = lambda path, body: (404, {"detail": "Not Found"}, {})
        for model in ("chat", "api"):
            with pytest.raises(anthropic.NotFoundError, match="cannot count") as caught:
                count(model)
            assert body_of(caught.value)["type"] == "not_found_error"

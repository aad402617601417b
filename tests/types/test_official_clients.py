"""What the official clients say arrives at the backend, and what it answers arrives at them.

`chat` speaks Chat Completions to its backend, `api` passes on Responses and Chat Completions as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel
from support.loopback import Loopback, chat_and_api
from support.replies import message, response

JSON = dict[str, Any]

USER: Any = [{"role": "user", "content": "hi"}]
LOGPROBS = [
    {"token": "He", "logprob": -0.5, "bytes": None, "top_logprobs": [{"token": "Ha", "logprob": -1.5}]},
    {"token": "llo", "logprob": -0.25, "bytes": None, "top_logprobs": []},
]


class Answer(BaseModel):
    number: int


def completion(text: str | None = "Hello", *, index: int = 0, finish: str = "stop", **choice: Any) -> JSON:
    """A chat completion; keys of the choice are its own, others of the message."""
    message = {key: choice.pop(key) for key in ("refusal", "tool_calls") if key in choice}
    said = {"role": "assistant", "content": text, **message}
    made = {"index": index, "finish_reason": finish, "message": said, **choice}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    head = {"id": "x", "object": "chat.completion", "created": 1, "model": "m"}
    return {**head, "choices": [made], "usage": usage}


def said(text: str, **part: Any) -> JSON:
    return response(message({"type": "output_text", "text": text, "annotations": [], **part}))


@pytest.fixture(scope="module")
def running() -> Iterator[Loopback]:
    with Loopback(chat_and_api) as loopback:
        yield loopback


@pytest.fixture
def backend(running: Loopback) -> Loopback:
    running.requests.clear()
    running.reply = lambda path, body: completion()
    return running


@pytest.fixture(params=["chat", "api"])
def client(running: Loopback, request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    base_url = f"{running.url}/{request.param}/v1"
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def chat(running: Loopback) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/chat/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def api(running: Loopback) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/api/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(running: Loopback) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=f"{running.url}/chat", api_key="none", max_retries=0) as client:
        yield client


def test_sampling_of_chat(client: openai.OpenAI, backend: Loopback) -> None:
    choices = [completion("One")["choices"][0], completion("Two", index=1)["choices"][0]]
    choices[0]["logprobs"] = {"content": LOGPROBS, "refusal": None}
    backend.reply = lambda path, body: {**completion(), "choices": choices}
    answer = client.chat.completions.create(
        model="m", messages=USER, n=2, stop=["END"], seed=7, logprobs=True, top_logprobs=1
    )
    sent = {key: backend.asked[key] for key in ("n", "stop", "seed", "logprobs", "top_logprobs")}
    assert sent == {"n": 2, "stop": ["END"], "seed": 7, "logprobs": True, "top_logprobs": 1}
    assert [(c.index, c.message.content) for c in answer.choices] == [(0, "One"), (1, "Two")]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [(entry.token, entry.logprob) for entry in logprobs.content] == [("He", -0.5), ("llo", -0.25)]
    assert logprobs.content[0].top_logprobs[0].token == "Ha"


def test_sampling_of_responses(chat: openai.OpenAI, backend: Loopback) -> None:
    backend.reply = lambda path, body: completion(logprobs={"content": LOGPROBS})
    answer = chat.responses.create(
        model="m",
        input="hi",
        top_logprobs=1,
        include=["message.output_text.logprobs"],
        extra_body={"seed": 7, "stop": ["END"]},
    )
    sent = {key: backend.asked[key] for key in ("stop", "seed", "logprobs", "top_logprobs")}
    assert sent == {"stop": ["END"], "seed": 7, "logprobs": True, "top_logprobs": 1}
    part: Any = answer.output[0].content[0]  # type: ignore[union-attr, index]
    assert [(entry.token, entry.logprob) for entry in part.logprobs] == [("He", -0.5), ("llo", -0.25)]
    plain: Any = chat.responses.create(model="m", input="hi").output[0]
    assert not plain.content[0].logprobs


@pytest.mark.parametrize("key", ["stop_reason", "matched_stop"])
def test_sampling_of_messages(claude: anthropic.Anthropic, backend: Loopback, key: str) -> None:
    backend.reply = lambda path, body: completion(**{key: "END"})
    answer = claude.messages.create(
        model="m",
        max_tokens=9,
        messages=USER,
        stop_sequences=["END"],
        extra_body={"seed": 7, "top_k": 5, "temperature": 0.5},  # clients of some versions know none of these
    )
    sent = {key: backend.asked[key] for key in ("stop", "seed", "top_k", "temperature", "max_tokens")}
    assert sent == {"stop": ["END"], "seed": 7, "top_k": 5, "temperature": 0.5, "max_tokens": 9}
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "END")


def test_structured_outputs_of_chat(client: openai.OpenAI, backend: Loopback) -> None:
    backend.reply = lambda path, body: completion('{"number": 4}')
    answer = client.chat.completions.parse(model="m", messages=USER, response_format=Answer)
    assert answer.choices[0].message.parsed == Answer(number=4)
    wanted = backend.asked["response_format"]
    assert (wanted["type"], wanted["json_schema"]["strict"]) == ("json_schema", True)
    assert wanted["json_schema"]["schema"]["required"] == ["number"]


def test_structured_outputs_of_responses(client: openai.OpenAI, backend: Loopback) -> None:
    text = '{"number": 4}'
    backend.reply = lambda path, body: said(text) if path == "/v1/responses" else completion(text)
    answer = client.responses.parse(model="m", input="2+2", text_format=Answer)
    assert answer.output_parsed == Answer(number=4)
    path, body = backend.requests[-1]
    wanted = body["text"]["format"] if path == "/v1/responses" else body["response_format"]["json_schema"]
    assert (wanted["name"], wanted["strict"]) == ("Answer", True)
    assert wanted["schema"]["required"] == ["number"]


def test_a_refusal_is_one_in_every_protocol(
    chat: openai.OpenAI, claude: anthropic.Anthropic, backend: Loopback
) -> None:
    backend.reply = lambda path, body: completion(None, refusal="I won't.")
    response_ = chat.responses.create(model="m", input="hi")
    part: Any = response_.output[0].content[0]  # type: ignore[union-attr, index]
    assert (part.type, part.refusal, response_.output_text) == ("refusal", "I won't.", "")
    told = chat.chat.completions.create(model="m", messages=USER).choices[0].message
    assert (told.refusal, told.content) == ("I won't.", None)
    answer = claude.messages.create(model="m", max_tokens=9, messages=USER)
    assert answer.stop_reason == "refusal"
    assert answer.content[0].text == "I won't."  # type: ignore[union-attr]
    # In the next request it is what the model said, and still a refusal.
    chat.responses.create(model="m", input=[*response_.output, *USER])  # type: ignore[list-item]
    assert backend.asked["messages"][0]["content"] == [{"type": "refusal", "refusal": "I won't."}]


def test_a_refusal_of_an_api_is_one_in_messages(running: Loopback, backend: Loopback) -> None:
    backend.reply = lambda path, body: response(message({"type": "refusal", "refusal": "I won't."}))
    with anthropic.Anthropic(base_url=f"{running.url}/api", api_key="none", max_retries=0) as claude:
        answer = claude.messages.create(model="m", max_tokens=9, messages=USER)
        with claude.messages.stream(model="m", max_tokens=9, messages=USER) as stream:
            streamed = stream.get_final_message()
    for told in (answer, streamed):
        assert told.stop_reason == "refusal"
        assert told.content[0].text == "I won't."  # type: ignore[union-attr]

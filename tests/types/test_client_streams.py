"""Streams of `chat_model` and `openai_model`, read by the official clients while the backend makes them."""

import copy
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from support.loopback import Gate, Loopback, chat_and_api
from support.replies import call, completion, message, response, thought, usage

from gym_serve.types.protocols import chat_chunks, response_events

JSON = dict[str, Any]

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
USER: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {"name": "f", "input_schema": {"type": "object"}}
FUNCTION = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
RESPONSE = response(thought("Hm."), message("Hello"), call("f", '{"x":1}'), usage=usage(cached=1))
COMPLETION = completion("Hello", "tool_calls", reasoning_content="Hm.", tool_calls=[FUNCTION])


def streamed(path: str, *, at: Any = None) -> list[Any]:
    """The events of the answer; ``at`` stands where its text has begun."""
    if path.endswith("responses"):
        events: list[Any] = list(response_events(RESPONSE))
        place = next(i for i, event in enumerate(events) if event["type"] == "response.output_text.delta") + 1
    else:
        events = list(chat_chunks(COMPLETION, include_usage=True))
        place = next(i for i, e in enumerate(events) if e["choices"][0]["delta"].get("content")) + 1
    return events if at is None else [*events[:place], at, *events[place:]]


def models(url: str) -> JSON:
    models = chat_and_api(url)
    return {**models, "two": {**models["chat"], "base_url": [url, url.replace("127.0.0.1", "localhost")]}}


@pytest.fixture(scope="module")
def running() -> Iterator[Loopback]:
    with Loopback(models) as loopback:
        yield loopback


@pytest.fixture
def backend(running: Loopback) -> Loopback:
    running.requests.clear()
    running.gone.clear()
    running.reply = lambda path, body: streamed(path)
    return running


@pytest.fixture(params=["chat", "api"])
def client(running: Loopback, request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    base_url = f"{running.url}/{request.param}/v1"
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(params=["chat", "api"])
def claude(running: Loopback, request: pytest.FixtureRequest) -> Iterator[anthropic.Anthropic]:
    base_url = f"{running.url}/{request.param}"
    with anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def test_responses(client: openai.OpenAI, backend: Loopback) -> None:
    gate = Gate()
    backend.reply = lambda path, body: streamed(path, at=gate)
    events = []
    for event in client.responses.create(model="m", input="hi", stream=True):
        EVENT.validate_python(event.to_dict()) if event.type != "response.completed" else None
        events.append(event)
        if event.type == "response.output_text.delta":
            backend.open(gate)  # the backend has said no more than that so far
    assert backend.asked["stream"] is True
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    opened = [event.item.type for event in events if event.type == "response.output_item.added"]
    assert opened == ["reasoning", "message", "function_call"]
    last: Any = events[-1]
    assert last.type == "response.completed"
    assert (last.response.output_text, last.response.usage.total_tokens) == ("Hello", 5)
    assert last.response.output[-1].arguments == '{"x":1}'


@pytest.mark.parametrize("include_usage", [True, False])
def test_chat(client: openai.OpenAI, backend: Loopback, include_usage: bool) -> None:
    gate = Gate()
    backend.reply = lambda path, body: streamed(path, at=gate)
    options: Any = {"include_usage": True} if include_usage else openai.omit
    stream = client.chat.completions.create(model="m", messages=USER, stream=True, stream_options=options)
    chunks = []
    for chunk in stream:
        chunks.append(chunk)
        if chunk.choices and chunk.choices[0].delta.content == "Hello":
            backend.open(gate)
    assert backend.asked["stream_options"] == {"include_usage": True}  # asked for in any case, for the budget
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == ["tool_calls"]
    assert [chunk.usage.total_tokens for chunk in chunks if chunk.usage] == [5] * include_usage
    assert bool(chunks[-1].choices) is not include_usage


def test_messages(claude: anthropic.Anthropic, backend: Loopback) -> None:
    gate = Gate()
    backend.reply = lambda path, body: streamed(path, at=gate)
    kinds = []
    with claude.messages.stream(model="m", max_tokens=9, messages=USER, tools=[TOOL]) as stream:
        for event in stream:
            kinds.append(event.type)
            if event.type == "text":
                backend.open(gate)
        told = stream.get_final_message()
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert [block.type for block in told.content] == ["thinking", "text", "tool_use"]
    assert told.content[2].to_dict()["input"] == {"x": 1}
    assert told.stop_reason == "tool_use"
    assert (told.usage.input_tokens or 0) + (told.usage.cache_read_input_tokens or 0) == 3
    assert told.usage.output_tokens == 2


def calling(arguments: str) -> list[JSON]:
    """A stream that calls a tool with these arguments, in two parts."""
    begun = copy.deepcopy(COMPLETION)
    begun["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] = arguments[:2]
    *chunks, last, end = chat_chunks(begun, include_usage=True)
    more = copy.deepcopy(last)
    more["choices"][0] |= {"finish_reason": None}
    more["choices"][0]["delta"] = {"tool_calls": [{"index": 0, "function": {"arguments": arguments[2:]}}]}
    return [*chunks, more, last, end]


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ("{oops", {"INVALID_JSON": "{oops"}),
        ('{"x": 1', {"INVALID_JSON": '{"x": 1'}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ("", {}),
        ('{"x": 1}', {"x": 1}),
    ],
)
def test_the_input_of_a_tool_is_an_object(
    running: Loopback, backend: Loopback, arguments: str, given: JSON
) -> None:
    backend.reply = lambda path, body: calling(arguments)
    with (
        anthropic.Anthropic(base_url=f"{running.url}/chat", api_key="none", max_retries=0) as claude,
        claude.messages.stream(model="m", max_tokens=9, messages=USER, tools=[TOOL]) as stream,
    ):
        assert stream.get_final_message().content[-1].to_dict()["input"] == given


@pytest.mark.parametrize(("eager", "parts"), [(True, ['{"', 'x": 1']), (False, ['{"x": 1}'])])
def test_an_eager_input_comes_in_parts(
    running: Loopback, backend: Loopback, eager: bool, parts: list[str]
) -> None:
    backend.reply = lambda path, body: calling('{"x": 1' if eager else '{"x": 1}')
    tools: Any = [{**TOOL, "eager_input_streaming": eager}]
    with anthropic.Anthropic(base_url=f"{running.url}/chat", api_key="none", max_retries=0) as claude:
        events: Any = claude.messages.create(model="m", max_tokens=9, messages=USER, tools=tools, stream=True)
        deltas = [event.delta for event in events if event.type == "content_block_delta"]
    assert [delta.partial_json for delta in deltas if delta.type == "input_json_delta"] == parts


@pytest.mark.parametrize("protocol", ["responses", "chat"])
def test_a_client_that_leaves_closes_the_connection(
    client: openai.OpenAI, backend: Loopback, protocol: str
) -> None:
    backend.reply = lambda path, body: streamed(path, at=Gate())
    stream: Any
    if protocol == "responses":
        stream = client.responses.create(model="m", input="hi", stream=True)
        first = next(event for event in stream if event.type == "response.output_text.delta")
        assert first.delta == "Hello"
    else:
        stream = client.chat.completions.create(model="m", messages=USER, stream=True)
        next(chunk for chunk in stream if chunk.choices[0].delta.content)
    assert not backend.gone.is_set()
    stream.close()
    assert backend.gone.wait(30)


def test_a_messages_client_that_leaves(claude: anthropic.Anthropic, backend: Loopback) -> None:
    backend.reply = lambda path, body: streamed(path, at=Gate())
    with claude.messages.stream(model="m", max_tokens=9, messages=USER) as stream:
        next(event for event in stream if event.type == "text")
    assert backend.gone.wait(30)


LOGPROBS = [[{"token": token, "logprob": -0.5, "top_logprobs": []}] for token in ("He", "llo", "!")]


def test_log_probabilities_come_with_their_text(running: Loopback, backend: Loopback) -> None:
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    texts = zip(("He", "llo", ""), LOGPROBS, strict=True)
    chunks = [
        {**head, "choices": [{"index": 0, "delta": {"content": text}, "logprobs": {"content": entries}}]}
        for text, entries in texts
    ]
    chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    backend.reply = lambda path, body: chunks
    with openai.OpenAI(base_url=f"{running.url}/chat/v1", api_key="none", max_retries=0) as client:
        events = list(client.responses.create(model="m", input="hi", stream=True, top_logprobs=1))
    told = [[e.token for e in ev.logprobs] for ev in events if ev.type == "response.output_text.delta"]
    assert told == [["He"], ["llo"]]
    part: Any = events[-1].response.output[0].content[0]  # type: ignore[union-attr]
    assert [entry.token for entry in part.logprobs] == ["He", "llo", "!"]


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("protocol", ["responses", "chat", "messages"])
@pytest.mark.parametrize("model", ["chat", "api"])
def test_a_stream_that_breaks_is_no_answer(
    running: Loopback, backend: Loopback, model: str, protocol: str, cut: bool
) -> None:
    """The connection breaks in the middle, or the stream ends there as if nothing were missing."""
    broken = ConnectionError()

    def reply(path: str, body: JSON) -> list[Any]:
        events = streamed(path, at=broken)
        return events if cut else events[: events.index(broken)]

    backend.reply = reply
    options: Any = {"api_key": "none", "max_retries": 0}
    if protocol == "messages":
        with (
            anthropic.Anthropic(base_url=f"{running.url}/{model}", **options) as claude,
            pytest.raises(anthropic.APIStatusError, match="overloaded_error"),
            claude.messages.stream(model="m", max_tokens=9, messages=USER) as read,
        ):
            read.until_done()
        return
    with openai.OpenAI(base_url=f"{running.url}/{model}/v1", **options) as client:
        if protocol == "chat":
            stream: Any = client.chat.completions.create(model="m", messages=USER, stream=True)
            with pytest.raises(openai.APIError) as caught:
                list(stream)
            assert caught.value.code == "unavailable"
        else:
            events = list(client.responses.create(model="m", input="hi", stream=True))
            last: Any = events[-1]
            assert (last.type, last.code) == ("error", "unavailable")
            assert "response.completed" not in [event.type for event in events]


def test_a_stream_that_has_begun_is_not_begun_again_elsewhere(running: Loopback, backend: Loopback) -> None:
    backend.reply = lambda path, body: streamed(path, at=ConnectionError())
    with openai.OpenAI(base_url=f"{running.url}/two/v1", api_key="none", max_retries=0) as client:
        for _ in range(12):  # each endpoint fails often enough to be passed over
            chunks = client.chat.completions.create(model="m", messages=USER, stream=True)
            roles = (chunk.choices[0].delta.role for chunk in chunks)
            assert [next(roles), next(roles), next(roles)] == ["assistant", None, None]
            with pytest.raises(openai.APIError):
                next(roles)
    assert len(backend.requests) == 12

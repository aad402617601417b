"""The stream of an agent: what its model says comes while it says it. For official clients, without a Ray."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from support.in_process import serving
from support.replies import call, message, response

from gym_serve import ModelServer, ResourcesServer, Unavailable, Verdict, VerifyRequest, tool
from gym_serve.graph import resolve
from gym_serve.graph.spec import GraphSpec
from gym_serve.types.protocols import response_events

JSON = dict[str, Any]
GO_ON = threading.Event()
"""Set by a test once it has read what came so far."""
GIVEN_UP = threading.Event()
"""Set once a generation is cancelled."""
FIRST = "Let me look."
SECOND = "It is sunny."
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
CHAT_TOOL: Any = {"type": "function", "function": {key: TOOL[key] for key in ("name", "parameters")}}
ASKED: Any = [{"role": "user", "content": "How is the weather?"}]


class Slow(ModelServer):
    """Says a sentence and calls the tool, then says another one. It waits in the middle of both."""

    async def responses(self, body: JSON) -> JSON:
        raise Unavailable("only streams are asked for")

    async def stream_responses(self, body: JSON) -> AsyncIterator[JSON]:
        asked = body["input"]
        text = asked if isinstance(asked, str) else str(asked[0]["content"])
        if "fail at once" in text:
            raise Unavailable("no model")
        first = isinstance(asked, str) or asked[-1].get("type") != "function_call_output"
        told = _response(first)
        if "be cut off" in text:
            told |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        for event in response_events(told):
            delta = event.get("delta")
            if event["type"] != "response.output_text.delta" or not delta:
                yield event
                continue
            yield {**event, "delta": delta[:3]}
            try:
                await asyncio.to_thread(GO_ON.wait)
            except asyncio.CancelledError:
                GIVEN_UP.set()
                raise
            if "fail later" in text:
                raise Unavailable("the model is gone")
            yield {**event, "delta": delta[3:]}


def _response(first: bool) -> JSON:
    said = message(FIRST if first else SECOND, id="msg")
    return response(*([said, call("weather")] if first else [said]), id=f"resp_{first}", model="slow")


class Sky(ResourcesServer):
    """One tool."""

    @tool
    async def weather(self) -> str:
        """How it is."""
        return "sunny"

    async def verify(self, request: VerifyRequest) -> Verdict:
        return Verdict(reward=1.0)


GRAPH: JSON = {
    "models": {"policy": {"type": Slow}},
    "resources": {"sky": {"type": Sky}},
    "agents": {
        "guide": {"type": "simple_agent", "model": "policy", "resources": "sky"},
    },
}


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    with serving(lambda url: {"/web": resolve(GraphSpec.model_validate(GRAPH))}) as url:
        yield f"{url}/web"


@pytest.fixture(autouse=True)
def _waiting() -> Iterator[None]:
    GO_ON.clear()
    GIVEN_UP.clear()
    yield
    GO_ON.set()


@pytest.fixture
def guide(base: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{base}/guide/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_chat_reads_what_the_model_says_while_it_says_it(guide: openai.OpenAI) -> None:
    stream = guide.chat.completions.create(model="m", messages=ASKED, tools=[CHAT_TOOL], stream=True)
    chunks = []
    for chunk in stream:
        chunks.append(chunk)
        if chunk.choices and chunk.choices[0].delta.content:  # the model waits for this
            GO_ON.set()
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == f"{FIRST}\n\n{SECOND}"
    assert not any(choice.delta.tool_calls for choice in choices)  # the tool was run by the agent
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]


def test_a_response_has_all_items_of_the_episode(guide: openai.OpenAI) -> None:
    numbers, kinds = [], []
    with guide.responses.stream(model="m", input=ASKED, tools=[TOOL]) as stream:  # type: ignore[list-item]
        for event in stream:
            numbers.append(event.sequence_number)
            if event.type == "response.output_text.delta":
                GO_ON.set()
            if event.type == "response.output_item.done":
                kinds.append((event.output_index, event.item.type))
        response = stream.get_final_response()
    expected = ["message", "function_call", "function_call_output", "message"]
    assert [kind for _, kind in sorted(kinds)] == expected == [item.type for item in response.output]
    assert numbers == list(range(len(numbers)))
    assert response.output_text == FIRST + SECOND
    assert response.usage is not None
    assert response.usage.output_tokens == 4  # of both calls


def test_a_message_has_a_block_for_each_turn(base: str) -> None:
    import anthropic  # here, as it takes two seconds, of each worker that collects this file

    tools: Any = [{"name": "weather", "input_schema": TOOL["parameters"]}]
    with (
        anthropic.Anthropic(base_url=f"{base}/guide", api_key="none", max_retries=0) as client,
        client.messages.stream(model="m", max_tokens=99, messages=ASKED, tools=tools) as stream,
    ):
        for _ in stream.text_stream:
            GO_ON.set()
        message = stream.get_final_message()
    assert [(block.type, getattr(block, "text", None)) for block in message.content] == [
        ("text", FIRST),
        ("text", SECOND),
    ]
    assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", 4)


def test_calls_that_nobody_has_run_are_the_clients(guide: openai.OpenAI) -> None:
    """The answer is cut off, which ends the episode."""
    GO_ON.set()
    asked: Any = [{"role": "user", "content": "be cut off"}]
    stream = guide.chat.completions.create(model="m", messages=asked, tools=[CHAT_TOOL], stream=True)
    choices = [choice for chunk in stream for choice in chunk.choices]
    calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
    assert [call.function.name for call in calls if call.function and call.function.name] == ["weather"]
    assert choices[-1].finish_reason == "length"


def test_a_client_that_leaves_ends_the_generation(guide: openai.OpenAI) -> None:
    stream = guide.chat.completions.create(model="m", messages=ASKED, stream=True)
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            stream.close()
            break
    assert GIVEN_UP.wait(30)


def test_failures_before_and_after_the_first_event(guide: openai.OpenAI) -> None:
    at_once: Any = [{"role": "user", "content": "fail at once"}]
    with pytest.raises(openai.InternalServerError, match="no model"):
        guide.chat.completions.create(model="m", messages=at_once, stream=True)
    later: Any = [{"role": "user", "content": "fail later"}]
    stream = guide.chat.completions.create(model="m", messages=later, stream=True)
    GO_ON.set()
    with pytest.raises(openai.APIError, match="the model is gone"):
        list(stream)

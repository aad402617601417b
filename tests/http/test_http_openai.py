"""The official openai client, unchanged, against models and agents."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

CHAT: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
TOOL: Any = {
    "type": "function",
    "name": "stock",
    "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    "strict": False,
}


@pytest.fixture
def clerk(url: str) -> Iterator[openai.OpenAI]:
    """The client, pointed at an agent whose policy calls the first tool, then says what it got."""
    with openai.OpenAI(base_url=f"{url}/clerk/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_response(told: openai.OpenAI) -> None:
    response = told.responses.create(model="m", input=CHAT, temperature=0.5)
    assert response.output_text == "hello"
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.usage is not None
    assert response.usage.total_tokens == 5
    assert response._request_id
    assert "," not in response._request_id


def test_an_agent_stands_where_a_model_does(clerk: openai.OpenAI) -> None:
    response = clerk.responses.create(model="m", input="Have you got Tea?", tools=[TOOL])
    assert [item.type for item in response.output] == ["function_call", "function_call_output", "message"]
    assert response.output_text == 'The tool says: {"characters":3.0,"price":1.0}'


def test_an_agent_streams_the_whole_episode(clerk: openai.OpenAI) -> None:
    stream = clerk.responses.create(model="m", input="Have you got Tea?", tools=[TOOL], stream=True)
    events: list[Any] = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    done = [event.item.type for event in events if event.type == "response.output_item.done"]
    assert done == ["function_call", "function_call_output", "message"]
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text.startswith("The tool says")


def test_a_deadline_is_the_clients_own_error_too(told: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="took longer than") as caught:
        told.responses.create(model="m", input="hang", extra_headers={"x-request-timeout": "0.3"})
    assert caught.value.status_code == 504


def test_an_unknown_route(told: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="v1/embeddings"):
        told.embeddings.create(model="m", input="hello")
    with pytest.raises(openai.NotFoundError, match="v1/models/m"):
        told.models.retrieve("m")


async def test_the_async_client(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/told/v1", api_key="none", max_retries=0) as client:
        inputs = [f"hello {i}" for i in range(8)]
        answers = await asyncio.gather(*(client.responses.create(model="m", input=text) for text in inputs))
        assert [answer.output_text for answer in answers] == inputs
        events = [event async for event in await client.responses.create(model="m", input="hi", stream=True)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        async with client.responses.stream(model="m", input="hello") as stream:
            assert (await stream.get_final_response()).output_text == "hello"
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "busy"}])

"""An agent as an endpoint of OpenAI's and Anthropic's APIs, for their official clients, without a Ray."""

import html
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from support.http_servers import Shop, ToldModel
from support.in_process import serving

from gym_serve import Gym
from gym_serve.gateway import pages
from gym_serve.graph import resolve
from gym_serve.graph.spec import GraphSpec

GRAPH: dict[str, Any] = {
    "models": {
        "policy": {"type": "scripted_model", "environments": []},
        "told": {"type": ToldModel},
    },
    "resources": {"shop": {"type": Shop}, "quiz": {"type": "mcqa"}, "weather": {"type": "simple_weather"}},
    "agents": {
        "clerk": {"type": "simple_agent", "model": "policy", "resources": "shop"},
        "guide": {"type": "simple_agent", "model": "policy", "resources": "weather"},
        "parrot": {"type": "simple_agent", "model": "told", "resources": "quiz"},
    },
}
FUNCTION: dict[str, Any] = {
    "name": "stock",
    "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
}
ASKED: Any = [{"role": "user", "content": "Have you got Tea?"}]
SAID = 'The tool says: {"characters":3.0,"price":1.0}'


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    with serving(lambda url: {"/web": resolve(GraphSpec.model_validate(GRAPH))}) as url:
        yield f"{url}/web"


@pytest.fixture
def clerk(base: str) -> Iterator[openai.OpenAI]:
    """The client of an agent whose policy calls the first tool, then says what it got."""
    with openai.OpenAI(base_url=f"{base}/clerk/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_chat_completion_is_what_the_episode_says_last(clerk: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "function": FUNCTION}]
    completion = clerk.chat.completions.create(model="clerk", messages=ASKED, tools=tools)
    (choice,) = completion.choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (SAID, None, "stop")
    whole = clerk.responses.create(model="clerk", input=ASKED, tools=[{"type": "function", **FUNCTION}])  # type: ignore[list-item]
    assert completion.usage is not None
    assert whole.usage is not None
    assert completion.usage.completion_tokens == whole.usage.output_tokens  # of both model calls


@pytest.mark.parametrize("include_usage", [True, False])
def test_a_chat_stream(clerk: openai.OpenAI, include_usage: bool) -> None:
    tools: Any = [{"type": "function", "function": FUNCTION}]
    stream = clerk.chat.completions.create(
        model="clerk",
        messages=ASKED,
        tools=tools,
        stream=True,
        stream_options={"include_usage": include_usage},
    )
    chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == SAID
    assert not any(delta.tool_calls for delta in deltas)  # the tool was run here
    assert [bool(chunk.usage) for chunk in chunks].count(True) == include_usage


@pytest.mark.parametrize("route", ["v1/responses", "v1/chat/completions", "v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_without_tools_those_of_the_environment_are_offered(base: str, route: str, stream: bool) -> None:
    asked = [{"role": "user", "content": "How is Paris?"}]
    body = {"model": "m", "stream": stream, "input" if route == "v1/responses" else "messages": asked}
    if route == "v1/messages":
        body["max_tokens"] = 99
    with httpx.Client(base_url=base, timeout=60) as http:
        assert "is cloudy, 18 degrees" in http.post(f"/guide/{route}", json=body).text
        if route != "v1/messages":  # which has no way to say that there are none
            assert "is cloudy" not in http.post(f"/guide/{route}", json={**body, "tools": []}).text


def test_the_models_of_an_agent(clerk: openai.OpenAI) -> None:
    (model,) = clerk.models.list()
    assert model.id == "clerk"
    assert clerk.chat.completions.create(model=model.id, messages=ASKED).choices


def test_a_message(base: str) -> None:
    import anthropic  # here, as it takes two seconds, of each worker that collects this file

    asked: Any = {"model": "clerk", "max_tokens": 99, "messages": ASKED}
    asked["tools"] = [{"name": "stock", "input_schema": FUNCTION["parameters"]}]
    with anthropic.Anthropic(base_url=f"{base}/clerk", api_key="none", max_retries=0) as client:
        message = client.messages.create(**asked)
        assert [block.type for block in message.content] == ["text"]
        assert message.content[0].text == SAID
        assert message.stop_reason == "end_turn"
        with client.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == SAID
            assert stream.get_final_message().usage == message.usage


@pytest.mark.parametrize("stream", [False, True])
def test_failures_are_the_clients_own(base: str, stream: bool) -> None:
    import anthropic  # here, as it takes two seconds, of each worker that collects this file

    busy: Any = [{"role": "user", "content": "refuse"}]
    with openai.OpenAI(base_url=f"{base}/parrot/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="3 is too hot"):
            client.chat.completions.create(model="m", messages=busy, stream=stream)
        with pytest.raises(openai.BadRequestError, match="messages"):
            client.chat.completions.create(model="m", messages="hello", stream=stream)  # type: ignore[call-overload]
    with (
        anthropic.Anthropic(base_url=f"{base}/parrot", api_key="none", max_retries=0) as client,
        pytest.raises(anthropic.BadRequestError, match="3 is too hot"),
    ):
        client.messages.create(model="m", max_tokens=9, messages=busy, stream=stream)


def test_what_a_real_endpoint_refuses_is_refused(base: str) -> None:
    """By a model without a model, in the form in which a refusal of a real one is passed on."""
    with openai.OpenAI(base_url=f"{base}/policy/v1", api_key="none", max_retries=0) as client:
        cases: list[tuple[str, dict[str, Any]]] = [
            (r"messages\[0\].*robot", {"messages": [{"role": "robot", "content": "hi"}]}),
            ("messages", {"messages": "hi"}),
            ("temperature", {"messages": ASKED, "temperature": 3}),
            ("top_p", {"messages": ASKED, "top_p": "1"}),
            ("max_output_tokens", {"messages": ASKED, "max_tokens": -1}),
            ("model", {"messages": ASKED, "model": 5}),
            (r"tools\[0\].name", {"messages": ASKED, "tools": [{"type": "function", "function": {}}]}),
            ("tool_choice", {"messages": ASKED, "tool_choice": "maybe"}),
        ]
        for place, body in cases:
            with pytest.raises(openai.BadRequestError, match=place) as caught:
                client.chat.completions.create(**{"model": "m", **body})
            assert caught.value.code == "bad_request"


def test_the_examples_of_the_documentation_can_be_run(base: str) -> None:
    """In a shell, as a reader would; what needs an id of its own is left out."""
    page = httpx.get(f"{base}/docs").text
    commands = [html.unescape(c) for c in re.findall(r"<pre class=command>(.*?)</pre>", page, re.DOTALL)]
    ends = ("/run", "/v1/responses", "/v1/chat/completions", "/v1/messages", "/v1/models", "/seed_session")
    tried = 0
    for command in commands:
        where = shlex.split(command)[2]
        if not where.endswith(ends) or "{id}" in where:
            continue
        ran = subprocess.run(
            ["bash", "-c", f"{command} -w '%{{http_code}}'"],
            env={**os.environ, "URL": base},
            capture_output=True,
            text=True,
            check=True,
        )
        assert ran.stdout.endswith("200"), (command, ran.stdout)
        tried += 1
    assert tried >= 15  # four routes of two agents and two models


def test_a_hostile_path_stays_a_word_of_its_command() -> None:
    path = "/$(touch x)'; rm -r <b>"
    operation = {"summary": "", "responses": {"200": {"content": {"a": {"schema": {}}}}}}
    document = {
        "components": {"schemas": {}},
        "paths": {path: {"get": operation}},
        "tags": [],
        "servers": [{"url": "/"}],
        "security": [{"token": []}],
    }
    (command,) = re.findall(r"<pre class=command>(.*?)</pre>", pages.reference(document))
    words = shlex.split(html.unescape(command))
    assert words == ["curl", "-s", f"$URL{path}", "-H", "Authorization: Bearer $GYM_TOKEN"]


def test_the_same_in_this_process() -> None:
    body = {"messages": ASKED, "tools": [{"type": "function", "function": FUNCTION}]}
    with Gym.from_graph(GRAPH, ray=False) as gym:
        completion = gym.call("clerk", "v1/chat/completions", body)
        assert completion["choices"][0]["message"]["content"] == SAID
        assert gym.call("clerk", "v1/models")["data"][0]["id"] == "clerk"
        message = gym.call("clerk", "v1/messages", {"messages": ASKED, "max_tokens": 9})
        assert message["role"] == "assistant"

import json

import pytest
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from pydantic import ValidationError

from gym_serve.deployments.chat_model import ChatModel
from gym_serve.types.errors import BadRequest, EndpointMisconfigured

USER = {"role": "user", "content": "hi"}


@pytest.fixture
async def ask(backend):
    """Asks a model with the given settings."""
    servers = []

    async def ask(body=None, *, chat=False, **settings):
        server = ChatModel(base_url=backend.url, model="served", **settings)
        servers.append(server)
        await server.start()
        if chat:
            return await server.chat_completions(body or {"messages": [USER]})
        return await server.responses(body or {"input": [USER]})

    yield ask
    for server in servers:
        await server.stop()


async def test_a_call(ask, backend):
    response = await ask({"input": [USER], "model": "asked", "temperature": 0.5})
    assert backend.requests == [
        ("/v1/chat/completions", {"messages": [USER], "model": "served", "temperature": 0.5})
    ]
    assert Response.model_validate(response).output_text == "Hello"
    assert response["model"] == "served"


async def test_chat_passes_through(ask, backend, completed):
    backend.replies = [completed("yes", extra=1)]
    completion = await ask({"messages": [USER], "model": "asked", "seed": 3}, chat=True)
    assert backend.bodies == [{"messages": [USER], "model": "served", "seed": 3}]
    assert completion == completed("yes", extra=1)


async def test_a_message_that_is_none(ask):
    with pytest.raises(BadRequest, match=r"messages\[0\]"):
        await ask({"messages": ["hi"]}, chat=True)


async def test_who_decides_the_sampling(ask, backend):
    metadata = {"extra_body": json.dumps({"top_k": 2, "min_p": 0.2}), "chat_template_kwargs": '{"b": 2}'}
    await ask(
        {"input": [USER], "temperature": 0.3, "top_p": 0.3, "metadata": metadata},
        extra_body={"seed": 1, "top_k": 1, "top_p": 0.1},
        chat_template_kwargs={"a": 1, "b": 1},
        sampling_overrides={"temperature": 1.0},
    )
    assert backend.bodies == [
        {
            "messages": [USER],
            "model": "served",
            "seed": 1,
            "top_k": 2,
            "min_p": 0.2,
            "top_p": 0.3,
            "temperature": 1.0,
            "chat_template_kwargs": {"a": 1, "b": 2},
            "metadata": metadata,
        }
    ]


async def test_broken_metadata_never_reaches_the_backend(ask, backend):
    with pytest.raises(BadRequest, match=r"metadata\.extra_body"):
        await ask({"input": [USER], "metadata": {"extra_body": "{"}})
    assert backend.requests == []


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("field", {"content": "a", "reasoning_content": "r", "reasoning": "r"}),
        ("think_tags", {"content": "<think>r</think>a"}),
        ("drop", {"content": "a"}),
    ],
)
async def test_forms_of_earlier_reasoning(ask, backend, form, expected):
    reasoning = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}]}
    said = {"role": "assistant", "content": "a"}
    await ask({"input": [reasoning, said, USER]}, reasoning_input=form)
    assert backend.bodies[0]["messages"][0] == {"role": "assistant", **expected}


@pytest.mark.parametrize(("parse", "kinds"), [(True, ["reasoning", "message"]), (False, ["message"])])
async def test_think_tags_of_the_answer(ask, backend, completed, parse, kinds):
    backend.replies = [completed("<think>r</think>a")]
    response = await ask(parse_think_tags=parse)
    assert [item["type"] for item in response["output"]] == kinds


async def test_roles_that_a_template_does_not_know(ask, backend):
    body = {"input": [{"role": "developer", "content": "d"}, USER]}
    await ask(body, replace_developer_role_with_system=True)
    assert [m["role"] for m in backend.bodies[0]["messages"]] == ["system", "user"]
    await ask(body)
    assert [m["role"] for m in backend.bodies[1]["messages"]] == ["developer", "user"]


async def test_context_overflow_is_an_answer(ask, backend):
    backend.replies = [(400, {"message": "This model's maximum context length is 10 tokens."})]
    response = await ask()
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    completion = await ask(chat=True)
    assert completion["choices"][0]["finish_reason"] == "length"
    assert ChatCompletion.model_validate(completion).choices[0].message.content == ""
    assert len(backend.requests) == 2


LOGPROBS = {"content": [{"token": "token_id:7", "logprob": -0.5}, {"token": "token_id:8", "logprob": -0.25}]}
BUNDLE = {"prompt_token_ids": [1, 2], "generation_token_ids": [7, 8], "generation_log_probs": [-0.5, -0.25]}


def with_tokens(completion, **choice):
    completion["choices"][0].update(logprobs=LOGPROBS, **choice)
    return completion


async def test_token_ids_in_the_answer(ask, backend, completed):
    backend.replies = [with_tokens(completed(prompt_token_ids=[1, 2]), token_ids=[7, 8])]
    response = await ask(return_token_ids=True)
    sent = backend.bodies[0]
    assert (sent["logprobs"], sent["top_logprobs"]) == (True, 0)
    assert (sent["return_token_ids"], sent["return_tokens_as_token_ids"]) == (True, True)
    assert {key: response["output"][-1][key] for key in BUNDLE} == BUNDLE
    completion = await ask(chat=True, return_token_ids=True)
    assert {key: completion["choices"][0]["message"][key] for key in BUNDLE} == BUNDLE


async def test_token_ids_of_an_engine_that_sends_the_prompt_with_the_choice(ask, backend, completed):
    backend.replies = [with_tokens(completed(), token_ids=[7, 8], prompt_token_ids=[1, 2])]  # as SGLang does
    response = await ask(return_token_ids=True)
    assert {key: response["output"][-1][key] for key in BUNDLE} == BUNDLE
    assert len(backend.requests) == 1


async def test_token_ids_of_engines_that_do_not_send_the_prompt(ask, backend, completed):
    backend.replies = [with_tokens(completed()), {"tokens": [1, 2]}]
    tool = {"type": "function", "name": "f", "parameters": {}}
    settings = {"return_token_ids": True, "inline_token_ids": False, "chat_template_kwargs": {"a": 1}}
    response = await ask({"input": [USER], "tools": [tool]}, **settings)
    assert {key: response["output"][-1][key] for key in BUNDLE} == BUNDLE
    assert "return_token_ids" not in backend.bodies[0]
    assert backend.requests[1] == (
        "/tokenize",
        {
            "model": "served",
            "messages": [USER],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
            "chat_template_kwargs": {"a": 1},
        },
    )


async def test_the_last_bundle_of_a_turn_goes_back(ask, backend, completed):
    backend.replies = [with_tokens(completed(prompt_token_ids=[1, 2]), token_ids=[7, 8])]
    said = {"role": "assistant", "content": "a", **BUNDLE}
    await ask({"input": [said, USER]}, return_token_ids=True)
    assert backend.bodies[0]["messages"][0] == {"role": "assistant", "content": "a", **BUNDLE}


async def test_missing_token_ids_are_an_error(ask, backend, completed):
    backend.replies = [completed(prompt_token_ids=[1])]
    with pytest.raises(EndpointMisconfigured, match="return_token_ids is on"):
        await ask(return_token_ids=True)


async def test_token_ids_are_for_one_choice(ask):
    with pytest.raises(BadRequest, match="one choice"):
        await ask({"messages": [USER], "n": 2}, chat=True, return_token_ids=True)


async def test_top_logprobs_imply_logprobs_and_streams_are_made_here(ask, backend):
    await ask({"input": [USER], "top_logprobs": 2, "metadata": {"extra_body": '{"stream": true}'}})
    sent = backend.bodies[0]
    assert (sent["logprobs"], sent["top_logprobs"], sent["stream"]) == (True, 2, False)


async def test_reasoning_alone_may_be_final(ask, backend):
    reasoning = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}]}
    response = await ask({"input": [USER, reasoning]}, sequential_reasoning_allowed=False)
    assert response["incomplete_details"] == {"reason": "content_filter"}
    assert backend.requests == []


async def test_audio_of_a_row(ask, backend):
    await ask({"input": [USER], "metadata": {"audio_data": "data:audio/wav;base64,AA"}})
    audio, text = backend.bodies[0]["messages"][0]["content"]
    assert audio == {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AA"}}
    assert text["text"] == "hi"


@pytest.mark.parametrize(
    "settings",
    [
        {"base_url": "host:8000", "model": "m"},
        {"base_url": [], "model": "m"},
        {"base_url": "http://h/v1"},
        {"base_url": "http://h/v1", "model": "m", "timeout": 0},
        {"base_url": "http://h/v1", "model": "m", "no_such_setting": 1},
    ],
)
def test_settings_are_checked(settings):
    with pytest.raises(ValidationError):
        ChatModel(**settings)


def test_a_trailing_slash_is_no_other_endpoint():
    assert ChatModel(base_url="http://h/v1/", model="m").config.base_url == ["http://h/v1"]


@pytest.mark.parametrize(
    ("settings", "sent"),
    [
        ({}, {"max_tokens": 9}),
        ({"max_tokens_field": "max_completion_tokens"}, {"max_completion_tokens": 9}),
        ({"sampling_overrides": {"max_tokens": None}}, {}),
    ],
)
async def test_the_limit_of_an_answer_as_the_endpoint_calls_it(backend, settings, sent):
    server = ChatModel(base_url=backend.url, model="m", **settings)
    await server.start()
    await server.responses({"input": "hi", "max_output_tokens": 9})
    await server.stop()
    assert {key: value for key, value in backend.bodies[0].items() if "tokens" in key} == sent


@pytest.mark.parametrize("key", ["sk-1\n", " sk-1\r\n", "\tsk-1"])
async def test_white_space_around_a_key_is_no_part_of_it(backend, key):
    server = ChatModel(base_url=backend.url, model="m", api_key=key, headers={"X-Team": key})
    await server.start()
    await server.responses({"input": "hi"})
    await server.stop()
    assert backend.headers[0]["Authorization"] == "Bearer sk-1"
    assert backend.headers[0]["X-Team"] == "sk-1"


def test_a_key_of_two_lines_is_refused_by_its_name():
    with pytest.raises(ValidationError, match="api_key") as caught:
        ChatModel.Config(base_url="http://x/v1", model="m", api_key="sk-1\nsk-2")
    assert "sk-2" not in str(caught.value)

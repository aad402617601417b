"""Chat requests and completions of a server that speaks Responses."""

import copy
import json

import pytest
from openai.types.chat import ChatCompletion

from gym_serve.types.errors import BadRequest, Unavailable
from gym_serve.types.protocols import (
    apply_sampling,
    chat_to_params,
    messages_to_items,
    response_to_chat,
    responses_to_chat,
)


def test_a_chat_request_as_responses():
    chat = {
        "model": "m",
        "messages": [{"role": "system", "content": None}, {"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "max_completion_tokens": 5,
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
        "verbosity": "high",
        "temperature": 0.0,
        "stop": ["END"],
        "seed": 3,
        "top_k": None,
        "n": 1,
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": False},
        "metadata": {"id": "7", "extra_body": '{"seed": 1, "min_p": 0.1}'},
    }
    before = copy.deepcopy(chat)
    params = chat_to_params(chat)
    metadata = params.pop("metadata")
    assert params == {
        "model": "m",
        "input": [
            {"type": "message", "role": "system", "content": ""},
            {"type": "message", "role": "user", "content": "hi"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": True}],
        "tool_choice": {"type": "function", "name": "f"},
        "parallel_tool_calls": False,
        "max_output_tokens": 5,
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}, "verbosity": "high"},
        "temperature": 0.0,
    }
    assert metadata["id"] == "7"
    assert json.loads(metadata["extra_body"]) == {"seed": 3, "min_p": 0.1, "stop": ["END"]}
    assert json.loads(metadata["chat_template_kwargs"]) == {"enable_thinking": False}
    assert chat == before
    # What chat sent arrives at a chat backend again.
    body = apply_sampling(responses_to_chat({**params, "metadata": metadata}))
    assert (body["seed"], body["stop"], body["response_format"]) == (3, ["END"], chat["response_format"])
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


def test_defaults_of_a_chat_request():
    assert chat_to_params({"messages": [], "max_tokens": 4}) == {
        "input": [],
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "max_output_tokens": 4,
    }


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ({"messages": [], "n": 2}, "one choice"),
        ({}, "`messages` must be a list, got None"),
        ({"messages": [{"role": "function", "content": "x"}]}, "role 'function'"),
        ({"messages": ["x"]}, "role None"),
        ({"messages": [{"role": "user", "content": [{"type": "blob"}]}]}, "'blob' has no Responses form"),
        (
            {"messages": [], "tools": [{"type": "custom", "custom": {}}]},
            r"`tools\[0\].function` must be an object, got None",
        ),
        ({"messages": [], "tools": {"a": 1}}, "`tools` must be a list, got {'a': 1}"),
    ],
)
def test_chat_requests_that_responses_cannot_say(chat, message):
    with pytest.raises(BadRequest, match=message):
        chat_to_params(chat)


def test_parts_and_tool_messages():
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "u"}},
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "v"}},
        {"type": "file", "file": {"file_id": "f"}},
    ]
    user, output = messages_to_items(
        [{"role": "user", "content": parts}, {"role": "tool", "tool_call_id": "c", "content": parts[:1]}]
    )
    assert user["content"] == [
        {"type": "input_text", "text": "a"},
        {"type": "input_image", "image_url": "u", "detail": "auto"},
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
        {"type": "input_video", "video_url": "v"},
        {"type": "input_file", "file_id": "f"},
    ]
    assert output == {
        "type": "function_call_output",
        "call_id": "c",
        "output": [{"type": "input_text", "text": "a"}],
        "status": "completed",
    }


def test_parts_that_are_written_as_in_responses_stay():
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "u"}]
    (user,) = messages_to_items([{"role": "user", "content": parts}])
    assert user == {"type": "message", "role": "user", "content": parts}


def said(text):
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


def test_a_response_as_a_completion():
    bundle = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-1.0]}
    reasoning = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}]}
    response = {"model": "m", "created_at": 9.7, "output": [reasoning, said("a"), {**CALL, **bundle}]}
    response["usage"] = {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 1},
        "output_tokens": 1,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 4,
    }
    completion = response_to_chat(response)
    choice = completion["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": "a",
        "refusal": None,
        "reasoning_content": "r",
        "reasoning": "r",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        **bundle,
    }
    assert completion["created"] == 9
    parsed = ChatCompletion.model_validate(completion)
    assert parsed.usage.prompt_tokens_details.cached_tokens == 1
    assert parsed.usage.completion_tokens_details.reasoning_tokens == 2


def test_calls_of_an_episode_that_were_run_are_not_asked_for_again():
    output = {"type": "function_call_output", "call_id": "c", "output": "1"}
    completion = response_to_chat({"output": [said("look"), CALL, output, said("done")]}, {"model": "asked"})
    assert completion["choices"][0]["message"] == {"role": "assistant", "content": "done", "refusal": None}
    assert completion["choices"][0]["finish_reason"] == "stop"
    assert completion["model"] == "asked"
    assert completion["usage"] is None
    stopped = response_to_chat({"output": [CALL, output]})["choices"][0]
    assert (stopped["message"]["content"], stopped["finish_reason"]) == ("", "stop")


@pytest.mark.parametrize(
    ("reason", "finish"),
    [("max_output_tokens", "length"), ("content_filter", "content_filter"), ("odd", "stop")],
)
def test_finish_reasons(reason, finish):
    completion = response_to_chat({"output": [said("a")], "incomplete_details": {"reason": reason}})
    assert completion["choices"][0]["finish_reason"] == finish


@pytest.mark.parametrize("response", [{}, {"output": [], "error": {"code": "x", "message": "boom"}}])
def test_a_failed_response_is_no_completion(response):
    with pytest.raises(Unavailable, match="failed"):
        response_to_chat(response)

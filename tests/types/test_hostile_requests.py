"""Whatever stands in a request, it is answered or refused as an invalid one: no other error comes out."""

import contextlib
import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.mutations import nested, paths, replaced, wrong

from gym_serve.servers import Call, ModelServer, ServerRunner
from gym_serve.servers.captures import OPEN
from gym_serve.types.errors import BadRequest, InvalidRequest
from gym_serve.types.protocols import (
    TOKEN_KEYS,
    apply_sampling,
    chat_to_params,
    inline_audio,
    message_to_params,
    responses_to_chat,
)

JSON = dict[str, Any]

BUNDLE = dict(zip(TOKEN_KEYS, ([1, 2], [3], [-0.5]), strict=True))
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
RESPONSES: JSON = {
    "model": "m",
    "instructions": "Be kind.",
    "input": [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "Hi"},
                {"type": "input_image", "image_url": "https://host/a.png", "detail": "low"},
                {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
                {"type": "input_video", "video_url": "https://host/a.mp4"},
                {"type": "input_file", "file_data": "AA", "filename": "a.pdf"},
            ],
        },
        {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "Hm"}], "content": []},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "<think>a</think>b"}],
            **BUNDLE,
        },
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": 1}'},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_text", "text": "1"}],
        },
    ],
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "description": "d", "strict": True}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "parallel_tool_calls": True,
    "temperature": 0.5,
    "max_output_tokens": 9,
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}, "verbosity": "low"},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "metadata": {
        "extra_body": '{"seed": 1}',
        "chat_template_kwargs": {"a": 1},
        "audio_data": "data:audio/wav;base64,AA",
    },
    "seed": 3,
}
CHAT: JSON = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Be kind."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Hi"},
                {"type": "image_url", "image_url": {"url": "https://host/a.png", "detail": "low"}},
                {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
                {"type": "video_url", "video_url": {"url": "https://host/a.mp4"}},
                {"type": "file", "file": {"file_data": "AA", "filename": "a.pdf"}},
            ],
        },
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "b"}, {"type": "refusal", "refusal": "No."}],
            "refusal": None,
            "reasoning_content": "Hm",
            "reasoning": "Hm",
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
            ],
            **BUNDLE,
        },
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    "max_completion_tokens": 9,
    "reasoning_effort": "low",
    "logprobs": True,
    "top_logprobs": 2,
    "n": 1,
    "seed": 3,
    "stop": ["END"],
    "logit_bias": {"5": 1},
    "chat_template_kwargs": {"a": 1},
    "metadata": {"extra_body": {"min_p": 0.1}, "audio_data": "data:audio/wav;base64,AA"},
}
MESSAGES: JSON = {
    "model": "m",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "Be kind."}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, IMAGE]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "d"},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": [IMAGE], "is_error": True},
                {"type": "tool_result", "tool_use_id": "c", "content": "1"},
            ],
        },
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA, "strict": True}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 2048},
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "stop_sequences": ["END"],
    "top_k": 5,
    "seed": 3,
    "temperature": 0.5,
}
SAMPLES = {"responses": RESPONSES, "chat/completions": CHAT, "messages": MESSAGES}


def through_responses(params: JSON) -> None:
    """What becomes of a Responses body on its way to a chat backend."""
    chat = responses_to_chat(params, reasoning="field", token_ids=True)
    apply_sampling(inline_audio(chat), extra_body={"seed": 1}, chat_template_kwargs={"b": 1})


WRONG = {
    "false": False,
    "zero": 0,
    "400 digits": 10**400,
    "over 64 bits": 2**64,
    "under 64 bits": -(2**63) - 1,
    "empty list": [],
    "empty object": {},
    "list of an object": [{}],
    "deep": nested(300),
    "half a character": "\ud83d",
}


@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize("protocol", SAMPLES)
def test_any_field_may_hold_anything(protocol: str, value: str) -> None:
    """Every field in turn, systematically."""
    for path in paths(SAMPLES[protocol]):
        convert(protocol, replaced(SAMPLES[protocol], path, WRONG[value]))


@given(st.data())
@pytest.mark.parametrize("protocol", SAMPLES)
def test_any_request_is_converted_or_refused(protocol: str, data: st.DataObject) -> None:
    convert(protocol, data.draw(wrong(SAMPLES[protocol])))


def convert(protocol: str, body: JSON) -> None:
    before = copy.deepcopy(body)
    with contextlib.suppress(BadRequest, InvalidRequest):
        if protocol == "messages":
            through_responses(message_to_params(body))
        elif protocol == "responses":
            through_responses(body)
        else:
            inline_audio(body)
            through_responses(chat_to_params(body, token_ids=True))
    assert body == before


class Chat(ModelServer):
    """Speaks chat, and says what it was asked last."""

    async def chat_completions(self, body: JSON) -> JSON:
        apply_sampling(inline_audio(body))
        said = {"role": "assistant", "content": str(body["messages"][-1:])}
        return {"choices": [{"index": 0, "message": said, "finish_reason": "stop"}]}


class Responses(ModelServer):
    """Speaks Responses, and repeats the assistant's items."""

    async def responses(self, body: JSON) -> JSON:
        given_ = body["input"] if isinstance(body["input"], list) else []
        repeated = [item for item in given_ if isinstance(item, dict) and item.get("role") != "user"]
        return {"output": repeated, "model": body.get("model")}


@settings(max_examples=50)
@given(st.data())
@pytest.mark.parametrize("server", [Chat, Responses])
@pytest.mark.parametrize("protocol", SAMPLES)
async def test_any_request_to_a_server_is_answered_or_refused(
    server: type[ModelServer], protocol: str, data: st.DataObject
) -> None:
    host = ServerRunner(server(name="policy", replica="r"))
    capture = (await host.dispatch(Call(OPEN))).session
    body = json.dumps(data.draw(wrong(SAMPLES[protocol]))).encode()
    for call in (Call(f"v1/{protocol}", body), Call(f"{OPEN}/v1/{protocol}", body, capture)):
        reply = await host.dispatch(call)
        assert reply.status in (200, 400, 422), reply.body
    with contextlib.suppress(BadRequest, InvalidRequest):
        async for part in host.stream(Call(f"v1/{protocol}", body[:-1] + b', "stream": true}')):
            assert part.endswith(b"\n\n")

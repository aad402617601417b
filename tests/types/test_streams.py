"""The streams, read by the official openai client."""

import json
from typing import get_args

import httpx
import openai
import pytest
from openai.types.responses import ResponseOutputItem, ResponseStreamEvent
from pydantic import TypeAdapter

from gym_serve.types.protocols import chat_chunks, chat_sse, message_item, response_events, responses_sse

REASONING = {
    "id": "rs_1",
    "type": "reasoning",
    "summary": [{"type": "summary_text", "text": "Oslo is cold."}],
}
DEEP = {
    "id": "rs_2",
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "deep"}],
}
MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "3 degrees ☃", "annotations": []}],
}
CALL = {
    "id": "fc_1",
    "type": "function_call",
    "call_id": "c1",
    "name": "weather",
    "arguments": '{"city": "Oslo"}',
    "status": "completed",
}
OUTPUT = {
    "id": "out_1",
    "type": "function_call_output",
    "call_id": "c1",
    "output": "3",
    "status": "completed",
}
ITEM_TYPES = {
    get_args(item.model_fields["type"].annotation)[0] for item in get_args(get_args(ResponseOutputItem)[0])
}
# Older clients do not know the outputs of tools, which an agent's response has.
TOOL_OUTPUTS = [OUTPUT] if OUTPUT["type"] in ITEM_TYPES else []
USAGE = {
    "input_tokens": 3,
    "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
    "output_tokens": 4,
    "output_tokens_details": {"reasoning_tokens": 2},
    "total_tokens": 7,
}


def response(*output, **fields):
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1.0,
        "model": "m",
        "status": "completed",
        "incomplete_details": None,
        "error": None,
        "output": list(output),
        "usage": USAGE,
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        **fields,
    }


def client(chunks):
    def answer(request):
        headers = {"content-type": "text/event-stream"}
        return httpx.Response(200, headers=headers, content=b"".join(chunks))

    transport = httpx.Client(transport=httpx.MockTransport(answer))
    return openai.OpenAI(api_key="none", base_url="http://test/v1", http_client=transport, max_retries=0)


def types(events):
    return [event["type"].removeprefix("response.") for event in events]


def test_the_order_of_events():
    events = list(response_events(response(REASONING, MESSAGE, CALL)))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert types(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []


def test_every_event_fits_the_client_types():
    schema = TypeAdapter(ResponseStreamEvent)
    refusal = {**MESSAGE, "id": "msg_2", "content": [{"type": "refusal", "refusal": "No."}]}
    for event in response_events(response(REASONING, DEEP, MESSAGE, CALL, *TOOL_OUTPUTS, refusal)):
        assert schema.validate_python(event).type == event["type"]


def test_responses_create_stream():
    whole = response(REASONING, DEEP, CALL, *TOOL_OUTPUTS, {**MESSAGE, "generation_token_ids": [1]})
    with client(responses_sse(response_events(whole))).responses.create(
        model="m", input="x", stream=True
    ) as stream:
        events = list(stream)
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == "3 degrees ☃"
    assert json.loads(events[-1].response.model_dump_json())["output"][-1]["generation_token_ids"] == [1]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    arguments = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
    assert (text, arguments) == ("3 degrees ☃", ['{"city": "Oslo"}'])


def test_responses_stream_accumulates():
    whole = response(REASONING, DEEP, MESSAGE, CALL, *TOOL_OUTPUTS)
    with client(responses_sse(response_events(whole))).responses.stream(model="m", input="x") as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots == ["3 degrees ☃"]
    assert [item.type for item in final.output] == [
        "reasoning",
        "reasoning",
        "message",
        "function_call",
        *(item["type"] for item in TOOL_OUTPUTS),
    ]
    assert final.usage.total_tokens == 7


@pytest.mark.parametrize(
    ("fields", "final"),
    [
        (
            {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
            "response.incomplete",
        ),
        ({"status": "failed", "error": {"code": "server_error", "message": "x"}}, "response.failed"),
    ],
)
def test_other_ends(fields, final):
    whole = response(message_item(""), **fields)
    with client(responses_sse(response_events(whole))).responses.create(
        model="m", input="x", stream=True
    ) as stream:
        events = list(stream)
    assert events[-1].type == final
    assert events[0].response.incomplete_details is None
    reason = events[-1].response.incomplete_details
    assert (reason and reason.model_dump()) == whole["incomplete_details"]


def test_items_without_an_id_get_one():
    anonymous = [{k: v for k, v in item.items() if k != "id"} for item in (MESSAGE, MESSAGE, CALL)]
    with client(responses_sse(response_events(response(*anonymous)))).responses.stream(
        model="m", input="x"
    ) as stream:
        final = stream.get_final_response()
    assert [item.id for item in final.output] == ["item_0", "item_1", "item_2"]
    assert "id" not in anonymous[0]


CHAT = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "message": {
                "role": "assistant",
                "content": "Let me look.",
                "reasoning_content": "Oslo?",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
                    {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
                ],
            },
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
}


def test_chat_create_stream():
    frames = chat_sse(chat_chunks(CHAT, False))
    stream = client(frames).chat.completions.create(model="m", messages=[], stream=True)
    chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "Let me look."
    assert [delta.reasoning_content for delta in deltas if hasattr(delta, "reasoning_content")] == ["Oslo?"]
    assert [call.id for delta in deltas for call in delta.tool_calls or ()] == ["c1", "c2"]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert all(chunk.usage is None for chunk in chunks)


def test_chat_stream_accumulates_with_usage():
    frames = chat_sse(chat_chunks(CHAT, True))
    options = {"include_usage": True}
    with client(frames).chat.completions.stream(model="m", messages=[], stream_options=options) as stream:
        final = stream.get_final_completion()
    message = final.choices[0].message
    assert message.content == "Let me look."
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("f", '{"a": 1}'),
        ("g", "{}"),
    ]
    assert final.usage.total_tokens == 7


def test_frames():
    assert list(responses_sse([{"type": "response.created", "n": 1}])) == [
        b'event: response.created\ndata: {"type":"response.created","n":1}\n\n'
    ]
    assert list(chat_sse([{"a": "\n"}])) == [b'data: {"a":"\\n"}\n\n', b"data: [DONE]\n\n"]


def test_half_a_character_is_replaced():
    (frame, _) = chat_sse([{"text": "\ud83d", "number": 2**70}])
    assert json.loads(frame.removeprefix(b"data: ")) == {"text": "\ufffd", "number": 2**70}

"""The events of a finished answer; the official clients read them in test_client_streams.py."""

import json
from typing import get_args

import pytest
from openai.types.responses import ResponseOutputItem, ResponseStreamEvent
from pydantic import TypeAdapter
from support.replies import call, message, response, thought

from gym_serve.types.protocols import chat_sse, message_item, response_events, responses_sse

REASONING = thought("Oslo is cold.")
DEEP = {
    "id": "rs_2",
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "deep"}],
}
MESSAGE = message("3 degrees ☃")
CALL = call("weather", '{"city": "Oslo"}')
OUTPUT = {
    "id": "out_1",
    "type": "function_call_output",
    "call_id": "c",
    "output": "3",
    "status": "completed",
}
ITEM_TYPES = {
    get_args(item.model_fields["type"].annotation)[0] for item in get_args(get_args(ResponseOutputItem)[0])
}
# Older clients do not know the outputs of tools, which an agent's response has.
TOOL_OUTPUTS = [OUTPUT] if OUTPUT["type"] in ITEM_TYPES else []


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
    refusal = message({"type": "refusal", "refusal": "No."}, id="msg_2")
    for event in response_events(response(REASONING, DEEP, MESSAGE, CALL, *TOOL_OUTPUTS, refusal)):
        assert schema.validate_python(event).type == event["type"]


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
    first, *_, last = response_events(whole)
    assert (last["type"], first["response"]["incomplete_details"]) == (final, None)
    assert last["response"]["incomplete_details"] == whole["incomplete_details"]


def test_items_without_an_id_get_one():
    anonymous = [{k: v for k, v in item.items() if k != "id"} for item in (MESSAGE, MESSAGE, CALL)]
    *_, last = response_events(response(*anonymous))
    assert [item["id"] for item in last["response"]["output"]] == ["item_0", "item_1", "item_2"]
    assert "id" not in anonymous[0]


def test_frames():
    assert list(responses_sse([{"type": "response.created", "n": 1}])) == [
        b'event: response.created\ndata: {"type":"response.created","n":1}\n\n'
    ]
    assert list(chat_sse([{"a": "\n"}])) == [b'data: {"a":"\\n"}\n\n', b"data: [DONE]\n\n"]


def test_half_a_character_is_replaced():
    (frame, _) = chat_sse([{"text": "\ud83d", "number": 2**70}])
    assert json.loads(frame.removeprefix(b"data: ")) == {"text": "\ufffd", "number": 2**70}

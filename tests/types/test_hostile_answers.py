"""Whatever a backend answers becomes an answer or `Unavailable`: no crash, and never the client's fault."""

import contextlib
from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.mutations import wrong

from gym_serve.types.errors import Unavailable
from gym_serve.types.protocols import (
    TOKEN_KEYS,
    ChunkJoiner,
    CompletionStream,
    MessageStream,
    ResponseStream,
    chat_chunks,
    chat_to_response,
    message_events,
    response_events,
    response_to_chat,
    response_to_message,
)

JSON = dict[str, Any]

PARAMS = {"input": "x", "top_logprobs": 1}
ENTRY = {"token": "token_id:3", "logprob": -0.5, "bytes": None, "top_logprobs": []}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
COMPLETION: JSON = {
    "id": "x",
    "created": 1,
    "model": "m",
    "prompt_token_ids": [1, 2],
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "stop_reason": "END",
            "token_ids": [3],
            "logprobs": {"content": [ENTRY]},
            "message": {
                "role": "assistant",
                "content": "<think>a</think>b",
                "reasoning": "Hm",
                "refusal": "No.",
                "tool_calls": [CALL],
            },
        }
    ],
    "usage": {
        "prompt_tokens": 2,
        "completion_tokens": 1,
        "total_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 1},
    },
}
RESPONSE: JSON = {
    "created_at": 1.0,
    "model": "m",
    "output": [
        {"type": "function_call_output", "call_id": "c", "output": "1"},
        {
            "type": "reasoning",
            "id": "rs",
            "summary": [{"type": "summary_text", "text": "Hm"}],
            "encrypted_content": "s",
        },
        {
            "type": "message",
            "id": "msg",
            "role": "assistant",
            "content": [
                {"type": "output_text", "text": "b", "logprobs": [ENTRY]},
                {"type": "refusal", "refusal": "No."},
            ],
        },
        {
            "type": "function_call",
            "id": "fc",
            "call_id": "c",
            "name": "f",
            "arguments": '{"x": 1}',
            **dict(zip(TOKEN_KEYS, ([1, 2], [3], [-0.5]), strict=True)),
        },
    ],
    "incomplete_details": {"reason": "max_output_tokens"},
    "stop_sequence": "END",
    "error": None,
    "usage": {
        "input_tokens": 2,
        "input_tokens_details": {"cached_tokens": 1},
        "output_tokens": 1,
        "total_tokens": 3,
    },
}


def in_other_protocols(response: JSON) -> None:
    chunks = list(chat_chunks(response_to_chat(response), include_usage=True))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    events = [event["type"] for event in message_events(response_to_message(response, {}))]
    assert (events[0], events[-1]) == ("message_start", "message_stop")


def in_other_streams(events: Iterable[JSON]) -> None:
    streams = CompletionStream({}), MessageStream({"tools": [{"name": "f"}]})
    for event in events:
        for stream in streams:
            assert all(isinstance(sent, dict) for sent in stream.event(event))


@given(wrong(COMPLETION))
def test_a_completion(completion: JSON) -> None:
    with contextlib.suppress(Unavailable):
        response = chat_to_response(completion, PARAMS, parse_think=True)
        in_other_protocols(response)
        in_other_streams(response_events(response))


@given(wrong({"chunks": list(chat_chunks(COMPLETION, include_usage=True))}))
def test_a_stream(stream: JSON) -> None:
    chunks = stream["chunks"]
    joiner, events = ChunkJoiner(), ResponseStream(PARAMS, parse_think=True)
    with contextlib.suppress(Unavailable):
        for chunk in chunks if isinstance(chunks, list) else ():
            joiner.add(chunk)
            in_other_streams(events.chunk(chunk))
        last, response = events.finish(chat_to_response(joiner.completion(), PARAMS, parse_think=True))
        in_other_streams(last)
        in_other_protocols(response)


@given(wrong(RESPONSE))
def test_a_response(response: JSON) -> None:
    with contextlib.suppress(Unavailable):
        assert response_to_chat(response)["object"] == "chat.completion"
    with contextlib.suppress(Unavailable):
        assert response_to_message(response, {})["type"] == "message"


@given(wrong({"events": list(response_events(RESPONSE))}))
def test_events(stream: JSON) -> None:
    events = stream["events"]
    with contextlib.suppress(Unavailable):
        in_other_streams(
            event for event in (events if isinstance(events, list) else ()) if isinstance(event, dict)
        )


@given(st.text(max_size=8))
def test_a_call_with_any_arguments(arguments: str) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    in_other_protocols({"output": [call]})

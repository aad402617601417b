"""Streams made from the chunks of a backend say the same as the finished answer."""

import contextlib
import json
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from gym_serve.types.errors import GymError
from gym_serve.types.protocols import (
    ChunkJoiner,
    CompletionStream,
    MessageStream,
    ResponseStream,
    chat_chunks,
    chat_to_response,
    message_events,
    response_to_chat,
    response_to_message,
    split_think,
)
from gym_serve.types.protocols.content import ThinkSplitter

EVENT = TypeAdapter(ResponseStreamEvent)
TEXT = st.text(st.sampled_from("ab <>/think\n"), max_size=12) | st.lists(
    st.sampled_from(["<think>", "</think>", "</THINKING >", "<th", "ink>", "a", "<", "</", "\n"]), max_size=8
).map("".join)
PLAIN = st.text("abc ", max_size=8)


def pieces_of(text, cuts):
    """A text, cut at the given places."""
    at = sorted({cut % (len(text) + 1) for cut in cuts})
    return [text[i:j] for i, j in zip([0, *at], [*at, len(text)], strict=True) if i < j]


CUTS = st.lists(st.integers(0, 40), max_size=6)


def in_parts(splitter, parts):
    """The reasoning and the text that a splitter finds."""
    found = []
    for part in parts:
        pieces = splitter.add(part)
        if splitter.retracts:  # what was told as text since the last reasoning was reasoning
            last = max(
                (i for i, (is_reasoning, text) in enumerate(found) if is_reasoning and text), default=-1
            )
            found[last + 1 :] = [(True, text) for _, text in found[last + 1 :]]
        found += pieces
    found.append(splitter.end())
    return tuple("".join(text for is_one, text in found if is_one == kind) for kind in (True, False))


@given(TEXT, CUTS)
def test_tags_in_parts_are_found_as_in_the_whole(text, cuts):
    blocks, plain = split_think(text, is_answer=True)
    assert in_parts(ThinkSplitter(), pieces_of(text, cuts)) == ("".join(blocks), plain)


@given(TEXT, CUTS)
def test_a_text_that_begins_within_reasoning(text, cuts):
    closed = re.search(r"</think(ing)?\s{0,8}>", text, re.IGNORECASE)  # else the model did not think
    blocks, plain = split_think(f"<think>{text}", is_answer=True) if closed else ([], text)
    assert in_parts(ThinkSplitter(is_open=True), pieces_of(text, cuts)) == ("".join(blocks), plain)


def is_told_too_late(chunks):
    """Whether text that was streamed turns out to have been reasoning, as the whole answer says."""
    deltas = (choice["delta"] for chunk in chunks for choice in chunk["choices"])
    text = "".join(delta.get("content") or "" for delta in deltas)
    return "</think" in split_think(text)[1].lower()


@st.composite
def streams(draw):
    """The chunks of an answer."""
    cuts = draw(CUTS)
    deltas = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": part} for part in pieces_of(draw(PLAIN), cuts)]
    deltas += [{"content": part} for part in pieces_of(draw(TEXT), cuts)]
    for index in range(draw(st.integers(0, 2))):
        function = {"name": draw(st.sampled_from("fg")), "arguments": ""}
        deltas.append({"tool_calls": [{"index": index, "id": f"call_{index}", "function": function}]})
        arguments = json.dumps({"x": draw(PLAIN)})
        for part in pieces_of(arguments, cuts):
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": part}}]})
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    reason = draw(st.sampled_from(["stop", "length", "tool_calls"]))
    chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    usage = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    return [*chunks, {**head, "choices": [], "usage": usage}]


def streamed(chunks, parse_think):
    """The events, the response at their end, and the response of the finished answer."""
    joiner, stream = ChunkJoiner(), ResponseStream({"input": "x", "model": "m"}, parse_think=parse_think)
    events = []
    for chunk in chunks:
        joiner.add(chunk)
        events += stream.chunk(chunk)
    finished = chat_to_response(joiner.completion(), {"input": "x", "model": "m"}, parse_think=parse_think)
    last, response = stream.finish(finished)
    return [*events, *last], response, finished


def said(response):
    """What a verifier reads of it."""
    reasoning = [p["text"] for i in response["output"] for p in i.get("summary", []) if p["text"]]
    text = [p["text"] for i in response["output"] if i["type"] == "message" for p in i["content"]]
    calls = [
        (i["call_id"], i["name"], i["arguments"]) for i in response["output"] if i["type"] == "function_call"
    ]
    return "".join(reasoning), "".join(text), calls, response["usage"], response["incomplete_details"]


@given(streams(), st.booleans())
def test_a_responses_stream(chunks, parse_think):
    events, response, finished = streamed(chunks, parse_think)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
    assert events[-1]["response"] == response
    assert said(response) == said(finished)
    open_item, done = None, []
    for event in events:
        if event is not events[-1]:  # its usage tells that details are unknown
            EVENT.validate_python(event)
        if event["type"] == "response.output_item.added":
            assert open_item is None
            open_item = event["item"]["id"]
        elif event["type"] == "response.output_item.done":
            assert event["item"]["id"] == open_item
            open_item = None
            done.append(event["item"])
        elif "item_id" in event:
            assert event["item_id"] == open_item
    assert done == response["output"]
    if parse_think and is_told_too_late(chunks):
        return
    for kind, field in (("output_text", "text"), ("function_call_arguments", "arguments")):
        deltas = [e["delta"] for e in events if e["type"] == f"response.{kind}.delta"]
        whole = [e[field] for e in events if e["type"] == f"response.{kind}.done"]
        assert "".join(deltas) == "".join(whole)


def message_of(events):
    """What a client of the Messages API makes of a stream."""
    message, arguments = {}, {}
    for event in events:
        kind = event["type"]
        if kind == "message_start":
            assert not message
            message = {**event["message"], "content": []}
        elif kind == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(dict(event["content_block"]))
        elif kind == "content_block_delta":
            assert event["index"] == len(message["content"]) - 1
            block, delta = message["content"][-1], event["delta"]
            if delta["type"] == "input_json_delta":
                arguments[event["index"]] = arguments.get(event["index"], "") + delta["partial_json"]
            else:
                field = {"text_delta": "text", "thinking_delta": "thinking"}.get(delta["type"], "signature")
                block[field] += delta[field]
        elif kind == "message_delta":
            message |= {**event["delta"], "usage": event["usage"]}
    for index, text in arguments.items():
        message["content"][index]["input"] = json.loads(text)
    assert events[-1]["type"] == "message_stop"
    return {**message, "id": None}


@given(streams())
def test_a_messages_stream(chunks):
    assume(not is_told_too_late(chunks))
    events, response, _ = streamed(chunks, True)
    stream = MessageStream({"model": "m"})
    made = [out for event in events for out in stream.event(event)]
    message = response_to_message(response, {"model": "m"})
    assert message_of(made) == message_of(list(message_events(message))) == {**message, "id": None}


@given(streams())
def test_a_chat_stream(chunks):
    """A stream that becomes Responses events, and from those chunks again, says the same."""
    assume(not is_told_too_late(chunks))
    events, response, _ = streamed(chunks, True)
    stream, joiner = CompletionStream({"model": "m"}), ChunkJoiner()
    for event in events:
        for chunk in stream.event(event):
            ChatCompletionChunk.model_validate(chunk)
            joiner.add(chunk)
    (choice,) = joiner.completion()["choices"]
    (whole,) = response_to_chat(response)["choices"]
    assert choice["finish_reason"] == whole["finish_reason"]
    for key in ("role", "content", "reasoning_content", "tool_calls"):
        assert (choice["message"].get(key) or None) == (whole["message"].get(key) or None)


@given(streams())
def test_joined_chunks_are_the_completion(chunks):
    joiner = ChunkJoiner()
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
        joiner.add(chunk)
    completion, again = joiner.completion(), ChunkJoiner()
    for chunk in chat_chunks(completion, include_usage=True):
        again.add(chunk)
    assert again.completion() == completion


def test_token_ids_and_log_probabilities_are_appended():
    joiner = ChunkJoiner()
    for token in (7, 8):
        content = [{"token": f"token_id:{token}", "logprob": -0.5}]
        choice = {
            "index": 0,
            "delta": {"content": "x"},
            "logprobs": {"content": content},
            "token_ids": [token],
            "finish_reason": "length",
        }
        joiner.add({"choices": [choice], "prompt_token_ids": [1]})
    (choice,) = joiner.completion()["choices"]
    assert choice["token_ids"] == [7, 8]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["token_id:7", "token_id:8"]
    assert joiner.completion()["prompt_token_ids"] == [1]


JSON_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
DELTA = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(["content", "reasoning", "refusal", "tool_calls", "role"], JSON_VALUE)
)
CALLS = st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(["index", "id", "function"], JSON_VALUE)))
CHOICE = st.fixed_dictionaries(
    {},
    optional={
        "delta": DELTA | CALLS.map(lambda c: {"tool_calls": c}),
        "index": JSON_VALUE,
        "logprobs": JSON_VALUE,
    },
)


@pytest.mark.thorough
@given(st.lists(JSON_VALUE | st.lists(CHOICE).map(lambda choices: {"choices": choices})))
def test_no_chunk_breaks_the_stream(chunks):
    joiner, stream = ChunkJoiner(), ResponseStream({"input": "x"}, parse_think=True)
    with contextlib.suppress(GymError):
        for chunk in chunks:
            joiner.add(chunk)
            assert all(event["type"].startswith("response.") for event in stream.chunk(chunk))
        whole = chat_to_response(joiner.completion(), {"input": "x"}, parse_think=True)
        _, response = stream.finish(whole)
        assert response["object"] == "response"

"""Anthropic Messages to Responses and back."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_serve.types.errors import BadRequest, GymError
from gym_serve.types.protocols import (
    error_message,
    message_events,
    message_to_params,
    response_to_message,
    responses_to_chat,
)

TEXT = st.text("abc<", min_size=1, max_size=6)
THINKING = st.tuples(TEXT, TEXT).map(lambda t: {"type": "thinking", "thinking": t[0], "signature": t[1]})
REDACTED = TEXT.map(lambda t: {"type": "redacted_thinking", "data": t})
SAID = TEXT.map(lambda t: {"type": "text", "text": t, "citations": None})
CALL = st.tuples(TEXT, TEXT, st.dictionaries(TEXT, st.integers(0, 9), max_size=2)).map(
    lambda c: {"type": "tool_use", "id": c[0], "name": c[1], "input": c[2]}
)


def official(message):
    """Check a message by the types of Anthropic's client, which take seconds to import."""
    from anthropic.types import Message

    Message.model_validate(message)


@given(st.lists(THINKING | REDACTED | SAID | CALL, min_size=1, max_size=6))
def test_a_turn_survives(content):
    params = message_to_params({"messages": [{"role": "assistant", "content": content}]})
    message = response_to_message({"output": params["input"], "model": "m"}, {})
    official(message)
    assert message["content"] == content
    assert message["stop_reason"] == ("tool_use" if content and _called(content) else "end_turn")


ARGUMENTS = st.sampled_from(['{"x": 1}', "{}", "{oops", "[1]", '{"INVALID_JSON": "{"}'])
REASONING = st.tuples(st.lists(TEXT, max_size=3), st.none() | TEXT).map(
    lambda r: {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": text} for text in r[0]],
        "encrypted_content": r[1],
    }
)
MESSAGE = st.lists(
    TEXT.map(lambda text: {"type": "output_text", "text": text})
    | TEXT.map(lambda text: {"type": "refusal", "refusal": text}),
    max_size=2,
).map(lambda content: {"type": "message", "role": "assistant", "content": content})
FUNCTION_CALL = st.tuples(TEXT, TEXT, ARGUMENTS).map(
    lambda c: {"type": "function_call", "call_id": c[0], "name": c[1], "arguments": c[2]}
)


def read(items):
    """What a verifier or a trainer reads of an answer; that a text refuses is said by the stop reason."""
    seen = []
    for item in items:
        if item["type"] == "reasoning":
            signature = item.get("encrypted_content")
            seen += [("thought", part["text"], signature) for part in item["summary"]]
            seen += [("hidden", signature)] if signature and not item["summary"] else []
        elif item["type"] == "message":
            seen += [("said", part.get("text") or part.get("refusal")) for part in item["content"]]
        else:
            seen.append(("called", item["call_id"], item["name"], item["arguments"]))
    return seen


@given(st.lists(REASONING | MESSAGE | FUNCTION_CALL, max_size=6))
def test_an_answer_survives(answer):
    message = response_to_message({"output": answer}, {"model": "m"})
    official(message)
    back = message_to_params({"messages": [{"role": "assistant", "content": message["content"]}]})["input"]
    assert read(back) == read(answer)
    signatures = [item["encrypted_content"] for item in answer if item.get("encrypted_content")]
    if len(set(signatures)) == len(signatures):  # each is of one item
        assert [item["encrypted_content"] for item in back if item.get("encrypted_content")] == signatures
    refused = any(part["type"] == "refusal" for item in answer for part in item.get("content", ()))
    if not _called(message["content"]):
        assert message["stop_reason"] == ("refusal" if refused else "end_turn")


PICTURE = st.sampled_from(
    [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}},
        {"type": "image", "source": {"type": "url", "url": "https://host/a.png"}},
    ]
)
PARTS = st.lists(PICTURE | TEXT.map(lambda text: {"type": "text", "text": text}), max_size=3)
RESULT = st.tuples(TEXT, TEXT | PARTS, st.booleans()).map(
    lambda r: {"type": "tool_result", "tool_use_id": r[0], "content": r[1], "is_error": r[2]}
)


def shown(part):
    if part["type"] == "text":
        return part["text"]
    source = part["source"]
    return source.get("url") or f"data:{source['media_type']};base64,{source['data']}"


def told(content):
    """The texts and images of Responses content."""
    parts = [{"text": content}] if isinstance(content, str) else content
    return [part.get("text") or part.get("image_url") for part in parts if part != {"text": ""}]


@given(st.lists(PICTURE | RESULT | TEXT.map(lambda text: {"type": "text", "text": text}), max_size=5))
def test_results_and_images_arrive(content):
    items = message_to_params({"messages": [{"role": "user", "content": content}]})["input"]
    results = [block for block in content if block["type"] == "tool_result"]
    outputs = [item for item in items if item["type"] == "function_call_output"]
    assert [item["call_id"] for item in outputs] == [block["tool_use_id"] for block in results]
    for item, block in zip(outputs, results, strict=True):
        assert item["status"] == ("incomplete" if block["is_error"] else "completed")
        given_ = block["content"]
        wanted = [given_] if isinstance(given_, str) else list(map(shown, given_))
        if all(isinstance(part, str) or part["type"] == "text" for part in given_):
            assert "".join(told(item["output"])) == "".join(wanted)
        else:
            assert told(item["output"]) == wanted
    said = [part for item in items if item["type"] == "message" for part in told(item["content"])]
    assert said == [shown(block) for block in content if block["type"] != "tool_result"]
    chat = responses_to_chat({"input": items})["messages"]
    assert len(chat) == len(items)


def _called(content):
    return any(block["type"] == "tool_use" for block in content)


def test_a_request():
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "4"}]}
    body = {
        "model": "m",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "2+2"}, image]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}}],
            },
            {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 2048},
        "stop_sequences": ["END"],
        "top_k": 5,
        "temperature": 0.5,
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    }
    params = message_to_params(body)
    assert params["metadata"] == {"extra_body": '{"stop": ["END"], "top_k": 5}'}
    chat = responses_to_chat(params)
    assert [m["role"] for m in chat["messages"]] == ["system", "user", "assistant", "tool", "user"]
    assert chat["messages"][0]["content"] == "Be brief.\n\nBe kind."
    assert chat["messages"][1]["content"][1]["image_url"]["url"] == "data:image/png;base64,AA"
    assert chat["messages"][3] == {"role": "tool", "content": "4", "tool_call_id": "c"}
    assert (chat["tool_choice"], chat["parallel_tool_calls"]) == ("required", False)
    assert (chat["max_tokens"], chat["reasoning_effort"], chat["temperature"]) == (9, "low", 0.5)
    assert chat["response_format"]["json_schema"]["schema"] == {"type": "object"}


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({}, "messages"),
        ({"messages": [1]}, r"messages\[0\]"),
        ({"messages": [{"role": "tool", "content": ""}]}, "role 'tool'"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, r"content\[0\].*document"),
        (
            {"messages": [], "tools": [{"type": "web_search_20250305", "name": "s"}]},
            r"tools\[0\].*web_search",
        ),
        ({"messages": [], "tools": [{"name": "f"}], "tool_choice": {"type": "x"}}, "tool_choice"),
    ],
)
def test_what_has_no_form_is_named(body, where):
    with pytest.raises(BadRequest, match=where):
        message_to_params(body)


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ({"incomplete_details": {"reason": "max_output_tokens"}}, "max_tokens"),
        ({"incomplete_details": {"reason": "content_filter"}}, "refusal"),
        ({}, "end_turn"),
    ],
)
def test_reasons_to_stop(response, reason):
    assert response_to_message({**response, "output": []}, {"model": "m"})["stop_reason"] == reason


def test_usage_and_arguments_that_are_none():
    usage = {"input_tokens": 10, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 2}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{oops"}
    message = response_to_message({"output": [call], "usage": usage}, {})
    assert message["content"][0]["input"] == {"INVALID_JSON": "{oops"}
    assert (message["usage"]["input_tokens"], message["usage"]["cache_read_input_tokens"]) == (6, 4)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (429, "rate_limit_error"),
        (503, "overloaded_error"),
        (500, "api_error"),
    ],
)
def test_errors(status, kind):
    body = error_message(status, {"code": "x", "message": "y"})
    assert body == {"type": "error", "error": {"code": "x", "message": "y", "type": kind}}


JSON_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ITEM = st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "reasoning", "function_call", "x"]), "role": st.just("assistant")},
    optional=dict.fromkeys(
        ["content", "summary", "call_id", "name", "arguments", "encrypted_content"], JSON_VALUE
    ),
)


@given(JSON_VALUE | st.lists(JSON_VALUE | ITEM), JSON_VALUE)
def test_no_response_breaks_the_conversion(output, usage):
    with contextlib.suppress(GymError):
        events = list(message_events(response_to_message({"output": output, "usage": usage}, {})))
        assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")

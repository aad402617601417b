import copy

import orjson
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.export_cases import WEATHER_TOOL, call, episode, episodes, reasoning, returned, rollout, said

from gym_serve.interop.export import NotExportable, Rollout, export
from gym_serve.interop.export.chat_messages import conversation, decoded_arguments, prompt_messages, steps
from gym_serve.types.errors import InvalidRequest


def read(*output, **fields):
    return Rollout.read(rollout(output, **fields))


def test_prompt_completion_and_tools():
    chat = conversation(Rollout.read(episode()))
    assert chat.prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Oslo?"},
    ]
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert chat.completion == [
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": "Ask the tool.",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3 degrees"},
        {"role": "assistant", "content": "3 degrees.", "reasoning_content": "Now answer."},
    ]
    assert [tool["function"]["name"] for tool in chat.tools] == ["weather"]
    assert chat.messages == chat.prompt + chat.completion


def test_instructions_and_a_string_as_input():
    raw = rollout([said("3")])
    raw["responses_create_params"] = {"input": "Weather?", "instructions": "Be brief."}
    assert prompt_messages(Rollout.read(raw)) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
    ]


def test_forms_of_reasoning_and_arguments():
    rollout = Rollout.read(episode())
    tagged = conversation(rollout, reasoning="think_tags").completion[-1]
    assert tagged == {"role": "assistant", "content": "<think>Now answer.</think>3 degrees."}
    assert "reasoning_content" not in conversation(rollout, reasoning="drop").completion[-1]
    (made,) = conversation(rollout, arguments="object").completion[0]["tool_calls"]
    assert made["function"]["arguments"] == {"city": "Oslo"}
    for option in ({"reasoning": "loud"}, {"arguments": "xml"}):
        with pytest.raises(InvalidRequest, match=r"must be '.*' or '.*', got '(loud|xml)'"):
            export([], "sft", "out.jsonl", **option)


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "[1]",
        "5",
        "{'city': 1}",
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a": 1, "a": 2}',
        '{"a": "\\ud800"}',
        '{"a": 123456789012345678901234567890}',
        '{"a": ' + "[" * 5000 + "]" * 5000 + "}",
    ],
)
def test_arguments_that_decoding_would_change_stay_text(arguments):
    assert decoded_arguments(arguments) == arguments


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.integers(-5, 5) | st.booleans()))
def test_arguments_decode_to_what_was_meant(value):
    assert decoded_arguments(orjson.dumps(value).decode()) == value


def test_the_end_that_teaches_nothing_is_cut():
    chat = conversation(read(said("Let me look."), call(), returned(), said("")))
    assert [message["role"] for message in chat.completion] == ["assistant"]
    with pytest.raises(NotExportable) as error:
        conversation(read(said("")))
    assert error.value.reason == "no_answer"


def test_a_call_alone_has_no_content_and_media_stay_parts():
    image = {"type": "input_image", "image_url": "https://host/a.png"}
    chat = conversation(
        read(call(), returned(output=[{"type": "input_text", "text": "see"}, image]), said("ok"))
    )
    assert chat.completion[0]["content"] is None
    assert [part["type"] for part in chat.completion[1]["content"]] == ["text", "image_url"]


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ([{"type": "mcp_call"}], "unsupported_item"),
        ([{"type": ["message"], "role": "assistant"}], "unsupported_item"),
        ([call(arguments=None)], "unsupported_item"),
        ([returned(output=5)], "unsupported_item"),
        ([returned(output=[{"type": "input_text", "text": 5}])], "unsupported_item"),
        ([{}], "unsupported_item"),
    ],
)
def test_items_that_chat_cannot_say(output, reason):
    for convert in (conversation, steps):
        with pytest.raises(NotExportable) as error:
            convert(read(*output))
        assert error.value.reason == reason


@pytest.mark.parametrize("params", [{}, {"input": []}, {"input": 5}, {"input": [{"role": "tool"}]}])
def test_prompts_that_are_none(params):
    raw = {**rollout([said("x")]), "responses_create_params": params}
    with pytest.raises(NotExportable):
        conversation(Rollout.read(raw))


def test_hosted_tools_have_no_chat_form():
    with pytest.raises(NotExportable, match="web_search"):
        conversation(read(said("x"), tools=[WEATHER_TOOL, {"type": "web_search"}]))


def test_a_step_is_one_model_call():
    found = steps(Rollout.read(episode()))
    assert [(step.message["role"], step.tokens is not None) for step in found] == [
        ("assistant", True),
        ("tool", False),
        ("assistant", True),
    ]
    # Without tokens, calls in a row cannot be told apart.
    assert len(steps(read(reasoning("hm"), said("a"), call()))) == 1


def test_steps_with_tokens_end_where_their_call_did():
    tokens = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-1.0]}
    more = {**tokens, "prompt_token_ids": [1, 2]}
    found = steps(read({**reasoning("hm"), **tokens}, {**said("a"), **more}))
    assert [step.message["content"] for step in found] == ["", "a"]
    assert [step.tokens.prompt for step in found] == [[1], [1, 2]]


def told_by_row(raw):
    for item in raw["response"]["output"]:
        if item["type"] == "reasoning":
            yield "reasoning", "\n\n".join(part["text"] for part in item["summary"] if part["text"])
        elif item["type"] == "message":
            yield "content", item["content"][0]["text"]
        elif item["type"] == "function_call":
            yield "arguments", item["arguments"]
        else:
            yield "output", item["output"]


def told_by(messages):
    for message in messages:
        yield "reasoning", message.get("reasoning_content")
        yield "output" if message["role"] == "tool" else "content", message["content"]
        for made in message.get("tool_calls", []):
            yield "arguments", made["function"]["arguments"]


@given(episodes(with_tokens=True))
def test_the_steps_say_everything_in_order(raw):
    before = copy.deepcopy(raw)
    messages = [step.message for step in steps(Rollout.read(raw))]
    assert [told for told in told_by(messages) if told[1]] == [told for told in told_by_row(raw) if told[1]]
    assert raw == before


@given(episodes())
def test_a_conversation_says_everything_up_to_the_last_turn(raw):
    assume(any(text for what, text in told_by_row(raw) if what != "output"))
    chat = conversation(Rollout.read(raw))
    # Calls of the model in a row are one assistant message: its texts are joined, per kind.
    for kind in ("content", "arguments", "output"):
        given_text = "".join(text for what, text in told_by_row(raw) if what == kind)
        text = "".join(text or "" for what, text in told_by(chat.completion) if what == kind)
        assert text == given_text if kind != "output" else given_text.startswith(text)
    blocks = [text for what, text in told_by_row(raw) if what == "reasoning" and text]
    kept = [message["reasoning_content"] for message in chat.completion if message.get("reasoning_content")]
    assert "\n\n".join(kept) == "\n\n".join(blocks)

import copy

import pytest

from gym_serve.types.errors import BadRequest
from gym_serve.types.protocols import responses_to_chat

USER = {"role": "user", "content": "How warm is it in Oslo?"}
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Weather of a city",
    "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def reasoning(*texts):
    return {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [{"type": "summary_text", "text": t} for t in texts],
    }


def said(text):
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}


def call(call_id="c1", city="Oslo"):
    return {
        "type": "function_call",
        "call_id": call_id,
        "name": "weather",
        "arguments": f'{{"city": "{city}"}}',
    }


def output(call_id="c1", text="3 degrees"):
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def chat_call(call_id="c1", city="Oslo"):
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": "weather", "arguments": f'{{"city": "{city}"}}'},
    }


def messages(*items, **options):
    return responses_to_chat({"input": list(items)}, **options)["messages"]


def test_a_string_is_one_user_message():
    assert responses_to_chat({"input": "hello"}) == {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    }


def test_a_turn_folds_into_one_assistant_message():
    turn = [reasoning("warm?", "ask"), said("Let me look."), call(), call("c2", "Rome")]
    assert messages(USER, *turn, output(), output("c2", "20"), said("3")) == [
        USER,
        {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": [chat_call(), chat_call("c2", "Rome")],
            "reasoning_content": "warm?\n\nask",
            "reasoning": "warm?\n\nask",
        },
        {"role": "tool", "content": "3 degrees", "tool_call_id": "c1"},
        {"role": "tool", "content": "20", "tool_call_id": "c2"},
        {"role": "assistant", "content": "3"},
    ]


def test_reasoning_as_tags_keeps_its_place_among_the_texts():
    turn = [reasoning("one", "two"), said("a"), reasoning("three"), said("b")]
    assert messages(USER, *turn, reasoning="think_tags")[1] == {
        "role": "assistant",
        "content": "<think>one</think><think>two</think>a<think>three</think>b",
    }


@pytest.mark.parametrize("form", ["field", "think_tags"])
def test_reasoning_after_a_call_stands_behind_its_output(form):
    def assistant(blocks, text, *calls):
        tags = "".join(f"<think>{block}</think>" for block in blocks) if form == "think_tags" else ""
        content = f"{tags}{text}" or ("" if blocks else None)
        beside = "\n\n".join(blocks) if blocks and form == "field" else None
        return {
            "role": "assistant",
            "content": content,
            **({"tool_calls": [chat_call(c) for c in calls]} if calls else {}),
            **({"reasoning_content": beside, "reasoning": beside} if beside else {}),
        }

    def tool(call_id):
        return {"role": "tool", "content": "3 degrees", "tool_call_id": call_id}

    # Calls that were made at once, with a thought in between.
    at_once = [reasoning("a"), call("c1"), reasoning("b"), call("c2"), call("c3")]
    outputs = [output("c2"), output("c1"), output("c3")]
    expected = [
        assistant(["a"], "", "c1"),
        tool("c1"),
        assistant(["b"], "", "c2", "c3"),
        tool("c2"),
        tool("c3"),
    ]
    assert messages(*at_once, *outputs, reasoning=form) == expected
    # A thought after the last call begins the next turn, whoever speaks next.
    late = [call("c1"), reasoning("late"), output("c1")]
    head = [assistant([], "", "c1"), tool("c1")]
    assert messages(*late, reasoning=form) == [*head, assistant(["late"], "")]
    assert messages(*late, USER, reasoning=form) == [*head, assistant(["late"], ""), USER]
    assert messages(*late, reasoning("b"), said("x"), reasoning=form) == [
        *head,
        assistant(["late", "b"], "x"),
    ]
    # Without an output between them, two assistant messages would stand together: they are one.
    assert messages(call("c1"), reasoning("late"), call("c2"), reasoning=form) == [
        assistant(["late"], "", "c1", "c2")
    ]
    # As many outputs as calls, of one name: each behind its own.
    assert messages(call(), reasoning("b"), call(), output(), output(), reasoning=form) == [
        assistant([], "", "c1"),
        tool("c1"),
        assistant(["b"], "", "c1"),
        tool("c1"),
    ]


def test_a_turn_that_passes_its_tokens_on_is_one_message():
    tokens = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.5]}
    turn = [call("c1"), reasoning("b"), {**call("c2"), **tokens}]
    made = messages(*turn, output("c1"), output("c2"), token_ids=True)
    assert [message["role"] for message in made] == ["assistant", "tool", "tool"]
    assert made[0]["tool_calls"] == [chat_call("c1"), chat_call("c2")]
    assert made[0]["generation_token_ids"] == [2]


def test_a_history_in_chat_form_is_taken_as_it_is():
    tokens = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.5]}
    parts = [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": "https://a"}},
    ]
    asks = {"role": "assistant", "content": None, "tool_calls": [chat_call()], "reasoning_content": "hm"}
    history = [
        {"role": "user", "content": parts},
        {**asks, **tokens},
        {"role": "tool", "content": "3 degrees", "tool_call_id": "c1"},
        {"role": "assistant", "content": "3", "reasoning": "so"},
        {"role": "tool", "content": [{"type": "text", "text": "x"}], "tool_call_id": "c2"},
        {"role": "assistant", "content": None, "refusal": "no"},
    ]
    before = copy.deepcopy(history)
    made = messages(*history, token_ids=True)
    assert history == before
    assert made == [
        {
            "role": "user",
            "content": [parts[0], {"type": "image_url", "image_url": {"url": "https://a", "detail": "auto"}}],
        },
        {**asks, "content": "", "reasoning": "hm", **tokens},
        history[2],
        {"role": "assistant", "content": "3", "reasoning_content": "so", "reasoning": "so"},
        history[4],
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    # In tags, where the endpoint has no field for reasoning.
    assert messages(asks, reasoning="think_tags") == [
        {"role": "assistant", "content": "<think>hm</think>", "tool_calls": [chat_call()]}
    ]


def test_reasoning_can_be_dropped():
    assert messages(reasoning("secret"), call(), reasoning="drop") == [
        {"role": "assistant", "content": "", "tool_calls": [chat_call()]}
    ]


def test_tags_in_a_text_are_reasoning_where_it_has_a_field():
    (message,) = messages({"role": "assistant", "content": "<think>r</think>a"})
    assert message == {"role": "assistant", "content": "a", "reasoning_content": "r", "reasoning": "r"}


def test_reasoning_that_has_only_content_is_kept():
    item = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "deep"}]}
    assert messages(item)[0]["reasoning"] == "deep"


def test_calls_alone_have_null_content_and_an_empty_turn_is_kept():
    assert messages(call())[0]["content"] is None
    assert messages(said(""))[0] == {"role": "assistant", "content": None}


def test_a_refusal_stays_one():
    part = {"type": "refusal", "refusal": "I won't."}
    refusal = {"role": "assistant", "type": "message", "content": [part]}
    assert messages(refusal)[0] == {"role": "assistant", "content": [part]}
    assert messages(said("Well. "), refusal)[0]["content"] == [{"type": "text", "text": "Well. "}, part]


def test_instructions_and_the_leading_system_messages_are_one():
    items = [
        {
            "role": "system",
            "content": [{"type": "input_text", "text": "Be "}, {"type": "input_text", "text": "brief."}],
        },
        {"role": "developer", "content": "No lists."},
        USER,
        {"role": "system", "content": "Later."},
    ]
    chat = responses_to_chat({"input": items, "instructions": "You help."})
    assert chat["messages"] == [
        {"role": "system", "content": "You help.\n\nBe brief.\n\nNo lists."},
        USER,
        {"role": "system", "content": "Later."},
    ]
    assert messages(*items)[0]["role"] == "system"
    assert len(messages(*items)) == 4


def test_settings():
    chat = responses_to_chat(
        {
            "input": [USER],
            "model": "m",
            "max_output_tokens": 64,
            "temperature": 0.0,
            "top_p": None,
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {
                "format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
            },
            "metadata": {"extra_body": "{}"},
            "tools": [WEATHER],
            "tool_choice": {"type": "function", "name": "weather"},
            "parallel_tool_calls": False,
            "truncation": "auto",
            "include": ["reasoning.encrypted_content"],
        }
    )
    assert chat == {
        "messages": [USER],
        "model": "m",
        "max_tokens": 64,
        "temperature": 0.0,
        "top_p": None,
        "reasoning_effort": "low",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
        },
        "metadata": {"extra_body": "{}"},
        "tools": [
            {
                "type": "function",
                "function": {k: WEATHER[k] for k in ("name", "description", "parameters")},
            }
        ],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": False,
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ({"format": {"type": "text"}}, {}),
        ({"format": {"type": "json_object"}}, {"response_format": {"type": "json_object"}}),
        ({"verbosity": "low"}, {"verbosity": "low"}),
        (None, {}),
    ],
)
def test_text_formats(text, expected):
    chat = responses_to_chat({"input": [USER], "text": text})
    assert {k: v for k, v in chat.items() if k != "messages"} == expected


def test_the_choice_among_tools_needs_tools():
    chat = responses_to_chat({"input": "x", "tools": [], "tool_choice": "auto", "parallel_tool_calls": True})
    assert chat.keys() == {"messages"}
    with pytest.raises(BadRequest, match="at least one tool"):
        responses_to_chat({"input": "x", "tool_choice": "required"})


def test_allowed_tools():
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    chat = responses_to_chat({"input": "x", "tools": [WEATHER], "tool_choice": choice})
    assert chat["tool_choice"] == {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "required",
            "tools": [{"type": "function", "function": {"name": "weather"}}],
        },
    }


def test_parts_of_a_user_message():
    parts = [
        {"type": "input_text", "text": "what is it?"},
        {"type": "input_image", "image_url": "data:image/png;base64,AA"},
        {"type": "input_image", "image_url": {"url": "https://host/a.png"}, "detail": "low"},
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
        {"type": "input_video", "video_url": "https://host/a.mp4"},
        {"type": "input_file", "file_data": "data:application/pdf;base64,AA", "filename": "a.pdf"},
    ]
    assert messages({"role": "user", "content": parts})[0]["content"] == [
        {"type": "text", "text": "what is it?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "auto"}},
        {"type": "image_url", "image_url": {"url": "https://host/a.png", "detail": "low"}},
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "https://host/a.mp4"}},
        {"type": "file", "file": {"file_data": "data:application/pdf;base64,AA", "filename": "a.pdf"}},
    ]


def test_the_last_token_bundle_of_a_turn_goes_along_when_asked_for():
    first = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.5]}
    last = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.25]}
    turn = [{**said("a"), **first}, {**call(), **last}]
    assert messages(*turn, output(), said("b"), token_ids=True) == [
        {"role": "assistant", "content": "a", "tool_calls": [chat_call()], **last},
        {"role": "tool", "content": "3 degrees", "tool_call_id": "c1"},
        {"role": "assistant", "content": "b"},
    ]
    assert "prompt_token_ids" not in messages(*turn)[0]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"type": "item_reference", "id": "i"}, r"input\[0\]: an item of type 'item_reference'"),
        ({"type": "mcp_call", "id": "m"}, "'mcp_call' has no chat form"),
        ({"content": "x"}, "None has no chat form"),
        ("text", r"`input\[0\]` must be an object, got 'text'"),
        ({"role": "tool", "content": "x"}, r"`input\[0\]` must have a `tool_call_id`"),
        ({"role": "function", "content": "x"}, "role 'function'"),
        ({"role": "assistant", "tool_calls": "x"}, r"`input\[0\].tool_calls` must be a list of calls"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, r"`input\[0\].tool_calls` must be a list"),
        ({"role": "user", "content": [{"type": "output_text", "text": "x"}]}, r"input\[0\].content\[0\]"),
        (
            {"role": "user", "content": None},
            r"`input\[0\].content` must be a string or a list of parts, got None",
        ),
        (
            {"role": "user", "content": [{"type": "input_text"}]},
            r"`input\[0\].content\[0\].text` must be a string, got None",
        ),
        ({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}, "needs image_url"),
        ({"role": "user", "content": [{"type": "input_file", "file_url": "u"}]}, "no file_url"),
        ({"role": "user", "content": [{"type": "input_video"}]}, "needs video_url"),
        (
            {"type": "function_call", "call_id": "c", "arguments": "{}"},
            r"`input\[0\].name` must be a string, got None",
        ),
        (
            {"type": "function_call_output", "call_id": "c", "output": {"a": 1}},
            r"`input\[0\].output` must be a string",
        ),
        ({**said("a"), "prompt_token_ids": [1]}, "all three or none"),
        (
            {
                **said("a"),
                "prompt_token_ids": [1],
                "generation_token_ids": [1, 2],
                "generation_log_probs": [-1.0],
            },
            "2 generation_token_ids but 1 generation_log_probs",
        ),
    ],
)
def test_what_chat_cannot_say_is_an_error_with_its_place(item, message):
    with pytest.raises(BadRequest, match=message):
        messages(item, token_ids=True)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "`input` must be a string or a list"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id: send the whole"),
        ({"input": "x", "prompt": {"id": "pmpt_1"}}, "prompt: send the whole"),
        ({"input": "x", "instructions": ["y"]}, "`instructions` must be a string"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, r"tools\[0\].*'web_search'"),
        ({"input": "x", "tools": [{"type": "function"}]}, r"`tools\[0\]` must have a name"),
        ({"input": "x", "tools": [WEATHER], "tool_choice": {"type": "mcp"}}, "'mcp' has no chat form"),
        ({"input": "x", "text": {"format": {"type": "grammar"}}}, "'grammar' has no chat form"),
    ],
)
def test_settings_that_chat_lacks(params, message):
    with pytest.raises(BadRequest, match=message):
        responses_to_chat(params)


def test_inputs_are_left_alone():
    params = {
        "input": [USER, reasoning("r"), said("a"), call(), output()],
        "tools": [WEATHER],
        "instructions": "i",
    }
    before = copy.deepcopy(params)
    responses_to_chat(params)
    assert params == before

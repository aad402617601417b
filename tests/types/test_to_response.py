import copy

import pytest
from openai.types.responses import Response, ResponseUsage

from gym_serve.types.errors import Unavailable
from gym_serve.types.protocols import chat_to_response, context_overflow_response, responses_usage

PARAMS = {
    "input": "hi",
    "model": "policy",
    "temperature": 0.5,
    "max_output_tokens": 9,
    "metadata": {"a": "b"},
}


def completion(message, finish_reason="stop", **fields):
    choice = {"index": 0, "finish_reason": finish_reason, "message": {"role": "assistant", **message}}
    return {
        "id": "x",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "m",
        "choices": [choice],
        **fields,
    }


def response(message, *, parse_think=True, token_ids=True, params=PARAMS, **kwargs):
    return chat_to_response(
        completion(message, **kwargs), params, parse_think=parse_think, token_ids=token_ids
    )


def kinds(result):
    return [item["type"] for item in result["output"]]


def function(name, arguments, call_id="c1"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_message():
    result = response({"content": "Hello"})
    (message,) = result["output"]
    assert message["content"] == [{"type": "output_text", "text": "Hello", "annotations": []}]
    assert (message["role"], message["status"]) == ("assistant", "completed")
    assert result["status"] == "completed"
    assert result["created_at"] == 1700000000.0
    assert (result["model"], result["temperature"], result["max_output_tokens"]) == ("policy", 0.5, 9)
    assert (result["tools"], result["tool_choice"], result["parallel_tool_calls"]) == ([], "auto", True)
    assert Response.model_validate(result).output_text == "Hello"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("parse_think", [True, False])
def test_a_reasoning_field_becomes_an_item_before_the_message(field, parse_think):
    result = response({"content": "4", field: "2+2"}, parse_think=parse_think)
    assert kinds(result) == ["reasoning", "message"]
    assert result["output"][0]["summary"] == [{"type": "summary_text", "text": "2+2"}]
    Response.model_validate(result)


def test_think_tags_are_blocks_of_one_item():
    result = response({"content": "<think>a</think><think>b</think>c", "reasoning": "field"})
    assert [part["text"] for part in result["output"][0]["summary"]] == ["field", "a", "b"]
    assert result["output"][1]["content"][0]["text"] == "c"


def test_think_tags_stay_in_the_text_without_parsing():
    (message,) = response({"content": "<think>a</think>c"}, parse_think=False)["output"]
    assert message["content"][0]["text"] == "<think>a</think>c"


def test_reasoning_alone_has_no_message_and_nothing_at_all_an_empty_one():
    assert kinds(response({"content": "<think>a</think>"})) == ["reasoning"]
    assert response({"content": None})["output"][0]["content"][0]["text"] == ""


def test_calls_follow_the_text():
    calls = [function("f", '{"a": 1}'), function("g", "{broken", "c2")]
    result = response({"content": "text", "reasoning": "r", "tool_calls": calls}, finish_reason="tool_calls")
    assert kinds(result) == ["reasoning", "message", "function_call", "function_call"]
    assert result["output"][2] == {
        "type": "function_call",
        "id": "c1",
        "call_id": "c1",
        "name": "f",
        "arguments": '{"a": 1}',
        "status": "completed",
    }
    assert result["output"][3]["arguments"] == "{broken"
    Response.model_validate(result)


def test_calls_of_sloppy_backends():
    """Arguments that were decoded are what the model wrote, whatever they are."""
    calls = [{"function": {"name": "f", "arguments": {"a": 1}}}, {"function": {"name": "", "arguments": [1]}}]
    first, second = response({"content": None, "tool_calls": [*calls]})["output"]
    assert (first["arguments"], first["name"]) == ('{"a": 1}', "f")
    assert first["call_id"].startswith("call_")
    assert (second["name"], second["arguments"]) == ("", "[1]")


def test_a_refusal():
    (message,) = response({"content": None, "refusal": "No."})["output"]
    assert message["content"] == [{"type": "refusal", "refusal": "No."}]
    (message,) = response({"content": "Well. ", "refusal": "No."})["output"]
    assert [part["type"] for part in message["content"]] == ["output_text", "refusal"]


@pytest.mark.parametrize(
    ("finish_reason", "reason"),
    [
        *((cut, "max_output_tokens") for cut in ("length", "MAX_TOKENS", "model_length")),
        *((cut, "content_filter") for cut in ("content_filter", "content_filter: SAFETY", "sensitive")),
    ],
)
def test_incomplete(finish_reason, reason):
    result = response({"content": "cut"}, finish_reason=finish_reason)
    assert (result["status"], result["incomplete_details"]) == ("incomplete", {"reason": reason})
    Response.model_validate(result)


COUNTS = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


@pytest.mark.parametrize(
    ("usage", "cached", "written", "reasoned"),
    [
        (COUNTS, 0, 0, 0),  # vLLM by default
        ({**COUNTS, "prompt_tokens_details": None, "completion_tokens_details": None}, 0, 0, 0),
        ({**COUNTS, "prompt_tokens_details": {"cached_tokens": None}}, 0, 0, 0),
        ({**COUNTS, "prompt_tokens_details": {"cached_tokens": 4}}, 4, 0, 0),
        ({**COUNTS, "prompt_tokens_details": {"cache_write_tokens": 3}}, 0, 3, 0),
        ({**COUNTS, "completion_tokens_details": {"reasoning_tokens": 1}}, 0, 0, 1),
        ({**COUNTS, "cached_input_tokens": 4, "reasoning_tokens": 2}, 4, 0, 2),
        ({**COUNTS, "prompt_tokens_details": "?", "completion_tokens_details": []}, 0, 0, 0),
        ({"input_tokens": 5, "output_tokens": 2}, 0, 0, 0),
        ({"input_tokens": 5, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 4}}, 4, 0, 0),
    ],
)
def test_a_usage_has_all_that_openais_type_of_it_requires(usage, cached, written, reasoned):
    made = responses_usage(usage)
    assert made == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": reasoned},
        "total_tokens": 7,
    }
    ResponseUsage.model_validate(made)
    assert responses_usage(made) == made
    assert response({"content": "x"}, usage=usage)["usage"] == made


@pytest.mark.parametrize("usage", [None, {}, 5, []])
def test_no_usage_is_none(usage):
    assert response({"content": "x"}, usage=usage)["usage"] is None


BUNDLE = {"prompt_token_ids": [1, 2], "generation_token_ids": [7, 8], "generation_log_probs": [-0.5, 0.0]}


def vllm(message, logprobs=(-0.5, 0.0), **choice):
    result = completion(message, prompt_token_ids=[1, 2])
    entries = [{"token": f"token_id:{7 + i}", "logprob": value} for i, value in enumerate(logprobs)]
    result["choices"][0].update({"logprobs": {"content": entries}, **choice})
    return result


def bundle_of(item):
    return {key: item[key] for key in BUNDLE if key in item}


@pytest.mark.parametrize(
    "answer",
    [
        completion({"content": "<think>r</think>a", **BUNDLE}),
        vllm({"content": "<think>r</think>a"}, token_ids=[7, 8]),
        vllm({"content": "<think>r</think>a"}),
    ],
    ids=["on the message", "vllm return_token_ids", "vllm tokens as ids"],
)
def test_the_token_bundle_is_on_the_last_item(answer):
    result = chat_to_response(answer, PARAMS, parse_think=True)
    assert [bundle_of(item) for item in result["output"]] == [{}, BUNDLE]
    off = chat_to_response(answer, PARAMS, parse_think=True, token_ids=False)
    assert [bundle_of(item) for item in off["output"]] == [{}, {}]


@pytest.mark.parametrize(
    "answer",
    [
        vllm({"content": "a"}, token_ids=[7, 9]),
        vllm({"content": "a", **BUNDLE, "generation_token_ids": [8, 7]}),
    ],
)
def test_ids_and_log_probabilities_of_different_tokens_are_refused(answer):
    with pytest.raises(Unavailable, match="generation_token_ids and the tokens of logprobs differ"):
        chat_to_response(answer, PARAMS, parse_think=True)


def test_a_part_of_a_bundle_is_none():
    for partial in (
        completion({"content": "a", "prompt_token_ids": [1]}),
        completion({"content": "a"}, prompt_token_ids=[1]),
        {**vllm({"content": "a"}), "prompt_token_ids": None},
    ):
        assert bundle_of(chat_to_response(partial, PARAMS, parse_think=True)["output"][-1]) == {}
    plain_tokens = vllm({"content": "a"})
    plain_tokens["choices"][0]["logprobs"]["content"][1]["token"] = " word"
    assert bundle_of(chat_to_response(plain_tokens, PARAMS, parse_think=True)["output"][-1]) == {}


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (vllm({"content": "a"}, token_ids=[7]), "1 generation_token_ids but 2"),
        (vllm({"content": "a"}, logprobs=(-0.5, None)), "without a value"),
        (completion({"content": "a", **BUNDLE, "prompt_token_ids": "12"}), "prompt_token_ids is not a list"),
    ],
)
def test_tokens_that_do_not_match_are_an_error(answer, problem):
    with pytest.raises(Unavailable, match=problem):
        chat_to_response(answer, PARAMS, parse_think=True)


@pytest.mark.parametrize(
    "answer", [None, [], {}, {"choices": []}, {"choices": [None]}, {"choices": [{"message": 1}]}]
)
def test_an_answer_that_is_no_completion(answer):
    with pytest.raises(Unavailable, match="not a chat completion"):
        chat_to_response(answer, PARAMS, parse_think=True)


def test_an_aborted_generation_is_no_answer():
    with pytest.raises(Unavailable, match="'abort'"):
        response({"content": "half a sen"}, finish_reason="abort")


def test_context_overflow():
    result = context_overflow_response(PARAMS)
    assert (result["status"], result["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert result["output"][0]["content"][0]["text"] == ""
    assert result["usage"] is None
    Response.model_validate(result)


def test_inputs_are_left_alone():
    answer = vllm({"content": "<think>r</think>a", "tool_calls": [function("f", "{}")]})
    before = copy.deepcopy((answer, PARAMS))
    chat_to_response(answer, PARAMS, parse_think=True)
    assert (answer, PARAMS) == before

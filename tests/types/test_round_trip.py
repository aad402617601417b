"""Responses -> Chat -> Responses loses nothing that a verifier or a trainer reads."""

import copy
import json
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gym_serve.types.errors import GymError
from gym_serve.types.protocols import (
    TOKEN_KEYS,
    chat_chunks,
    chat_to_response,
    messages_to_items,
    response_events,
    response_to_chat,
    responses_to_chat,
    usage_sum,
)

# Tags in a text mean reasoning; a text about tags cannot be told from them.
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=8)
BUNDLE = st.none() | st.tuples(
    st.lists(st.integers(0, 9), min_size=1, max_size=2), st.sampled_from([{}, {"routed_experts": [[0, 1]]}])
).map(lambda t: {**dict(zip(TOKEN_KEYS, (t[0], t[0], [-0.5] * len(t[0])), strict=True)), **t[1]})


def with_bundle(item, bundle):
    return {**item, **(bundle or {})}


REASONING = st.lists(TEXT, max_size=3).map(
    lambda texts: {
        "type": "reasoning",
        "id": "rs",
        "summary": [{"type": "summary_text", "text": t} for t in texts],
    }
)
SAID = TEXT.map(lambda text: {"type": "output_text", "text": text, "annotations": []})
REFUSAL = TEXT.map(lambda text: {"type": "refusal", "refusal": text})
MESSAGE = st.lists(SAID | REFUSAL, max_size=2).map(
    lambda content: {"type": "message", "role": "assistant", "content": content}
)
URL = st.sampled_from(["https://host/a", "data:image/png;base64,AA"])
PART = (
    TEXT.map(lambda text: {"type": "input_text", "text": text})
    | st.tuples(URL, st.sampled_from(["auto", "low"])).map(
        lambda i: {"type": "input_image", "image_url": i[0], "detail": i[1]}
    )
    | st.sampled_from(["wav", "mp3"]).map(
        lambda form: {"type": "input_audio", "input_audio": {"data": "AA", "format": form}}
    )
    | URL.map(lambda url: {"type": "input_video", "video_url": url})
    | st.dictionaries(
        st.sampled_from(["file_data", "file_id", "filename"]), st.sampled_from(["a", "b"]), min_size=1
    )
    .filter(lambda file: file.keys() != {"filename"})
    .map(lambda file: {"type": "input_file", **file})
)
CONTENT = TEXT | st.lists(PART, max_size=3)
CALL = st.tuples(st.sampled_from("abc"), TEXT, TEXT).map(
    lambda c: {"type": "function_call", "call_id": c[0], "name": c[1], "arguments": c[2]}
)
OUTPUT = st.tuples(st.sampled_from("abc"), CONTENT).map(
    lambda o: {"type": "function_call_output", "call_id": o[0], "output": o[1]}
)
OTHER = st.tuples(st.sampled_from(["user", "system", "developer"]), CONTENT).map(
    lambda m: {"type": "message", "role": m[0], "content": m[1]}
)
ASSISTANT = st.tuples(REASONING | MESSAGE | CALL, BUNDLE).map(lambda pair: with_bundle(*pair))
HISTORY = st.lists(ASSISTANT | OUTPUT | OTHER, max_size=10)


def is_assistant(item):
    return item["type"] in ("reasoning", "function_call") or item.get("role") == "assistant"


def view(items, blocks):
    """What is read of a history: its turns, and in a turn each kind in its order."""
    seen, turn = [], None
    for item in [*items, None]:
        if item is not None and is_assistant(item):
            turn = turn or {"reasoning": [], "text": "", "refusal": "", "calls": [], "tokens": None}
            if item["type"] == "reasoning":
                turn["reasoning"] += [part["text"] for part in item["summary"] if part["text"]]
            elif item["type"] == "message":
                turn["text"] += "".join(part.get("text", "") for part in item["content"])
                turn["refusal"] += "".join(part.get("refusal", "") for part in item["content"])
            else:
                turn["calls"].append((item["call_id"], item["name"], item["arguments"]))
            turn["tokens"] = {k: item[k] for k in (*TOKEN_KEYS, "routed_experts") if k in item} or turn[
                "tokens"
            ]
            continue
        if turn:
            seen.append({**turn, "reasoning": blocks(turn["reasoning"])})
            turn = None
        if item is not None:
            seen.append(
                (item["type"], item.get("role") or item["call_id"], item.get("content") or item.get("output"))
            )
    return seen


@given(HISTORY)
@pytest.mark.parametrize(("form", "blocks"), [("think_tags", list), ("field", "\n\n".join)])
def test_a_history_survives(form, blocks, history):
    before = copy.deepcopy(history)
    chat = responses_to_chat({"input": history}, reasoning=form, token_ids=True)
    back = messages_to_items(chat["messages"], token_ids=True)
    assert history == before
    if has_late_reasoning(history):
        assert overall(view(back, list)) == overall(view(history, list))
    else:
        assert view(back, blocks) == view(history, blocks)


def has_late_reasoning(items):
    """Whether reasoning stands behind a call of its turn: its place is kept, and so not the turns."""
    called = False
    for item in items:
        if called and item["type"] == "reasoning":
            return True
        called = is_assistant(item) and (called or item["type"] == "function_call")
    return False


def overall(turns):
    """Each kind in its order, whatever the turns; outputs may stand in another one."""
    mine = [turn for turn in turns if isinstance(turn, dict)]
    others = [turn for turn in turns if not isinstance(turn, dict)]
    return {
        "reasoning": "".join("".join(turn["reasoning"]) for turn in mine).replace("\n", ""),
        "text": "".join(turn["text"] for turn in mine),
        "refusal": "".join(turn["refusal"] for turn in mine),
        "calls": [call for turn in mine for call in turn["calls"]],
        "messages": [other for other in others if other[0] == "message"],
        "outputs": sorted(json.dumps(other, sort_keys=True) for other in others if other[0] != "message"),
        "tokens": [turn["tokens"] for turn in mine if turn["tokens"]],
    }


CALL = {"type": "function_call", "call_id": "c", "name": "", "arguments": ""}
THOUGHT = {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "0"}]}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": ""}


@given(HISTORY)
@example([CALL, THOUGHT, CALL, OUTPUT, {"type": "reasoning", "id": "rs", "summary": []}])  # of two calls, one
def test_no_two_assistant_messages_stand_together(history):
    roles = [message["role"] for message in responses_to_chat({"input": history})["messages"]]
    assert ("assistant", "assistant") not in set(pairwise(roles))


@given(st.lists(ASSISTANT, min_size=1, max_size=6))
def test_an_answer_survives(answer):
    completion = response_to_chat({"output": answer, "created_at": 1.0, "model": "m"})
    back = chat_to_response(completion, {"input": "x"}, parse_think=True)
    assert view(back["output"], "\n\n".join) == view(answer, "\n\n".join)


JSON_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def any_object(*keys):
    """An object whose known keys hold anything at all."""
    return st.fixed_dictionaries({}, optional=dict.fromkeys(keys, JSON_VALUE))


ANY_MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "x"])},
    optional=dict.fromkeys(
        ["content", "tool_calls", "reasoning", "refusal", "tool_call_id", *TOKEN_KEYS], JSON_VALUE
    ),
)
ANY_ITEM = st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "reasoning", "function_call", "function_call_output", "x"])},
    optional=dict.fromkeys(
        ["role", "content", "summary", "call_id", "name", "output", *TOKEN_KEYS], JSON_VALUE
    ),
)


def only_gym_errors(function, *args, **kwargs):
    try:
        return function(*args, **kwargs)
    except GymError:
        return None


@given(
    any_object("created", "usage", "prompt_token_ids", "model"),
    any_object("finish_reason", "logprobs", "token_ids"),
    JSON_VALUE | ANY_MESSAGE,
)
def test_no_answer_of_a_backend_breaks_the_conversion(completion, choice, message):
    answer = {**completion, "choices": [{**choice, "message": message}]}
    response = only_gym_errors(chat_to_response, answer, {"input": "x"}, parse_think=True)
    if response is not None:
        events = [event["type"] for event in response_events(response)]
        assert events[0] == "response.created"
        chunks = list(chat_chunks(response_to_chat(response), True))
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


@given(
    any_object("error", "incomplete_details", "usage", "created_at", "model"), JSON_VALUE | st.lists(ANY_ITEM)
)
def test_no_response_breaks_the_conversion(response, output):
    completion = only_gym_errors(response_to_chat, {**response, "output": output})
    assert completion is None or completion["object"] == "chat.completion"


@given(st.lists(st.none() | JSON_VALUE.filter(lambda v: v is None or isinstance(v, dict))))
def test_no_usage_breaks_the_sum(usages):
    total = usage_sum(usages)
    assert (total is None) == (not any(usages))

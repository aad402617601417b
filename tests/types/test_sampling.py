import copy
import json

import pytest

from gym_serve.types.errors import BadRequest
from gym_serve.types.protocols import apply_sampling, inline_audio


def test_precedence_of_sampling():
    chat = {
        "messages": [],
        "top_p": 0.3,
        "temperature": 0.3,
        "min_p": None,
        "metadata": {"extra_body": json.dumps({"top_p": 0.2, "top_k": 2, "temperature": 0.2})},
    }
    deployment = {"top_p": 0.1, "top_k": 1, "temperature": 0.1, "seed": 1, "min_p": 0.1}
    before = copy.deepcopy((chat, deployment))
    body = apply_sampling(chat, extra_body=deployment, overrides={"temperature": 1.0})
    expected = {"seed": 1, "top_k": 2, "top_p": 0.3, "temperature": 1.0, "min_p": 0.1}
    assert {key: body[key] for key in expected} == expected
    assert body["messages"] == []
    assert body["metadata"] == chat["metadata"]
    assert (chat, deployment) == before


def test_extra_body_of_a_row_cannot_replace_what_it_asks():
    chat = {"messages": [1], "model": "m", "metadata": {"extra_body": '{"messages": [2], "model": "x"}'}}
    assert apply_sampling(chat)["messages"] == [1]
    assert apply_sampling(chat)["model"] == "m"


def test_chat_template_arguments_merge_key_by_key():
    chat = {"metadata": {"chat_template_kwargs": '{"b": 2, "c": 2}'}, "chat_template_kwargs": {"c": 3}}
    body = apply_sampling(chat, chat_template_kwargs={"a": 1, "b": 1, "c": 1})
    assert body["chat_template_kwargs"] == {"a": 1, "b": 2, "c": 3}
    assert "chat_template_kwargs" not in apply_sampling({"messages": []})


def test_plain_objects_in_metadata_are_taken_too():
    assert apply_sampling({"metadata": {"extra_body": {"top_k": 5}}})["top_k"] == 5


@pytest.mark.parametrize("value", ["{bad", "[1]", '"text"', 7])
@pytest.mark.parametrize("key", ["extra_body", "chat_template_kwargs"])
def test_broken_metadata_names_its_key(key, value):
    with pytest.raises(BadRequest, match=f"metadata.{key}"):
        apply_sampling({"metadata": {key: value}})


def test_audio_moves_into_the_last_user_message():
    chat = {
        "messages": [{"role": "user", "content": "listen"}, {"role": "assistant", "content": "yes"}],
        "metadata": {"audio_data": "data:audio/wav;base64,AA"},
    }
    audio = {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AA"}}
    assert inline_audio(chat) == {
        "messages": [
            {"role": "user", "content": [audio, {"type": "text", "text": "listen"}]},
            {"role": "assistant", "content": "yes"},
        ]
    }
    assert chat["messages"][0]["content"] == "listen"
    assert inline_audio({"messages": [], "metadata": {"audio_data": "u", "a": "b"}}) == {
        "messages": [{"role": "user", "content": [{"type": "audio_url", "audio_url": {"url": "u"}}]}],
        "metadata": {"a": "b"},
    }
    assert inline_audio({"messages": [], "metadata": None}) == {"messages": [], "metadata": None}


def test_chat_template_arguments_are_an_object():
    with pytest.raises(BadRequest, match=r"`chat_template_kwargs` must be an object, got \[\'a\'\]"):
        apply_sampling({"chat_template_kwargs": ["a"]})

"""`callback_model` with a real tokenizer and template, beside `hf_engine` on the same model."""

from __future__ import annotations

from typing import Any

import pytest

from gym_serve.deployments.callback_model import CallbackModel
from gym_serve.deployments.hf_engine.tiny_model import tiny_model
from gym_serve.deployments.tokenizing import Generation, tool_parser
from gym_serve.types.errors import BadRequest, GraphError

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default"), pytest.mark.timeout(500)]

TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is 12 + 30?"}],
    "tools": TOOLS,
}


async def test_it_renders_and_parses_as_the_engine_of_the_same_model_does() -> None:
    from gym_serve.deployments.hf_engine import HFEngine

    engine, model = HFEngine(), CallbackModel(tokenizer=str(tiny_model()))
    await engine.start()
    await model.start()
    try:
        rendered = await model.render(CHAT, CHAT["messages"])
        assert rendered == await engine.render(CHAT, CHAT["messages"])
        ids = model._tokenizer(f"Wait. {CALL}", add_special_tokens=False)["input_ids"]
        ids.append(model._tokenizer.eos_token_id)
        answer = Generation(ids, [-0.5] * len(ids), "stop")
        (choice,) = model.completion_of(CHAT, rendered, answer)["choices"]
    finally:
        await engine.stop()
        await model.stop()
    assert choice["message"]["content"] == "Wait."
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a":1}'}
    assert choice["finish_reason"] == "tool_calls"


async def test_calls_are_found_where_their_tags_are_special_tokens() -> None:
    class Special(CallbackModel):
        def load_tokenizer(self) -> Any:
            tokenizer = super().load_tokenizer()
            tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
            return tokenizer

    model = Special(tokenizer=str(tiny_model()))
    await model.start()
    try:
        for text, calls in ((f"Wait. {CALL}", 1), ("<tool_call> and no more", 0)):
            ids = [
                *model._tokenizer(text, add_special_tokens=False)["input_ids"],
                model._tokenizer.eos_token_id,
            ]
            completion = model.completion_of(CHAT, [1], Generation(ids, [-0.5] * len(ids), "stop"))
            message = completion["choices"][0]["message"]
            assert len(message.get("tool_calls", ())) == calls
            assert message["content"].strip() == ("Wait." if calls else "and no more")
    finally:
        await model.stop()


async def test_an_image_is_refused_and_not_left_out() -> None:
    model = CallbackModel(tokenizer=str(tiny_model()))
    await model.start()
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    with pytest.raises(BadRequest, match=r"messages\[0\].*'image_url'"):
        await model.render(CHAT, [{"role": "user", "content": [picture]}])
    await model.stop()


@pytest.mark.parametrize("name", ["hermes", "qwen3_xml"])
def test_the_parsers_of_vllm_go_by_their_names(name: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(tiny_model()))
    written = {
        "hermes": CALL,
        "qwen3_xml": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    }[name]
    _, calls = tool_parser(name, tokenizer).split(written, CHAT)
    assert [call["function"]["name"] for call in calls] == ["add"]
    with pytest.raises(GraphError, match="no 'hermess'"):
        tool_parser("hermess", tokenizer)

"""Processors of ``transformers``: the tokens of pictures stand where its template shows them."""

from pathlib import Path
from typing import Any

import pytest
from support.eyes import PROMPT, SHOWN

from gym_serve.deployments.tokenizing import render
from gym_serve.types.protocols import responses_to_chat

transformers = pytest.importorskip("transformers")

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}/{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """SmolVLM's kind: a picture is cut into tiles, and each is a row of marks."""
    from gym_serve.deployments.hf_engine.tiny_model import make_tiny_model

    folder: Path = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    images = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": 128}, max_image_size={"longest_edge": 64}
    )
    return transformers.Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=TEMPLATE)


def conversation(text: str = "Look.") -> list[dict[str, Any]]:
    items = [
        {"role": "user", "content": [PROMPT, {"type": "input_text", "text": text}]},
        {"type": "function_call", "name": "ring", "arguments": "{}", "call_id": "c"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_text", "text": "ding"}, SHOWN],
        },
    ]
    messages: list[dict[str, Any]] = responses_to_chat({"input": items})["messages"]
    return messages


def test_each_picture_has_its_tokens(processor: Any) -> None:
    messages = conversation()
    ids = render(processor.tokenizer, {}, messages, processor)
    mark = processor.image_token_id
    one = render(processor.tokenizer, {}, messages[:1], processor).count(mark)
    assert one > 0
    assert ids.count(mark) == 2 * one
    assert processor.tokenizer.decode(ids).endswith("assistant:")


def test_a_text_that_spells_the_mark_is_text(processor: Any) -> None:
    plain = render(processor.tokenizer, {}, conversation(), processor)
    spelled = render(processor.tokenizer, {}, conversation("Look: <image>"), processor)
    mark = processor.image_token_id
    assert spelled.count(mark) == plain.count(mark)


def test_a_conversation_of_texts_alone(processor: Any) -> None:
    ids = render(processor.tokenizer, {}, [{"role": "user", "content": "hello"}], processor)
    assert processor.tokenizer.decode(ids) == "user:hello/assistant:"

"""Processors of ``transformers``: the tokens of pictures stand where its template shows them."""

import asyncio
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


@pytest.fixture(scope="module")
def folder(processor: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of SmolVLM's kind with random weights."""
    import torch

    tokenizer = processor.tokenizer
    text = {
        "model_type": "llama",
        **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"num_key_value_heads": 2, "vocab_size": len(tokenizer), "max_position_embeddings": 2048},
        **{"pad_token_id": tokenizer.pad_token_id, "initializer_range": 0.2},
    }
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Idefics3Config(
        text_config=text,
        vision_config={**vision, "image_size": 64, "patch_size": 16},
        scale_factor=2,  # 64 pixels are 4 by 4 patches, and 2 by 2 marks
        image_token_id=processor.image_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.Idefics3ForConditionalGeneration(config)
    model.generation_config = transformers.GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    made = tmp_path_factory.mktemp("seeing")
    model.save_pretrained(made)
    processor.save_pretrained(made)
    return made


async def test_hf_engine_sees_what_the_model_sees(folder: Path, processor: Any) -> None:
    """Its log-probabilities are those of one pass of the model over all tokens and all pictures."""
    import torch

    from gym_serve.deployments.hf_engine import HFEngine
    from gym_serve.types.media import opened, pictures_of

    engine = HFEngine(name="policy", model=str(folder), pictures=True)
    await engine.start()
    try:
        messages = conversation()
        bodies = [{"messages": messages[:n], "max_tokens": 6, "seed": n} for n in (1, 3, 1)]
        bodies.append({"messages": [{"role": "user", "content": "no picture"}], "max_tokens": 6})
        answers = await asyncio.gather(*map(engine.chat_completions, bodies))
        model = engine._steps.model  # type: ignore[union-attr]
    finally:
        await engine.stop()
    for body, answer in zip(bodies, answers, strict=True):
        choice = answer["choices"][0]
        prompt, made = answer["prompt_token_ids"], choice["token_ids"]
        urls = pictures_of(body["messages"])
        shown = processor.image_processor([list(map(opened, urls))], return_tensors="pt") if urls else {}
        seen = {name: shown[name] for name in ("pixel_values", "pixel_attention_mask") if urls}
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt + made]), **seen).logits[0].float().log_softmax(-1)
        expected = [float(logits[len(prompt) + i - 1, token]) for i, token in enumerate(made)]
        found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert found == pytest.approx(expected, abs=1e-3)
    blind = answers[0]["prompt_token_ids"].count(processor.image_token_id)
    assert 0 < blind < answers[1]["prompt_token_ids"].count(processor.image_token_id)

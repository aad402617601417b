"""graphs/reward_model.yaml with its reward model in the graph: `vllm_engine` with vLLM's pooling runner."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.engines import CPU_ARGS

from gym_serve import Gym
from gym_serve.deployments.vllm_engine import VLLMEngine
from gym_serve.types.errors import NotFound

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(500),
]


@pytest.fixture(scope="module")
def reward_model(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a scalar head and the tiny model's tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification

    folder = tmp_path_factory.mktemp("reward_model")
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_labels=1,
        initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForSequenceClassification(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gym(deploy: Callable[..., Gym], reward_model: Path) -> Gym:
    """The graph on a CPU."""
    os.environ["TINY_REWARD_MODEL"] = str(reward_model)
    return deploy(Path(__file__).with_name("cpu_reward.yaml"))


def _rewards_by_transformers(folder: Path, prompts: list[list[int]]) -> list[float]:
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [float(model(torch.tensor([prompt])).logits[0, 0]) for prompt in prompts]


def test_rewards_are_those_of_the_model(gym: Gym, reward_model: Path) -> None:
    prompts = [[40, 50, 60], [70, 80, 90, 100, 110]]
    answer = gym.call("scorer", "pooling", {"input": prompts, "task": "classify", "use_activation": False})
    rewards = [entry["data"][0] for entry in answer["data"]]
    assert rewards == pytest.approx(_rewards_by_transformers(reward_model, prompts), abs=1e-4)


def test_it_classifies_and_writes_nothing(gym: Gym) -> None:
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    answer = gym.call("scorer", "classify", {"messages": messages})
    assert 0 <= answer["data"][0]["probs"][0] <= 1
    with pytest.raises(NotFound):
        gym.call("scorer", "v1/responses", {"input": "a"})


def test_rollouts_have_its_rewards(gym: Gym, reward_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    questions = ["What is 2 + 2?", "How are you?"]
    rollouts = gym.run([{"responses_create_params": {"input": question}} for question in questions])
    for rollout in rollouts:
        assert "failure" not in rollout, rollout["failure"]["detail"]
        said = rollout["response"]["output"][-1]["content"][0]["text"]
        asked: Any = rollout["responses_create_params"]["input"]
        asked = asked if isinstance(asked, str) else asked[0]["content"]
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        expected = _rewards_by_transformers(reward_model, [prompt])[0]
        assert rollout["reward"] == pytest.approx(expected, abs=1e-3)


_QUESTION = "{% for message in messages %}{{ message.content }}\n{% endfor %}Is it right?"


async def test_a_chat_model_scores_by_the_probability_of_a_word(tiny: Path, tmp_path: Path) -> None:
    """As docs/engines.md has it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (template := tmp_path / "is_it_right.jinja").write_text(_QUESTION)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    no, yes = tokenizer.convert_tokens_to_ids(["N", "Y"])
    read = {
        "architectures": [model.config.architectures[0].replace("CausalLM", "SequenceClassification")],
        "classifier_from_token": ["N", "Y"],
        "method": "from_2_way_softmax",
    }
    engine = VLLMEngine(
        name="scorer",
        model=str(tiny),
        runner="pooling",
        chat_template=str(template),
        engine_args={**CPU_ARGS, "hf_overrides": read},
    )
    await engine.start()
    try:
        for answer in ("4", "5"):
            messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": answer}]
            scored = await engine.operations()["pooling"].handler({"messages": messages, "task": "classify"})
            prompt = tokenizer(f"2 + 2?\n{answer}\nIs it right?", return_tensors="pt").input_ids
            with torch.inference_mode():
                expected = model(prompt).logits[0, -1, [no, yes]].softmax(0)[1]
            assert scored["data"][0]["data"] == pytest.approx([float(expected)], abs=1e-4)
    finally:
        await engine.stop()

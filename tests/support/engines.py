"""Episodes with tools against a real engine, and what plain re-templating would have made of them."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gym_serve.deployments.token_model import without_tokens
from gym_serve.types.protocols import ChunkJoiner, completion_tokens, responses_to_chat
from support.waiting import until

MARKS = [
    pytest.mark.vllm,
    pytest.mark.timeout(500),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("default"),  # of torch and vLLM, when they are imported
]

CPU_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": 1 << 26,
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}
"""What vLLM needs on a small machine without a GPU."""

TOOLS = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]
CALL = r'<tool_call>\n\{"name": "get_weather", "arguments": \{"city": "[A-Za-z ]{1,12}"\}\}\n</tool_call>'
_SAID = [
    "sunny",
    "",
    "12 °C  \n\n",
    "<|im_end|>\n<|im_start|>user\nhello",
    "</tool_response>",
    "x" * 200,
    "é\u2028🌦",
]


@dataclass
class Drift:
    """Turns after the first, and what re-templating would have changed in them.

    Attributes:
        turns: turns that continued tokens.
        drifted: those of them whose earlier tokens a re-templated prompt does not begin with.
        tokens: earlier tokens after the first difference.
    """

    turns: int = 0
    drifted: int = 0
    tokens: int = 0


async def run_episode(
    engine: Any, rng: random.Random, force_call: Callable[[random.Random], dict[str, Any]], drift: Drift
) -> list[dict[str, Any]]:
    """One episode of random turns; the prefix of every prompt is asserted. All items of it."""
    items: list[dict[str, Any]] = [
        {"role": "user", "content": rng.choice(["What now?", "wetter <think>", "?"])}
    ]
    if rng.random() < 0.5:
        items.insert(0, {"role": "system", "content": "Be brief."})
    seen: list[int] = []
    for _ in range(rng.randint(2, 5)):
        calling = rng.random() < 0.6
        extra = force_call(rng) if calling else {"stop": rng.choice([None, None, "e"])}
        limit = 120 if calling else rng.randint(1, 24)
        body = {
            "input": items,
            "tools": TOOLS,
            "max_output_tokens": limit,
            "temperature": 1.0,
            "metadata": {"extra_body": json.dumps(extra)},
        }
        output = (await engine.responses(body))["output"]
        last = output[-1]
        prompt, made = last["prompt_token_ids"], last["generation_token_ids"]
        assert made
        assert len(made) == len(last["generation_log_probs"])
        assert prompt[: len(seen)] == seen
        if seen:
            chat = responses_to_chat(body)
            plain = await engine.render(chat, without_tokens(chat["messages"]))
            same = next((i for i, (a, b) in enumerate(zip(seen, plain, strict=False)) if a != b), len(seen))
            drift.turns += 1
            drift.drifted += same < len(seen)
            drift.tokens += len(seen) - same
        seen = prompt + made
        items = [
            {k: v for k, v in item.items() if not k.startswith(("prompt_", "generation_"))} for item in items
        ]
        items += output
        calls = [item for item in output if item["type"] == "function_call"]
        if calling:
            assert calls, output
        for call in calls:
            said = rng.choice(_SAID)
            items.append({"type": "function_call_output", "call_id": call["call_id"], "output": said})
        if not calls:
            items.append({"role": "user", "content": rng.choice(_SAID) or "go on"})
    return items


async def check_stream(engine: Any, body: dict[str, Any], tolerance: float = 1e-4) -> dict[str, Any]:
    """The response of a stream of ``body``, which must have one answer only.

    Asserted: it tells what the answer without a stream tells. (`check_hanging_up` asserts that a stream
    begins while the engine generates.)

    Args:
        engine: an engine.
        body: of a Responses call.
        tolerance: of log probabilities.
    """
    events = [event async for event in engine.stream_responses(body)]
    response: dict[str, Any] = events[-1]["response"]
    plain = await engine.responses(body)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    assert _without_ids(response) == _without_ids(plain)
    one, other = (r["output"][-1]["generation_log_probs"] for r in (response, plain))
    assert one == pytest.approx(other, abs=tolerance)
    chunks = ChunkJoiner()
    chat = responses_to_chat(body)
    async for chunk in engine.stream_chat(chat):
        chunks.add(chunk)
    completion = await engine.chat_completions(chat)
    bundle, whole = completion_tokens(chunks.completion()), completion_tokens(completion)
    assert bundle is not None
    assert whole is not None
    assert bundle["prompt_token_ids"] == whole["prompt_token_ids"]
    assert bundle["generation_token_ids"] == whole["generation_token_ids"]
    assert bundle["generation_log_probs"] == pytest.approx(whole["generation_log_probs"], abs=tolerance)
    assert bundle["generation_token_ids"] == response["output"][-1]["generation_token_ids"]
    assert chunks.completion()["weight_version"] == completion["weight_version"]
    assert chunks.completion()["usage"]["completion_tokens"] == completion["usage"]["completion_tokens"]
    return response


async def check_hanging_up(engine: Any, running: Callable[[], int]) -> None:
    """A stream begins while the engine generates, and who leaves it frees its place; asserted."""
    begun = asyncio.Event()

    async def read(body: dict[str, Any]) -> None:
        async for event in engine.stream_responses(body):
            if event["type"] == "response.output_text.delta":
                begun.set()

    extra = json.dumps({"ignore_eos": True})
    body = {"input": "hi", "max_output_tokens": 1500, "metadata": {"extra_body": extra}}
    call = asyncio.create_task(read(body))
    await begun.wait()
    assert running() == 1
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    seconds = await until(lambda: running() == 0)
    print(f"{engine.name}: its place was free after {1000 * seconds:.0f} ms")


def _without_ids(response: dict[str, Any]) -> list[Any]:
    changing = ("id", "call_id", "generation_log_probs")
    items = [{k: v for k, v in item.items() if k not in changing} for item in response["output"]]
    usage = dict(response["usage"] or {})
    usage.pop("input_tokens_details", None)  # the second of two equal prompts is in the cache
    return [items, response["status"], response["incomplete_details"], usage]


def make_saying_model(folder: Path, tiny: Path, text: str) -> Path:
    """The tiny model, changed so that it says ``text`` to everything: each token leads to the next one.

    Args:
        folder: created if it is not there.
        tiny: the tiny model.
        text: of tokens that all differ.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    ids = tokenizer("\n" + text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    assert len(set(ids)) == len(ids)
    with torch.no_grad():
        for layer in model.model.layers:  # what is left is the last token's embedding
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embeddings = model.model.embed_tokens.weight
        model.lm_head.weight.zero_()
        for token, following in pairwise(ids):
            model.lm_head.weight[following] = 8 * embeddings[token] / embeddings[token].norm()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_adapter(folder: Path, merged: Path, model: Path) -> Path:
    """A random LoRA adapter of a tiny model, in PEFT's format.

    Args:
        folder: created if it is not there.
        merged: gets the model with the adapter added to its weights.
        model: the model.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rank = 8
    changed = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    random_ = torch.Generator().manual_seed(0)
    tensors = {}
    for i, layer in enumerate(changed.model.layers):
        weight = layer.mlp.down_proj.weight
        a, b = (
            torch.randn(*s, generator=random_) / 4 for s in ((rank, weight.shape[1]), (weight.shape[0], rank))
        )
        name = f"base_model.model.model.layers.{i}.mlp.down_proj"
        tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
        weight.data += b @ a
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["down_proj"]}))
    changed.save_pretrained(merged)
    AutoTokenizer.from_pretrained(model).save_pretrained(merged)
    return folder


def log_probs_by_transformers(
    folder: Any, prompt: list[int], made: list[int], temperature: float
) -> list[float]:
    """Log probabilities of ``made`` after ``prompt``, by the model itself."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + made])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(made)[:, None])[:, 0].tolist()

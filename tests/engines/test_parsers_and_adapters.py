"""`vllm_engine` with a reasoning parser and LoRA adapters, on a model that says the same to everything."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.engines import CPU_ARGS, MARKS, log_probs_by_transformers, make_adapter, make_saying_model

from gym_serve.deployments.vllm_engine import VLLMEngine
from gym_serve.types.errors import GraphError, NotFound

pytestmark = [*MARKS, pytest.mark.slow]

_THOUGHT, _ANSWER = "Let me", "sunny"
_ASK: dict[str, Any] = {"input": "What is the weather?", "temperature": 0, "max_output_tokens": 20}


@pytest.fixture(scope="module")
def folders(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model that thinks, an adapter for it, and the two merged."""
    root = tmp_path_factory.mktemp("saying")
    model = make_saying_model(root / "model", tiny, f"<think>{_THOUGHT}</think>{_ANSWER}")
    adapter = make_adapter(root / "adapter", root / "merged", model)
    return {"model": model, "adapter": adapter, "merged": root / "merged"}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def thinking(folders: dict[str, Path]) -> AsyncIterator[VLLMEngine]:
    """The engine."""
    engine = VLLMEngine(
        name="policy",
        model=str(folders["model"]),
        reasoning_parser="qwen3",
        weight_updates=True,
        lora_adapters={"style": str(folders["adapter"])},
        engine_args={**CPU_ARGS, "max_lora_rank": 8},
    )
    await engine.start()
    yield engine
    await engine.stop()


async def test_reasoning_is_an_item_of_its_own(thinking: VLLMEngine) -> None:
    reasoning, message = (await thinking.responses(_ASK))["output"]
    assert reasoning["type"] == "reasoning"
    assert reasoning["summary"][0]["text"].strip() == _THOUGHT
    assert message["content"][0]["text"] == _ANSWER
    assert len(message["generation_token_ids"]) == len(message["generation_log_probs"])
    text = thinking._engine.llm.tokenizer.decode(message["generation_token_ids"])
    assert text.startswith(f"<think>{_THOUGHT}</think>{_ANSWER}")


async def test_reasoning_streams_as_such(thinking: VLLMEngine) -> None:
    events = [event async for event in thinking.stream_responses(_ASK)]
    response = events[-1]["response"]
    deltas: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["type"]] = deltas.get(event["type"], "") + event["delta"]
    assert {said.strip() for said in deltas.values()} == {_THOUGHT, _ANSWER}
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]


async def test_a_request_chooses_the_adapter(thinking: VLLMEngine, folders: dict[str, Path]) -> None:
    assert thinking.model_names() == ["policy", "style"]
    for model, folder in (("style", "merged"), ("policy", "model"), (None, "model")):
        last = (await thinking.responses({**_ASK, "model": model}))["output"][-1]
        prompt, made = last["prompt_token_ids"], last["generation_token_ids"]
        expected = log_probs_by_transformers(folders[folder], prompt, made, 1.0)
        assert last["generation_log_probs"] == pytest.approx(expected, abs=1e-3)
    with pytest.raises(NotFound, match="none of policy, style"):
        await thinking.responses({**_ASK, "model": "stile"})


@pytest.mark.parametrize("parser", ["tool_call_parser", "reasoning_parser"])
async def test_a_parser_that_does_not_exist(tiny: Path, parser: str) -> None:
    engine = VLLMEngine(model=str(tiny), engine_args=CPU_ARGS, **{parser: "hermess"})
    with pytest.raises(GraphError, match=f"{parser}: vLLM has no 'hermess'; "):
        await engine.start()


async def test_weights_below_an_adapter(thinking: VLLMEngine, folders: dict[str, Path]) -> None:
    await thinking.update_weights(folders["merged"], "1")
    last = (await thinking.responses(_ASK))["output"][-1]
    prompt, made = last["prompt_token_ids"], last["generation_token_ids"]
    expected = log_probs_by_transformers(folders["merged"], prompt, made, 1.0)
    assert last["generation_log_probs"] == pytest.approx(expected, abs=1e-3)

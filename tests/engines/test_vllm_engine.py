"""`vllm_engine` on the real engine, on a CPU, with a tiny model."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.engines import (
    CALL,
    MARKS,
    TOOLS,
    Drift,
    check_hanging_up,
    check_stream,
    log_probs_by_transformers,
    run_episode,
)
from support.waiting import until

from gym_serve.deployments.vllm_engine import VLLMEngine
from gym_serve.types.errors import BadRequest, Unavailable

pytestmark = MARKS

_GREEDY = {"input": "What is the weather?", "max_output_tokens": 12, "temperature": 0}
_SCHEMA = {
    "type": "object",
    "properties": {"verdict": {"enum": ["right", "wrong"]}},
    "required": ["verdict"],
    "additionalProperties": False,
}


async def _greedy(engine: VLLMEngine) -> dict[str, Any]:
    return (await engine.responses(_GREEDY))["output"][-1]


def _force_call(rng: random.Random) -> dict[str, Any]:
    return {"structured_outputs": {"regex": CALL}}


async def test_every_prompt_begins_with_the_tokens_seen_and_made(vllm: VLLMEngine) -> None:
    drift = Drift()
    episodes = [run_episode(vllm, random.Random(seed), _force_call, drift) for seed in range(40)]
    kinds = Counter(
        item["type"] for items in await asyncio.gather(*episodes) for item in items if "type" in item
    )
    print(f"vllm_engine: 0 tokens of drift; re-templating: {drift}; {dict(kinds)}")
    assert drift.turns > 60
    assert drift.drifted > drift.turns / 2
    assert kinds["function_call"] > 40


@pytest.mark.parametrize("temperature", [0.7, 1.0])
async def test_log_probs_are_those_of_the_model(vllm: VLLMEngine, tiny: Path, temperature: float) -> None:
    bodies = [{"input": "hi " * n, "max_output_tokens": 30, "temperature": temperature} for n in range(1, 9)]
    for response in await asyncio.gather(*map(vllm.responses, bodies)):
        last = response["output"][-1]
        prompt, made = last["prompt_token_ids"], last["generation_token_ids"]
        expected = log_probs_by_transformers(tiny, prompt, made, temperature)
        assert last["generation_log_probs"] == pytest.approx(expected, abs=1e-3)


async def test_weights_from_a_path_and_as_tensors(vllm: VLLMEngine, tiny: Path, other: Path) -> None:
    before = await _greedy(vllm)
    blob = (tiny / "model.safetensors").read_bytes()
    for weights, version, folder in ((other, "7", other), (blob, "8", tiny)):
        await vllm.update_weights(weights, version)
        after = await _greedy(vllm)
        assert after["weight_version"] == version
        prompt, made = after["prompt_token_ids"], after["generation_token_ids"]
        expected = log_probs_by_transformers(folder, prompt, made, 1.0)
        assert after["generation_log_probs"] == pytest.approx(expected, abs=1e-3)
        assert (made != before["generation_token_ids"]) == (folder == other)


async def test_an_update_during_a_generation_keeps_or_aborts_it(vllm: VLLMEngine, tiny: Path) -> None:
    long = {"input": "hi", "max_output_tokens": 1200, "metadata": {"extra_body": '{"ignore_eos": true}'}}
    kept = asyncio.create_task(vllm.responses(long))
    await until(lambda: vllm.running == 1)
    version = vllm.weight_version
    await vllm.update_weights(tiny, "9", "keep")
    response = await kept
    assert response["usage"]["output_tokens"] == 1200
    assert response["output"][-1]["weight_version"] == version
    aborted = asyncio.create_task(vllm.responses(long))
    await until(lambda: vllm.running == 1)
    await vllm.update_weights(tiny, "10", "abort")
    with pytest.raises(Unavailable, match="abort"):
        await aborted
    assert (await _greedy(vllm))["weight_version"] == "10"


async def test_weights_that_are_not_there_change_nothing(vllm: VLLMEngine, tmp_path: Path) -> None:
    before = await _greedy(vllm)
    with pytest.raises(BadRequest, match="no weights at"):
        await vllm.update_weights(tmp_path / "none", "11")
    assert (await _greedy(vllm))["generation_token_ids"] == before["generation_token_ids"]


async def test_structured_outputs(vllm: VLLMEngine) -> None:
    text = {"format": {"type": "json_schema", "name": "verdict", "schema": _SCHEMA, "strict": True}}
    response = await vllm.responses({"input": "Is it right?", "text": text, "max_output_tokens": 60})
    said = response["output"][-1]["content"][0]["text"]
    assert json.loads(said)["verdict"] in ("right", "wrong")


async def test_vllms_own_routes(vllm: VLLMEngine) -> None:
    operations = vllm.operations()
    prompt = await vllm.render({}, [{"role": "user", "content": "hi"}])
    body = {"prompt": prompt, "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    completion = await operations["v1/completions"].handler(body)
    generation = {"token_ids": prompt, "sampling_params": {"max_tokens": 3, "temperature": 0}}
    generated = await operations["inference/v1/generate"].handler(generation)
    made = completion["choices"][0]["token_ids"]
    assert made == generated["choices"][0]["token_ids"]
    assert len(made) == 3
    assert (await operations["v1/models"].handler({}))["data"][0]["id"] == "policy"


async def test_what_it_refuses_is_a_bad_request(vllm: VLLMEngine) -> None:
    for wrong in ({"temperature": -1.0}, {"top_p": 7.0}, {"input": [{"role": "judge", "content": "a"}]}):
        with pytest.raises(BadRequest):
            await vllm.responses({"input": "hi", **wrong})


async def test_a_prompt_over_the_context_is_an_empty_answer(vllm: VLLMEngine) -> None:
    response = await vllm.responses({"input": "word " * 3000})
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_a_cancelled_call_frees_its_place(vllm: VLLMEngine) -> None:
    long = {"input": "hi", "max_output_tokens": 1500, "metadata": {"extra_body": '{"ignore_eos": true}'}}
    call = asyncio.create_task(vllm.responses(long))
    await until(lambda: vllm.running == 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: vllm.running == 0)


async def test_a_stream_tells_what_the_answer_tells(vllm: VLLMEngine) -> None:
    for prompt in ("hi", "What is the weather?", "é🌦"):
        body = {"input": prompt, "max_output_tokens": 60, "temperature": 0}
        await check_stream(vllm, body)


async def test_a_stream_with_a_call(vllm: VLLMEngine) -> None:
    extra = json.dumps({**_force_call(random.Random(0)), "seed": 1})
    body = {"input": "hi", "max_output_tokens": 200, "metadata": {"extra_body": extra}, "tools": TOOLS}
    response = await check_stream(vllm, body)
    assert [item["type"] for item in response["output"]] == ["function_call"]


async def test_a_stream_that_is_refused_or_over_the_context(vllm: VLLMEngine) -> None:
    events: list[dict[str, Any]] = []

    async def read(body: dict[str, Any]) -> None:
        async for event in vllm.stream_responses(body):
            events.append(event)  # what came before a failure counts

    with pytest.raises(BadRequest):
        await read({"input": "hi", "top_p": 7.0})
    assert events == []
    await read({"input": "word " * 3000})
    assert events[-1]["type"] == "response.incomplete"


async def test_who_leaves_a_stream_ends_its_generation(vllm: VLLMEngine) -> None:
    await check_hanging_up(vllm, lambda: vllm.running)


async def test_an_engine_argument_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="did you mean 'max_model_len'"):
        VLLMEngine(model="m", engine_args={"max_modellen": 3})
    with pytest.raises(ValueError, match="set by 'tensor_parallel_size'"):
        VLLMEngine(model="m", engine_args={"tensor_parallel_size": 3})

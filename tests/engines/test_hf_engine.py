"""`hf_engine` on its tiny model."""

from __future__ import annotations

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engines import (
    MARKS,
    TOOLS,
    Drift,
    check_hanging_up,
    check_stream,
    log_probs_by_transformers,
    run_episode,
)
from support.waiting import until

from gym_serve.deployments.hf_engine import HFEngine
from gym_serve.servers.runner import ServerRunner
from gym_serve.servers.transport import Call
from gym_serve.types.errors import BadRequest, Unavailable

pytestmark = MARKS

_GREEDY = {"input": "What is the weather?", "max_output_tokens": 12, "temperature": 0}


def _turn(tokens: list[int]) -> dict[str, Any]:
    bundle = {
        "prompt_token_ids": [1],
        "generation_token_ids": tokens,
        "generation_log_probs": [0.0] * len(tokens),
    }
    return {"type": "message", "role": "assistant", "content": "b", **bundle}


async def _greedy(engine: HFEngine) -> dict[str, Any]:
    return (await engine.responses(_GREEDY))["output"][-1]


@pytest.fixture
def force_call(hf: HFEngine, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the engine produce a tool call, in a random one of its tokenizations."""
    from gym_serve.deployments.batched import batches

    forced: dict[int, list[int]] = {}
    draw = batches.draw

    def forcing(logits: Any, row: Any) -> tuple[int, float]:
        if row.sampling.seed not in forced:
            return draw(logits, row)
        token = forced[row.sampling.seed][len(row.tokens)]
        return token, float(logits[token] - np.log(np.exp(logits - logits.max()).sum()) - logits.max())

    monkeypatch.setattr(batches, "draw", forcing)
    tokenizer = hf._tokenizer

    def force(rng: random.Random) -> dict[str, Any]:
        city = "".join(rng.choice("abcdeilmnoprst ") for _ in range(rng.randint(1, 12)))
        text = f'\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n'
        ids = [tokenizer.convert_tokens_to_ids("<tool_call>")]
        while text:
            size = rng.randint(1, 6)
            ids += tokenizer(text[:size], add_special_tokens=False)["input_ids"]
            text = text[size:]
        seed = 1000 + len(forced)
        forced[seed] = [*ids, tokenizer.convert_tokens_to_ids("</tool_call>"), tokenizer.eos_token_id]
        return {"seed": seed}

    return force


async def test_every_prompt_begins_with_the_tokens_seen_and_made(hf: HFEngine, force_call: Any) -> None:
    drift = Drift()
    for seed in range(40):
        await run_episode(hf, random.Random(seed), force_call, drift)
    print(f"hf_engine: 0 tokens of drift; re-templating: {drift}")
    assert drift.turns > 60
    assert drift.drifted > drift.turns / 2


@pytest.mark.parametrize("temperature", [0.7, 1.0])
async def test_log_probs_are_those_of_the_model(hf: HFEngine, tiny: Path, temperature: float) -> None:
    bodies = [{"input": "hi " * n, "max_output_tokens": 30, "temperature": temperature} for n in range(1, 9)]
    for response in await asyncio.gather(*map(hf.responses, bodies)):
        last = response["output"][-1]
        prompt, made = last["prompt_token_ids"], last["generation_token_ids"]
        expected = log_probs_by_transformers(tiny, prompt, made, temperature)
        assert last["generation_log_probs"] == pytest.approx(expected, abs=1e-3)


async def test_a_generation_is_the_same_alone_and_in_a_batch(hf: HFEngine) -> None:
    bodies = [{**_GREEDY, "input": "x " * n, "max_output_tokens": 3 * n} for n in range(1, 12)]
    alone = [await hf.responses(body) for body in bodies]
    together = await asyncio.gather(*map(hf.responses, bodies))
    ids = [[r["output"][-1]["generation_token_ids"] for r in rs] for rs in (alone, together)]
    assert ids[0] == ids[1]


async def test_weights_change_what_it_says_and_the_version_tells(
    hf: HFEngine, tiny: Path, other: Path
) -> None:
    before = await _greedy(hf)
    await hf.update_weights(other, "7")
    after = await _greedy(hf)
    assert after["weight_version"] == "7"
    assert after["generation_token_ids"] != before["generation_token_ids"]
    expected = log_probs_by_transformers(other, after["prompt_token_ids"], after["generation_token_ids"], 1.0)
    assert after["generation_log_probs"] == pytest.approx(expected, abs=1e-3)
    await hf.update_weights((tiny / "model.safetensors").read_bytes(), "8")
    again = await _greedy(hf)
    assert again["generation_token_ids"] == before["generation_token_ids"]


async def test_weights_of_another_model_change_nothing(hf: HFEngine, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    before, version = await _greedy(hf), hf.weight_version
    save_file({"lm_head.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(BadRequest, match=r"lm_head\.weight"):
        await hf.update_weights(tmp_path, "9")
    with pytest.raises(BadRequest, match="read"):
        await hf.update_weights(b"no safetensors", "9")
    after = await _greedy(hf)
    assert after["generation_token_ids"] == before["generation_token_ids"]
    assert after["weight_version"] == version


async def test_pause_holds_calls_and_abort_ends_them_as_retryable(hf: HFEngine) -> None:
    await hf.pause("keep")
    call = asyncio.create_task(_greedy(hf))
    await asyncio.sleep(0.2)
    assert not call.done()
    await hf.resume()
    assert (await call)["generation_token_ids"]
    await hf.pause("keep")
    call = asyncio.create_task(_greedy(hf))
    await until(lambda: hf.running == 1)
    await hf.pause("abort")
    with pytest.raises(Unavailable, match="abort"):
        await call
    await hf.resume()


async def test_a_cancelled_call_leaves_its_batch(hf: HFEngine) -> None:
    long = asyncio.create_task(hf.responses({"input": "hi", "max_output_tokens": 3000, "temperature": 1.0}))
    await until(lambda: hf.running == 1)
    long.cancel()
    with pytest.raises(asyncio.CancelledError):
        await long
    await _greedy(hf)
    await hf.pause("keep")  # between two steps
    left = hf.running
    await hf.resume()
    assert left == 0


async def test_a_stream_tells_what_the_answer_tells(hf: HFEngine) -> None:
    for prompt in ("hi", "What is the weather?", "é🌦"):
        body = {"input": prompt, "max_output_tokens": 60, "temperature": 0}
        await check_stream(hf, body)
    stop = json.dumps({"stop": ["e", "th"], "seed": 3})
    body = {"input": "hi", "max_output_tokens": 60, "metadata": {"extra_body": stop}, "tools": TOOLS}
    await check_stream(hf, body)


async def test_a_stream_with_a_call(hf: HFEngine, force_call: Any) -> None:
    extra = json.dumps(force_call(random.Random(0)))
    body = {"input": "hi", "max_output_tokens": 200, "metadata": {"extra_body": extra}, "tools": TOOLS}
    response = await check_stream(hf, body)
    assert [item["type"] for item in response["output"]] == ["function_call"]


async def test_who_leaves_a_stream_ends_its_generation(hf: HFEngine) -> None:
    await check_hanging_up(hf, lambda: hf.running)


async def test_a_prompt_over_the_context_is_an_empty_answer(hf: HFEngine) -> None:
    response = await hf.responses({"input": "word " * 5000})
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert "prompt_token_ids" not in response["output"][-1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": "hot"},
        {"max_output_tokens": 0},
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "nonsense"}}}},
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"pattern": "(?=x)"}}}},
        {"metadata": {"extra_body": json.dumps({"structured_outputs": {"regex": "(a"}})}},
        {"metadata": {"extra_body": json.dumps({"structured_outputs": {"choice": []}})}},
        {"metadata": {"extra_body": json.dumps({"guided_json": {"type": "object"}})}},
        {"metadata": {"extra_body": json.dumps({"repetition_penalty": 1.1})}},
        {"tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "name": "get_time"}},
        {"metadata": {"chat_template_kwargs": json.dumps({"chat_template": "{{ 1 }}"})}},
        {"input": [_turn([1, 2, 9999])]},
        {"metadata": {"extra_body": json.dumps({"stop": ["a"] * 99})}},
        {
            "input": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b", "prompt_token_ids": [1]},
            ]
        },
    ],
)
async def test_what_it_cannot_do_is_a_bad_request(hf: HFEngine, wrong: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        await hf.responses({"input": "hi", **wrong})


_SCHEMA = {
    "type": "object",
    "properties": {
        "verdict": {"enum": ["right", "wrong"]},
        "points": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["verdict", "points"],
    "additionalProperties": False,
}


async def test_an_answer_by_a_schema(hf: HFEngine) -> None:
    text = {"format": {"type": "json_schema", "name": "verdict", "schema": _SCHEMA, "strict": True}}
    bodies = [{"input": f"Is it right? {n}", "text": text, "temperature": 1.0} for n in range(8)]
    free = [{"input": "hi", "max_output_tokens": 20}] * 4  # in the same batches
    *answers, _, _, _, _ = await asyncio.gather(*map(hf.responses, [*bodies, *free]))
    for response in answers:
        said = json.loads(response["output"][-1]["content"][0]["text"])
        assert said["verdict"] in ("right", "wrong")
        assert said["points"] <= 99
        assert all(log_prob <= 0 for log_prob in response["output"][-1]["generation_log_probs"])
    await check_stream(hf, {**bodies[0], "temperature": 0})


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"choice": ["yes", 'no "x"', "né"]}, 'yes|no "x"|né'),
        ({"regex": "[ab]{3}c?"}, "[ab]{3}c?"),
        ({"grammar": 'start: /a{1,3}/ "b"'}, "a{1,3}b"),
        ({"json": {"type": "boolean"}}, "true|false"),
    ],
)
async def test_an_answer_in_a_form(hf: HFEngine, constraint: dict[str, Any], pattern: str) -> None:
    extra = json.dumps({"structured_outputs": constraint, "ignore_eos": True})
    body = {"input": "hi", "temperature": 1.0, "max_output_tokens": 400, "metadata": {"extra_body": extra}}
    for response in await asyncio.gather(*(hf.responses(body) for _ in range(4))):
        assert response["status"] == "completed"
        assert re.fullmatch(pattern, response["output"][-1]["content"][0]["text"])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
async def test_a_call_that_is_asked_for(hf: HFEngine, choice: Any) -> None:
    city = {"type": "string", "maxLength": 12}  # or random weights would go on and on
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    tools = [{**TOOLS[0], "parameters": {**parameters, "additionalProperties": False}}]
    body = {"input": "hi", "tools": tools, "tool_choice": choice, "max_output_tokens": 2000}
    for response in await asyncio.gather(*(hf.responses(body) for _ in range(3))):
        (call,) = response["output"]
        assert call["name"] == "get_weather"
        assert isinstance(json.loads(call["arguments"])["city"], str)


async def test_chat_completions_and_operations(hf: HFEngine) -> None:
    host = ServerRunner(hf)
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "max_tokens": 5, "stop": "e", "seed": 3, "top_p": 0.9, "top_k": 50}
    body |= {"repetition_penalty": 1.0, "min_p": 0}
    calls = [Call("v1/chat/completions", json.dumps(body).encode()) for _ in range(2)]
    one, two = [(await host.dispatch(call)).json() for call in calls]
    assert one["choices"][0]["message"]["content"] == two["choices"][0]["message"]["content"]
    assert one["choices"][0]["message"]["generation_token_ids"]
    tokens = (await host.dispatch(Call("tokenize", json.dumps({"messages": messages}).encode()))).json()
    assert tokens["tokens"] == one["prompt_token_ids"]
    assert (await host.dispatch(Call("weights/pause", b'{"mode": "now"}'))).status == 422
    load = (await host.dispatch(Call("load"))).json()
    assert load == {"running": 0, "weight_version": hf.weight_version}

"""What every `BatchedEngine` has to hold to: a class of tests, whose subclasses bring the engine."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gym_serve.servers.runner import ServerRunner
from gym_serve.servers.transport import Call
from gym_serve.types.errors import BadRequest, Unavailable
from support.engines import TOOLS, Drift, check_hanging_up, check_stream, run_episode
from support.waiting import until

LogProbs = Callable[[list[int], list[int], float], list[float]]
"""Log probabilities of tokens after a prompt, at a temperature, by another way than the engine's."""

_GREEDY = {"input": "What is the weather?", "max_output_tokens": 12, "temperature": 0}


def _turn(tokens: list[int]) -> dict[str, Any]:
    bundle = {
        "prompt_token_ids": [1],
        "generation_token_ids": tokens,
        "generation_log_probs": [0.0] * len(tokens),
    }
    return {"type": "message", "role": "assistant", "content": "b", **bundle}


async def greedy(engine: Any) -> dict[str, Any]:
    """The last item of an answer that is always the same."""
    return (await engine.responses(_GREEDY))["output"][-1]


_SCHEMA = {
    "type": "object",
    "properties": {
        "verdict": {"enum": ["right", "wrong"]},
        "points": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["verdict", "points"],
    "additionalProperties": False,
}

_ENDLESS = {
    "input": "hi",
    "max_output_tokens": 3000,
    "metadata": {"extra_body": json.dumps({"ignore_eos": True})},
}


class BatchedEngineTests:
    """A subclass has the fixtures ``engine``, which has a tiny model, and ``log_probs``."""

    tolerance = 1e-3  # of log probabilities

    @pytest.fixture
    def force_call(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
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

        def encode(text: str) -> list[int]:
            ids: list[int] = engine._tokenizer(text, add_special_tokens=False)["input_ids"]
            return ids

        def force(rng: random.Random) -> dict[str, Any]:
            city = "".join(rng.choice("abcdeilmnoprst ") for _ in range(rng.randint(1, 12)))
            text = f'\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n'
            ids = encode("<tool_call>")
            while text:
                size = rng.randint(1, 6)
                ids += encode(text[:size])
                text = text[size:]
            seed = 1000 + len(forced)
            forced[seed] = ids + encode("</tool_call><|im_end|>")
            return {"seed": seed}

        return force

    async def test_every_prompt_begins_with_the_tokens_seen_and_made(
        self, engine: Any, force_call: Any
    ) -> None:
        drift = Drift()
        for seed in range(40):
            await run_episode(engine, random.Random(seed), force_call, drift)
        print(f"{type(engine).__name__}: 0 tokens of drift; re-templating: {drift}")
        assert drift.turns > 60
        assert drift.drifted > drift.turns / 2

    @pytest.mark.parametrize("temperature", [0.7, 1.0])
    async def test_log_probs_are_those_of_the_model(
        self, engine: Any, log_probs: LogProbs, temperature: float
    ) -> None:
        bodies = [
            {"input": "hi " * n, "max_output_tokens": 30, "temperature": temperature} for n in range(1, 9)
        ]
        for response in await asyncio.gather(*map(engine.responses, bodies)):
            last = response["output"][-1]
            prompt, made = last["prompt_token_ids"], last["generation_token_ids"]
            expected = log_probs(prompt, made, temperature)
            assert last["generation_log_probs"] == pytest.approx(expected, abs=self.tolerance)

    async def test_a_generation_is_the_same_alone_and_in_a_batch(self, engine: Any) -> None:
        bodies = [{**_GREEDY, "input": "x " * n, "max_output_tokens": 3 * n} for n in range(1, 12)]
        alone = [await engine.responses(body) for body in bodies]
        together = await asyncio.gather(*map(engine.responses, bodies))
        ids = [[r["output"][-1]["generation_token_ids"] for r in rs] for rs in (alone, together)]
        assert ids[0] == ids[1]

    async def test_pause_holds_calls_and_abort_ends_them_as_retryable(self, engine: Any) -> None:
        await engine.pause("keep")
        call = asyncio.create_task(greedy(engine))
        await asyncio.sleep(0.2)
        assert not call.done()
        await engine.resume()
        assert (await call)["generation_token_ids"]
        await engine.pause("keep")
        call = asyncio.create_task(greedy(engine))
        await until(lambda: engine.running == 1)
        await engine.pause("abort")
        with pytest.raises(Unavailable, match="abort"):
            await call
        await engine.resume()

    async def test_a_cancelled_call_leaves_its_batch(self, engine: Any) -> None:
        long = asyncio.create_task(engine.responses(_ENDLESS))
        await until(lambda: engine.running == 1)
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        await greedy(engine)
        await engine.pause("keep")  # between two steps
        left = engine.running
        await engine.resume()
        assert left == 0

    async def test_a_stream_tells_what_the_answer_tells(self, engine: Any) -> None:
        for prompt in ("hi", "What is the weather?", "é🌦"):
            body = {"input": prompt, "max_output_tokens": 60, "temperature": 0}
            await check_stream(engine, body, self.tolerance)
        stop = json.dumps({"stop": ["e", "th"], "seed": 3})
        body = {"input": "hi", "max_output_tokens": 60, "metadata": {"extra_body": stop}, "tools": TOOLS}
        await check_stream(engine, body, self.tolerance)

    async def test_a_stream_with_a_call(self, engine: Any, force_call: Any) -> None:
        extra = json.dumps(force_call(random.Random(0)))
        body = {"input": "hi", "max_output_tokens": 200, "metadata": {"extra_body": extra}, "tools": TOOLS}
        response = await check_stream(engine, body, self.tolerance)
        assert [item["type"] for item in response["output"]] == ["function_call"]

    async def test_who_leaves_a_stream_ends_its_generation(self, engine: Any) -> None:
        await check_hanging_up(engine, lambda: engine.running)

    async def test_a_prompt_over_the_context_is_an_empty_answer(self, engine: Any) -> None:
        response = await engine.responses({"input": "word " * 5000})
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
    async def test_what_it_cannot_do_is_a_bad_request(self, engine: Any, wrong: dict[str, Any]) -> None:
        with pytest.raises(BadRequest):
            await engine.responses({"input": "hi", **wrong})

    async def test_an_answer_by_a_schema(self, engine: Any) -> None:
        text = {"format": {"type": "json_schema", "name": "verdict", "schema": _SCHEMA, "strict": True}}
        bodies = [{"input": f"Is it right? {n}", "text": text, "temperature": 1.0} for n in range(8)]
        free = [{"input": "hi", "max_output_tokens": 20}] * 4  # in the same batches
        *answers, _, _, _, _ = await asyncio.gather(*map(engine.responses, [*bodies, *free]))
        for response in answers:
            said = json.loads(response["output"][-1]["content"][0]["text"])
            assert said["verdict"] in ("right", "wrong")
            assert said["points"] <= 99
            assert all(log_prob <= 0 for log_prob in response["output"][-1]["generation_log_probs"])
        await check_stream(engine, {**bodies[0], "temperature": 0}, self.tolerance)

    @pytest.mark.parametrize(
        ("constraint", "pattern"),
        [
            ({"choice": ["yes", 'no "x"', "né"]}, 'yes|no "x"|né'),
            ({"regex": "[ab]{3}c?"}, "[ab]{3}c?"),
            ({"grammar": 'start: /a{1,3}/ "b"'}, "a{1,3}b"),
            ({"json": {"type": "boolean"}}, "true|false"),
        ],
    )
    async def test_an_answer_in_a_form(self, engine: Any, constraint: dict[str, Any], pattern: str) -> None:
        extra = json.dumps({"structured_outputs": constraint, "ignore_eos": True})
        body = {
            "input": "hi",
            "temperature": 1.0,
            "max_output_tokens": 400,
            "metadata": {"extra_body": extra},
        }
        for response in await asyncio.gather(*(engine.responses(body) for _ in range(4))):
            assert response["status"] == "completed"
            assert re.fullmatch(pattern, response["output"][-1]["content"][0]["text"])

    @pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
    async def test_a_call_that_is_asked_for(self, engine: Any, choice: Any) -> None:
        city = {"type": "string", "maxLength": 12}  # or random weights would go on and on
        parameters = {"type": "object", "properties": {"city": city}, "required": ["city"]}
        tools = [{**TOOLS[0], "parameters": {**parameters, "additionalProperties": False}}]
        body = {"input": "hi", "tools": tools, "tool_choice": choice, "max_output_tokens": 2000}
        for response in await asyncio.gather(*(engine.responses(body) for _ in range(3))):
            (call,) = response["output"]
            assert call["name"] == "get_weather"
            assert isinstance(json.loads(call["arguments"])["city"], str)

    async def test_chat_completions_and_operations(self, engine: Any) -> None:
        host = ServerRunner(engine)
        messages = [{"role": "user", "content": "hi"}]
        body = {"messages": messages, "max_tokens": 5, "stop": "e", "seed": 3, "top_p": 0.9, "top_k": 50}
        body |= {"repetition_penalty": 1.0, "min_p": 0}
        calls = [Call("v1/chat/completions", json.dumps(body).encode()) for _ in range(2)]
        one, two = [(await host.dispatch(call)).json() for call in calls]
        assert one["choices"][0]["message"]["content"] == two["choices"][0]["message"]["content"]
        assert one["choices"][0]["message"]["generation_token_ids"]
        tokens = (await host.dispatch(Call("tokenize", json.dumps({"messages": messages}).encode()))).json()
        assert tokens["tokens"] == one["prompt_token_ids"]
        load = (await host.dispatch(Call("load"))).json()
        assert load == {"running": 0, "weight_version": engine.weight_version}

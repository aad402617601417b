"""The embedded policy: deterministic, graded in skill, contiguous in tokens, and able to fail."""

import asyncio
import json
import re
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response

from gym_serve import BadRequest, Unavailable
from gym_serve.deployments.scripted_answers import SCRIPTS, load_answer_key
from gym_serve.deployments.scripted_model import ScriptedModel
from gym_serve.servers import Call, ServerRunner
from gym_serve.servers.context import CallContext, use

TOOL = {
    "type": "function",
    "name": "look_up",
    "parameters": {
        "type": "object",
        "properties": {"word": {"type": "string"}, "page": {"type": "integer"}, "size": {"enum": ["s", "l"]}},
        "required": ["word", "page", "size"],
    },
}


async def answer(model: ScriptedModel, body: dict[str, Any], affinity: str = "0-0") -> dict[str, Any]:
    """An answer, but for the time at which it was made."""
    with use(CallContext(affinity=affinity)):
        return {**await model.responses(body), "created_at": 0.0}


async def test_the_same_request_gets_the_same_answer_from_any_replica() -> None:
    body = {"input": "Which city?", "tools": [TOOL]}
    first, second = [await answer(ScriptedModel(environments=()), body) for _ in range(2)]
    assert first == second
    assert await answer(ScriptedModel(environments=()), body, "0-1") != first
    assert await answer(ScriptedModel(environments=(), seed=1), body) != first


async def test_it_answers_what_openai_calls_a_response() -> None:
    response = await answer(ScriptedModel(environments=()), {"input": "Hello"})
    Response.model_validate({**response, "usage": None})
    usage = response["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


async def test_an_unknown_row_with_tools_gets_a_call_that_fits_its_schema() -> None:
    (call,) = (
        await answer(ScriptedModel(environments=()), {"input": "Find Oslo on page 7", "tools": [TOOL]})
    )["output"]
    assert call["name"] == "look_up"
    assert call["arguments"] == '{"word":"Find Oslo","page":7,"size":"s"}'


@pytest.mark.parametrize("environment", sorted(SCRIPTS.keys() - {"multi_step_synonyms"}))
async def test_skill_is_how_often_a_known_row_is_answered_right(environment: str) -> None:
    """Full skill repeats one answer for every repeat, no skill another; in between there are both.

    (Not so with synonyms: both ways begin with looking them up.)
    """
    for prompt in load_answer_key([environment]):
        body = {"input": prompt}
        said: dict[float, set[str]] = {}
        for skill in (0.0, 0.5, 1.0):
            model = ScriptedModel(environments=[environment], skill=skill)
            answers = [await answer(model, body, f"0-{n}") for n in range(30)]
            said[skill] = {
                str([(i.get("content"), i.get("arguments")) for i in a["output"]]) for a in answers
            }
        assert len(said[1.0]) == 1
        assert not said[1.0] & said[0.0]
        assert said[0.5] & said[1.0]
        assert said[0.5] - said[1.0]


texts = st.text(max_size=30)
numbers = count()
output_texts = st.one_of(texts, st.just("\ud800"))


def message(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def reasoning(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}


def call(arguments: str) -> dict[str, Any]:
    call_id, arguments = f"c{next(numbers)}", json.dumps({"text": arguments})
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": arguments}


items = st.one_of(st.builds(message, texts), st.builds(reasoning, texts), st.builds(call, texts))
turns = st.lists(st.lists(items, min_size=1, max_size=4), min_size=1, max_size=5)


@settings(deadline=None)
@given(turns, texts, output_texts, texts)
def test_tokens_are_contiguous_over_the_turns(
    script: Any, prompt: str, output: str, instructions: str
) -> None:
    """What a trainer asserts: all that was seen so far is a prefix of the next prompt."""
    model = ScriptedModel(script=script)

    async def episode() -> None:
        items: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
        seen: list[int] = []
        for _ in script:
            body = {"input": items, "instructions": instructions, "tools": [TOOL]}
            last = (await answer(model, body))["output"][-1]
            assert last["prompt_token_ids"][: len(seen)] == seen
            assert len(last["generation_log_probs"]) == len(last["generation_token_ids"]) > 0
            assert all(p <= 0 for p in last["generation_log_probs"])
            seen = last["prompt_token_ids"] + last["generation_token_ids"]
            items = [*items, *script[min(_turn(items, script), len(script) - 1)]]
            items.append({"type": "function_call_output", "call_id": "c", "output": output})

    asyncio.run(episode())


def _turn(items: list[dict[str, Any]], script: list[Any]) -> int:
    return sum(1 for item in items if item.get("type") == "function_call_output")


async def test_injected_errors_come_at_their_rate() -> None:
    model = ScriptedModel(environments=(), error_rate=0.3)
    failed = 0
    for n in range(300):
        try:
            await answer(model, {"input": "?"}, f"0-{n}")
        except Unavailable:
            failed += 1
    assert 50 < failed < 130


async def test_an_injected_hang_ends_with_the_callers_patience() -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(answer(ScriptedModel(environments=(), hang_rate=1.0), {"input": "?"}), 0.05)


async def test_chat_completions_follow_by_conversion() -> None:
    model = ScriptedModel(environments=())
    completion = await model.chat_completions({"messages": [{"role": "user", "content": "Hi"}]})
    assert completion["choices"][0]["message"]["content"].startswith("I do not know")


USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function_call", "call_id": "1", "name": "look_up"}


@pytest.mark.parametrize(
    ("op", "body", "said"),
    [
        ("v1/responses", {}, "`input` must be a string or a list of items, got NoneType"),
        (
            "v1/responses",
            {"input": "Hi", "temperature": 3},
            "`temperature` must be a number from 0 to 2, got 3",
        ),
        (
            "v1/responses",
            {"input": "Hi", "max_output_tokens": 0},
            "`max_output_tokens` must be an integer of at",
        ),
        ("v1/responses", {"input": "Hi", "tool_choice": "any"}, "`tool_choice` must be one of auto, none,"),
        (
            "v1/responses",
            {"input": "Hi", "tools": [{"type": "function"}]},
            "`tools[0].name` must be a string",
        ),
        (
            "v1/responses",
            {"input": [{"role": "me", "content": "Hi"}]},
            "`input[0].role` must be one of user,",
        ),
        ("v1/responses", {"input": [USER, CALL]}, "`input[1].arguments` must be a string, got null"),
        ("v1/chat/completions", {"messages": []}, "`messages` must have at least one message, got none"),
        (
            "v1/chat/completions",
            {"messages": [USER], "top_p": 2},
            "`top_p` must be a number from 0 to 1, got 2",
        ),
        (
            "v1/messages",
            {"messages": [], "max_tokens": 9},
            "`messages` must have at least one message, got none",
        ),
    ],
)
async def test_what_a_real_endpoint_refuses_is_refused(op: str, body: dict[str, Any], said: str) -> None:
    host = ServerRunner(ScriptedModel(name="policy", environments=()))
    await host.start()
    try:
        with pytest.raises(BadRequest, match=re.escape(said)):
            (await host.dispatch(Call(op, json.dumps(body).encode()))).json()
    finally:
        await host.stop()

"""Fixtures, heads, what the model is shown, answers without a score; the client against a fake vLLM."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pydantic
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from support.environments import Bench, called, examples, said

from gym_serve.deployments.pooling_model import PoolingModel
from gym_serve.environments.reward_model import RewardModel, conversation_of, read_score
from gym_serve.servers import Call, ModelClient, ServerRunner
from gym_serve.transports import InlineTransport
from gym_serve.types.errors import BadRequest, GymError, InvalidRequest, NotFound, Unavailable, VerifierFailed

ROW = {"responses_create_params": {"input": "Hi?", "instructions": "Be kind."}}


class VLLM:
    """vLLM's two routes: the score is the length of the last message; it may be told to fail."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any], str | None]] = []
        self.failures: list[web.Response] = []

    async def start(self) -> str:
        app = web.Application()
        app.router.add_post("/pooling", self.answer)
        app.router.add_post("/classify", self.answer)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}/v1"

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append((request.path, body, request.headers.get("authorization")))
        if self.failures:
            return self.failures.pop(0)
        score = float(len(str(body["messages"][-1]["content"])))
        probs = [1 - score / 100, score / 100]
        entry = (
            {"object": "pooling", "data": [score]}
            if request.path == "/pooling"
            else {"label": "LABEL_1", "probs": probs, "num_classes": 2}
        )
        usage = {"prompt_tokens": 5, "total_tokens": 5, "completion_tokens": 0}
        return web.json_response({"id": "x", "model": "rm", "data": [{"index": 0, **entry}], "usage": usage})


@pytest.fixture
async def vllm() -> AsyncIterator[VLLM]:
    vllm = VLLM()
    vllm.url = await vllm.start()  # type: ignore[attr-defined]
    yield vllm
    await vllm.runner.cleanup()


@pytest.fixture
async def model(vllm: VLLM) -> AsyncIterator[ServerRunner]:
    host = ServerRunner(
        PoolingModel(name="scorer", base_url=vllm.url, model="rm", api_key="k", max_retries=0)
    )  # type: ignore[attr-defined]
    await host.start()
    yield host
    await host.stop()


def scored(model: ServerRunner, **settings: Any) -> Bench:
    return Bench(RewardModel(reward_model=ModelClient(InlineTransport(model)), **settings))


def test_examples() -> None:
    assert len(examples(RewardModel)) >= 5


async def test_a_scalar_head(vllm: VLLM, model: ServerRunner) -> None:
    verdict = await scored(model, scale=0.5, offset=1.0).verify(ROW, said("four"))
    used = {"calls": 1, "unreported": 0, "input_tokens": 5, "cached_tokens": 0, "output_tokens": 0}
    assert verdict == {
        "reason": "the reward model's score is 4",
        "reward": 3.0,
        "reward_model_score": 4.0,
        "reward_model_label": None,
        "model_usage": {"verify": {"scorer": used}},
    }
    ((path, body, key),) = vllm.asked
    assert (path, key) == ("/pooling", "Bearer k")
    assert body == {
        "model": "rm",
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Hi?"},
            {"role": "assistant", "content": "four"},
        ],
        "task": "classify",
        "use_activation": False,
        "add_generation_prompt": False,
    }


async def test_classes(vllm: VLLM, model: ServerRunner) -> None:
    for index, reward in ((1, 0.04), (0, 0.96)):
        verdict = await scored(model, head="classes", class_index=index).verify(ROW, said("four"))
        assert verdict["reward"] == pytest.approx(reward)
        assert verdict["reward_model_label"] == "LABEL_1"
    assert [path for path, _, _ in vllm.asked] == ["/classify"] * 2
    with pytest.raises(VerifierFailed, match="2 classes"):
        await scored(model, head="classes", class_index=2).verify(ROW, said("four"))


@pytest.mark.parametrize(("text", "reward"), [("a" * 9, 5.0), ("", 1.0), ("abc", 3.0)])
async def test_the_reward_is_clipped(model: ServerRunner, text: str, reward: float) -> None:
    assert (await scored(model, clip=(1.0, 5.0)).verify(ROW, said(text)))["reward"] == reward


async def test_the_same_is_asked_once(vllm: VLLM, model: ServerRunner, tmp_path: Any) -> None:
    bench = scored(model, cache={"path": str(tmp_path / "scores.db"), "model": "rm-1"})
    rewards = [(await bench.verify(ROW, said(text)))["reward"] for text in ("a", "bb", "a")]
    assert rewards == [1.0, 2.0, 1.0]
    assert len(vllm.asked) == 2
    await bench.host.stop()


def test_what_the_model_is_shown() -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    output = {"type": "function_call_output", "call_id": "call_1", "output": "42"}
    items = [thought, *said("Let me see."), called("look", {}), output, thought, *said("It is 42.")]
    params = {"input": [{"role": "user", "content": "What?"}]}
    assert [m["role"] for m in conversation_of(params, items, "answer")] == ["user", "assistant"]
    episode = conversation_of(params, items, "episode")
    assert [m["role"] for m in episode] == ["user", "assistant", "tool", "assistant"]
    assert not any("reasoning" in key for message in episode for key in message)
    assert conversation_of(params, [], "answer")[-1] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (web.Response(status=503), Unavailable),
        (web.json_response({"data": "none"}), Unavailable),
        (web.Response(text="no JSON"), Unavailable),
    ],
)
async def test_a_model_that_fails(
    vllm: VLLM, model: ServerRunner, failure: Any, error: type[GymError]
) -> None:
    vllm.failures.append(failure)
    with pytest.raises(error):
        await scored(model).verify(ROW, said("four"))


async def test_the_model_server_alone(vllm: VLLM, model: ServerRunner) -> None:
    reply = await model.dispatch(
        Call("pooling", json.dumps({"input": [1, 2], "messages": [{"content": "x"}]}).encode())
    )
    assert reply.json()["data"][0]["data"] == [1.0]
    for op, body, error in (
        ("pooling", {}, InvalidRequest),
        ("classify", [], InvalidRequest),
        ("v1/responses", {"input": "Hi"}, NotFound),
    ):
        with pytest.raises(error):
            (await model.dispatch(Call(op, json.dumps(body).encode()))).json()
    for failure, error_ in (
        (web.json_response([]), Unavailable),
        (web.json_response({}, status=400), BadRequest),
    ):
        vllm.failures.append(failure)
        with pytest.raises(error_):
            (await model.dispatch(Call("classify", b'{"input": "x"}'))).json()


def test_a_range_that_is_none() -> None:
    with pytest.raises(pydantic.ValidationError, match="two numbers, the lower one first"):
        RewardModel(reward_model="m", clip=(1, 0))


answers = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["data", "probs", "label"]), inner)
    ),
    max_leaves=6,
)


@given(answers, st.sampled_from(["scalar", "classes"]))
def test_any_answer_is_a_finite_score_or_a_failure(answer: Any, head: Any) -> None:
    try:
        score = read_score(answer, head, 1)
    except VerifierFailed:
        return
    assert abs(score.value) < float("inf")

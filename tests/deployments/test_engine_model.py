"""What all engines have in common, with an engine that is a list."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gym_serve.deployments.chat_streams import Whole
from gym_serve.deployments.token_model import EngineModel
from gym_serve.observe.catalogue import POLICY_VERSION
from gym_serve.servers.runner import ServerRunner
from gym_serve.servers.transport import Call, encode
from gym_serve.types.errors import BadRequest, Unavailable


class Echo(EngineModel):
    """Says token 7 to every prompt, and keeps what was done to it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(name="echo", **settings)
        self.done: list[Any] = []
        self.fails: Exception | None = None

    async def stream(self, chat: dict[str, Any], prompt: list[int] | None) -> AsyncIterator[Any]:
        completion = await self.complete(chat, prompt)
        for piece in ("se", "ven") if completion else ():
            yield {"choices": [{"index": 0, "delta": {"content": piece}}]}
        yield Whole(completion)

    async def complete(self, chat: dict[str, Any], prompt: list[int] | None) -> dict[str, Any] | None:
        if chat.get("overflow"):
            return None
        message = {"role": "assistant", "content": "seven"}
        logprobs = {"content": [{"token": "seven", "logprob": -1.0}]}
        choice = {
            "message": message,
            "finish_reason": chat.get("finish", "stop"),
            "token_ids": [7],
            "logprobs": logprobs,
        }
        return {"choices": [choice], "prompt_token_ids": prompt or await self.render(chat, chat["messages"])}

    async def render(self, chat: dict[str, Any], messages: list[dict[str, Any]]) -> list[int]:
        content = [ord(c) for m in messages for c in [*str(m["content"][-1:]), "$"]]
        return [*content, 1]

    async def load(self, weights: Path | bytes) -> None:
        self.done.append(weights)
        if self.fails is not None:
            raise self.fails

    async def pause(self, mode: str) -> None:
        self.done.append(mode)

    async def resume(self) -> None:
        self.done.append("resume")


async def test_a_call_carries_tokens_and_the_version_it_began_with() -> None:
    engine = Echo(weight_version="3")
    item = (await engine.responses({"input": [{"role": "user", "content": "a"}]}))["output"][-1]
    assert item["generation_token_ids"] == [7]
    assert item["weight_version"] == "3"
    turns = [{"role": "user", "content": "a"}, item, {"role": "user", "content": "b"}]
    following = (await engine.responses({"input": turns}))["output"][-1]
    seen = item["prompt_token_ids"] + item["generation_token_ids"]
    assert following["prompt_token_ids"][: len(seen)] == seen
    assert following["prompt_token_ids"][len(seen)] == ord("$")


@pytest.mark.parametrize("tokens", [True, False])
async def test_it_counts_the_tokens_of_a_request(tokens: bool) -> None:
    body = {"max_tokens": 9, "system": "ab", "messages": [{"role": "user", "content": "c"}]}
    for op in ("v1/messages/count_tokens", "rollouts/v1/messages/count_tokens"):
        reply = await ServerRunner(Echo(return_token_ids=tokens)).dispatch(Call(op, encode(body)))
        assert reply.json() == {"input_tokens": len("b$c$") + 1}


async def test_a_judge_carries_none() -> None:
    item = (await Echo(return_token_ids=False).responses({"input": "a"}))["output"][-1]
    assert "generation_token_ids" not in item


async def test_an_update_pauses_loads_and_resumes() -> None:
    engine = Echo(weight_updates=True)
    await engine.update_weights(b"weights", "7", "abort")
    assert engine.done == ["abort", b"weights", "resume"]
    item = (await engine.responses({"input": "a"}))["output"][-1]
    assert item["weight_version"] == "7"


async def test_wrong_weights_change_nothing() -> None:
    engine = Echo(weight_updates=True)
    engine.fails = BadRequest("not these")
    with pytest.raises(BadRequest, match="not these"):
        await engine.update_weights(b"", "7")
    await engine.check_health()
    assert engine.weight_version == "0"
    assert engine.done[-1] == "resume"


async def test_an_engine_that_breaks_while_loading_is_unhealthy() -> None:
    engine = Echo(weight_updates=True)
    engine.fails = RuntimeError("half loaded")
    for call in (engine.update_weights(b"", "7"), engine.check_health(), engine.responses({"input": "a"})):
        with pytest.raises(Unavailable, match="half loaded"):
            await call


async def test_updates_are_off_unless_asked_for() -> None:
    engine = Echo()
    assert "weights/update" not in engine.operations()
    with pytest.raises(BadRequest, match="weight_updates"):
        await engine.update_weights(b"", "7")


async def test_operations_of_weights() -> None:
    engine = Echo(weight_updates=True)
    host = ServerRunner(engine)
    calls = [
        ("weights/pause", {"mode": "abort"}),
        ("weights/update", {"path": "/w", "version": "2"}),
        ("weights/resume", {}),
    ]
    for op, body in calls:
        assert (await host.dispatch(Call(op, encode(body)))).status == 200
    assert engine.done == ["abort", "keep", Path("/w"), "resume", "resume"]
    assert (await host.dispatch(Call("weights/update", encode({"path": "/w"})))).status == 422


async def test_an_aborted_generation_is_retryable_and_an_overflow_an_answer() -> None:
    engine = Echo()
    with pytest.raises(Unavailable, match="abort"):
        await engine.chat_completions({"messages": [{"role": "user", "content": "a"}], "finish": "abort"})
    answer = await engine.chat_completions({"messages": [{"role": "user", "content": "a"}], "overflow": True})
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_streams_say_what_the_answer_says() -> None:
    engine = Echo(weight_version="3")
    body = {"input": [{"role": "user", "content": "a"}]}
    events = [event async for event in engine.stream_responses(body)]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert deltas == ["se", "ven"]
    item = events[-1]["response"]["output"][-1]
    plain = (await engine.responses(body))["output"][-1]
    assert {**item, "id": None} == {**plain, "id": None}
    chunks = [chunk async for chunk in engine.stream_chat({"messages": body["input"]})]
    assert [chunk["choices"][0]["delta"]["content"] for chunk in chunks] == ["se", "ven"]
    assert [chunk["weight_version"] for chunk in chunks] == ["3", "3"]


async def test_a_stream_over_the_context_is_an_empty_one() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "overflow": True}
    *_, last, usage = [chunk async for chunk in Echo().stream_chat(body)]
    assert last["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []


async def test_the_version_of_the_weights_is_a_metric() -> None:
    POLICY_VERSION.clear()
    runner = ServerRunner(Echo())
    shown = []
    for version in ("step-17", "final"):
        runner.server.weight_version = version  # type: ignore[attr-defined]
        runner.observe()
        shown.append([(point.labels, point.value) for point in POLICY_VERSION.points()])
    assert shown == [[({"model": "echo"}, 17)], []]

"""Every kind of model can be paused, and says which policy answered (engines in the graph: tests/engines)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from support.letters import LettersModel, LettersSglang, answers
from support.waiting import until

from gym_serve import PolicyAnswer, PolicyRequest
from gym_serve.client.policy_service import PolicyService
from gym_serve.deployments.chat_model import ChatModel
from gym_serve.deployments.genrm_model import GenrmModel
from gym_serve.deployments.openai_model import OpenAIModel
from gym_serve.deployments.scripted_model import ScriptedModel
from gym_serve.servers.model import PAUSE, RESUME, ModelServer
from gym_serve.servers.runner import ServerRunner
from gym_serve.servers.transport import Call, encode

MESSAGE = {"role": "assistant", "content": "hi"}
TEXT = {"type": "output_text", "text": "hi", "annotations": []}


class Endpoint:
    """An endpoint of every kind, which answers once it may."""

    def __init__(self) -> None:
        self.asked = 0
        self.go = asyncio.Event()
        self.url = ""

    async def wait(self) -> None:
        self.asked += 1
        await self.go.wait()

    async def chat(self, request: web.Request) -> web.Response:
        asked = await request.json()
        await self.wait()
        logprobs = {"content": [{"token": "token_id:7", "logprob": -0.5}]}
        choice = {"index": 0, "message": MESSAGE, "finish_reason": "stop", "logprobs": logprobs}
        head = {"id": "c", "object": "chat.completion", "created": 1, "model": asked["model"]}
        return web.json_response({**head, "choices": [choice], "prompt_token_ids": [1]})

    async def responses(self, request: web.Request) -> web.Response:
        await self.wait()
        output = [
            {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [TEXT]}
        ]
        head = {"id": "r", "object": "response", "created_at": 1, "model": "m", "status": "completed"}
        return web.json_response({**head, "output": output})

    async def generate(self, request: web.Request) -> web.Response:
        prompt = (await request.json())["input_ids"]
        await self.wait()
        meta = {"finish_reason": {"type": "stop"}, "prompt_tokens": len(prompt), "weight_version": "default"}
        return web.json_response({"meta_info": {**meta, "output_token_logprobs": [[-0.5, 50, None]]}})

    async def abort(self, request: web.Request) -> web.Response:
        return web.Response()

    async def answers(self, requests: list[PolicyRequest]) -> list[PolicyAnswer]:
        await self.wait()
        return [PolicyAnswer(each.token_ids, each.logprobs) for each in answers(requests)]


KINDS: dict[str, Callable[[str], ModelServer]] = {
    "chat_model": lambda url: ChatModel(base_url=f"{url}/v1", model="m", return_token_ids=True),
    "genrm_model": lambda url: GenrmModel(base_url=f"{url}/v1", model="m"),
    "openai_model": lambda url: OpenAIModel(base_url=f"{url}/v1", model="m", api_key="sk"),
    "sglang_model": lambda url: LettersSglang(base_url=url, tokenizer="letters"),
    "callback_model": lambda url: LettersModel(tokenizer="letters"),
    "scripted_model": lambda url: ScriptedModel(latency=0.05),
}


@asynccontextmanager
async def running(kind: str) -> AsyncIterator[tuple[Endpoint, ServerRunner]]:
    endpoint = Endpoint()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", endpoint.chat)
    app.router.add_post("/v1/responses", endpoint.responses)
    app.router.add_post("/generate", endpoint.generate)
    app.router.add_post("/abort_request", endpoint.abort)
    served = web.AppRunner(app, shutdown_timeout=0.1)
    await served.setup()
    await web.TCPSite(served, "127.0.0.1", 0).start()
    runner = ServerRunner(KINDS[kind](f"http://127.0.0.1:{served.addresses[0][1]}"))
    await runner.start()

    async def replicas() -> dict[str, Any]:
        return {"local": runner.dispatch}

    service = PolicyService("policy", endpoint.answers, replicas, 1, None)
    if kind == "callback_model":
        service.start()
    try:
        yield endpoint, runner
    finally:
        await service.stop()
        await runner.stop()
        await served.cleanup()


OPS: dict[str, dict[str, Any]] = {
    "v1/responses": {"input": "hello"},
    "v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
}


def call(runner: ServerRunner, op: str) -> asyncio.Task[Any]:
    async def ask() -> Any:
        return (await runner.dispatch(Call(op, encode(OPS[op])))).json()

    return asyncio.ensure_future(ask())


def version_of(answer: Any) -> str | None:
    found: str | None = (answer["output"][-1] if "output" in answer else answer).get("weight_version")
    return found


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
@pytest.mark.parametrize("kind", KINDS)
async def test_calls_wait_none_fails_and_each_says_its_version(kind: str, mode: str) -> None:
    async with running(kind) as (endpoint, runner):
        model: Any = runner.server
        await model.update_weights(None, "1")
        first = [call(runner, op) for op in OPS]
        await until(lambda: endpoint.asked >= len(first) or kind == "scripted_model")
        await asyncio.sleep(0.01)
        pause = asyncio.ensure_future(runner.dispatch(Call(PAUSE, encode({"mode": mode}))))
        if mode == "wait" and kind != "scripted_model":
            await asyncio.sleep(0.02)
            assert not pause.done()
        if mode != "abort":
            endpoint.go.set()
        (await pause).json()
        late = [call(runner, op) for op in OPS]
        await asyncio.sleep(0.02)
        assert not any(each.done() for each in late)
        asked = endpoint.asked
        await model.update_weights(None, "2")
        endpoint.go.set()
        await asyncio.sleep(0.02)
        assert endpoint.asked == asked
        (await runner.dispatch(Call(RESUME))).json()
        before = await asyncio.gather(*first)
        after = await asyncio.gather(*late)
    assert [version_of(answer) for answer in before] == ["2" if mode == "abort" else "1"] * len(OPS)
    assert [version_of(answer) for answer in after] == ["2"] * len(OPS)


@pytest.mark.parametrize("kind", KINDS)
async def test_streams_say_their_version(kind: str) -> None:
    async with running(kind) as (endpoint, runner):
        model: Any = runner.server
        await model.update_weights(None, "5")
        endpoint.go.set()
        events = [event async for event in model.stream_responses(dict(OPS["v1/responses"]))]
        chunks = [chunk async for chunk in model.stream_chat(dict(OPS["v1/chat/completions"]))]
    assert version_of(events[-1]["response"]) == "5"
    assert {chunk.get("weight_version") for chunk in chunks} == {"5"}

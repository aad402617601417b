"""`chat_model` with a vLLM server by URL: exact tokens there as well."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest_asyncio
import uvicorn
from support.engines import CALL, MARKS, Drift, run_episode

from gym_serve.deployments.chat_model import ChatModel
from gym_serve.deployments.vllm_engine import VLLMEngine

pytestmark = MARKS


class ByUrl(ChatModel):
    """With the engine's own rendering, to compare with."""

    engine: VLLMEngine

    async def render(self, chat: Any, messages: Any) -> list[int]:
        return await self.engine.render(chat, messages)


@pytest_asyncio.fixture(loop_scope="session")
async def by_url(vllm: VLLMEngine) -> AsyncIterator[ByUrl]:
    """A chat_model whose endpoint is the engine's own application, over HTTP."""
    server = uvicorn.Server(uvicorn.Config(vllm._engine.app, port=0, log_level="warning", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110  (uvicorn has no event for it)
        await asyncio.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    model = ByUrl(
        base_url=f"http://127.0.0.1:{port}/v1", model="policy", return_token_ids=True, continue_tokens=True
    )
    model.engine = vllm
    await model.start()
    yield model
    await model.stop()
    server.should_exit = True
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(serving, 10)


async def test_every_prompt_begins_with_the_tokens_seen_and_made(by_url: ByUrl) -> None:
    drift = Drift()
    force = {"structured_outputs": {"regex": CALL}}
    episodes = [run_episode(by_url, random.Random(seed), lambda rng: force, drift) for seed in range(20)]
    await asyncio.gather(*episodes)
    print(f"by URL: 0 tokens of drift; re-templating: {drift}")
    assert drift.turns > 30
    assert drift.drifted > drift.turns / 2

"""AReaL's agent without AReaL: the endpoint that it uses, and what it returns. `make interop` has AReaL."""

import asyncio
import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from support.bells import bell_graph, sample
from support.endpoint import endpoint
from support.eyes import PROMPT, Eyes, seen_graph
from support.letters import Letters

from gym_serve import GraphError, InvalidRequest
from gym_serve.training.areal import GymAgent, RolloutFailed


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with endpoint(Letters(), sample) as url:
        yield url


async def test_the_reward_of_an_episode_at_the_endpoint_of_the_session(url: str) -> None:
    agent = GymAgent(bell_graph())
    given = {"base_url": f"{url}/", "api_key": "a-key", "http_client": None}
    assert await agent.run({"messages": [{"role": "user", "content": "ring"}]}, **given) == 1.0
    assert await agent.run({"row": json.dumps({"prompt": "refuse"})}, **given) == 0.0
    with pytest.raises(RolloutFailed, match="the bell is broken"):
        await agent.run({"prompt": "break"}, **given)
    await asyncio.to_thread(agent.close)


async def test_a_process_of_areal_reads_the_endpoint_from_its_environment(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = pickle.loads(pickle.dumps(GymAgent(bell_graph())))
    with pytest.raises(InvalidRequest, match="base_url"):
        await agent.run({"prompt": "ring"})
    monkeypatch.setenv("OPENAI_BASE_URL", url)
    monkeypatch.setenv("OPENAI_API_KEY", "a-key")
    assert await agent.run({"prompt": "ring"}) == 1.0
    await asyncio.to_thread(agent.close)


SOUND = {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}


@pytest.mark.parametrize("part", [PROMPT, SOUND], ids=["picture", "sound"])
async def test_what_areal_would_train_on_without_seeing_it_is_refused(part: dict[str, Any], url: str) -> None:
    agent = GymAgent(bell_graph())
    given = {"messages": [{"role": "user", "content": [part, {"type": "input_text", "text": "ring"}]}]}
    with pytest.raises(InvalidRequest, match=f"takes text only, got {part['type']}"):
        await agent.run(given, base_url=url, api_key="a-key")
    await asyncio.to_thread(agent.close)


async def test_a_picture_of_a_tool_is_refused_too() -> None:
    agent = GymAgent(seen_graph())
    with (
        endpoint(Letters(), sample, processor=Eyes()) as url,
        pytest.raises(InvalidRequest, match="got input_image"),
    ):
        await agent.run({"prompt": "ring"}, base_url=url, api_key="a-key")
    await asyncio.to_thread(agent.close)


async def test_a_graph_whose_agents_name_no_model_is_refused() -> None:
    graph = bell_graph()
    graph["agents"]["ringer"] = {"type": "remote_agent", "url": "http://127.0.0.1:9"}
    with pytest.raises(GraphError, match="none names a model"):
        await GymAgent(graph).run({"prompt": "ring"}, base_url="http://127.0.0.1:9/v1")

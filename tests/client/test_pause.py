"""`Policy.pause`, `Policy.resume` and `Policy.version`: a policy that changes while episodes run."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from aiohttp import web
from support.upstream import ChatEndpoint
from support.waiting import until

from gym_serve import AsyncGym, BadRequest, Gym, NotFound
from gym_serve.cluster.weights import check_reach
from gym_serve.training import samples

ROW = {"prompt": "Which?", "options": [{"A": "one"}, {"B": "two"}], "expected_answer": "A"}


class Slow(ChatEndpoint):
    """Answers when it may, with tokens."""

    def __init__(self) -> None:
        self.may = asyncio.Event()
        self.spans: list[dict[str, Any]] | None = None
        super().__init__("\\boxed{A}")

    def let(self) -> None:
        self._loop.call_soon_threadsafe(self.may.set)

    async def _complete(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        await self.may.wait()
        entries = [{"token": f"token_id:{token}", "logprob": -0.5} for token in (5, 6, 7)]
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": self.text},
            "finish_reason": "stop",
            "logprobs": {"content": entries},
            **({"weight_versions": self.spans} if self.spans else {}),
        }
        head = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
        return web.json_response({**head, "prompt_token_ids": [1, 2], "choices": [choice]})


def graph(endpoint: ChatEndpoint, **settings: Any) -> dict[str, Any]:
    policy = {
        "type": "chat_model",
        "base_url": endpoint.url,
        "model": "m",
        "return_token_ids": True,
        **settings,
    }
    return {
        "models": {"policy": policy, "judge": {"type": "scripted_model"}},
        "resources": {"mcqa": {"type": "mcqa"}},
        "agents": {"agent": {"type": "simple_agent", "model": "policy", "resources": "mcqa"}},
    }


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_an_endpoint_that_changes_costs_no_rollout(mode: Literal["keep", "wait", "abort"]) -> None:
    with Slow() as endpoint, Gym.from_graph(graph(endpoint), ray=False) as blocking:
        gym = AsyncGym.of(blocking)
        running = asyncio.ensure_future(gym.run([ROW], repeats=2))
        await until(lambda: len(endpoint.requests) == 2)
        pause = asyncio.ensure_future(gym.policy.pause(mode))
        if mode == "wait":
            await asyncio.sleep(0.05)
            assert not pause.done()
            endpoint.let()
        await pause
        late = asyncio.ensure_future(gym.run([ROW]))
        endpoint.let()
        await asyncio.sleep(0.05)
        assert len(endpoint.requests) == 2  # the late one waits
        await gym.policy.update_weights("policy", "7")
        await gym.policy.resume()
        rollouts = [*await running, *await late]
    assert [rollout.failure for rollout in rollouts] == [None] * 3
    assert len(endpoint.requests) == (5 if mode == "abort" else 3)
    versions = [rollout["response"]["output"][-1].get("weight_version") for rollout in rollouts]
    assert versions == (["7"] * 3 if mode == "abort" else [None, None, "7"])


async def test_judges_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with Slow() as endpoint, Gym.from_graph(graph(endpoint), ray=False) as blocking:
        gym = AsyncGym.of(blocking)
        await gym.policy.pause()
        body = {"input": "hi"}
        assert await gym.call("judge", "v1/responses", body)
        asked = asyncio.ensure_future(gym.call("policy", "v1/responses", body))
        await gym.policy.pause(model="judge")
        other = asyncio.ensure_future(gym.call("judge", "v1/responses", body))
        await asyncio.sleep(0.05)
        assert not other.done()
        endpoint.let()
        await gym.policy.resume(model="judge")
        await other
        assert not asked.done()
        await gym.policy.resume()
        await asked
        with pytest.raises(NotFound, match="no model 'nobody'"):
            await gym.policy.pause(model="nobody")


def test_on_a_cluster_a_model_of_which_some_replicas_cannot_be_told_is_refused() -> None:
    public: dict[str, Any] = {
        "models": {"policy": {"type": "chat_model"}, "judge": {"type": "http"}},
        "resources": {"mcqa": {"type": "mcqa"}},
        "agents": {"agent": {"type": "simple_agent", "inline": ["mcqa"]}},
    }
    check_reach(public, "policy")
    with pytest.raises(BadRequest, match="judge runs elsewhere"):
        check_reach(public, "judge")
    public["agents"]["agent"]["inline"].append("policy")
    with pytest.raises(BadRequest, match="`inline` of agent"):
        check_reach(public, "policy")


async def test_the_version_is_what_the_trainer_said_last() -> None:
    with Slow() as endpoint, Gym.from_graph(graph(endpoint), ray=False) as blocking:
        gym = AsyncGym.of(blocking)
        assert await gym.policy.version() is None
        await gym.policy.update_weights("policy", "3")
        assert await gym.policy.version() == "3"
        with pytest.raises(BadRequest, match="takes no weights"):
            await gym.policy.update_weights("policy", "4", tensors=b"abc")
        assert await gym.policy.version() == "3"


async def test_the_versions_of_single_tokens_are_the_endpoints() -> None:
    with (
        Slow() as endpoint,
        Gym.from_graph(graph(endpoint, return_weight_versions=True), ray=False) as blocking,
    ):
        gym = AsyncGym.of(blocking)
        endpoint.spans = [{"version": "8", "start": 0, "end": 1}, {"version": 9, "start": 1, "end": 3}]
        endpoint.let()
        await gym.policy.update_weights("policy", "1")
        (rollout,) = await gym.run([ROW])
        endpoint.spans = [{"version": "8", "start": 0, "end": 2}]  # they do not cover the answer
        (other,) = await gym.run([ROW])
    assert endpoint.requests[0]["return_weight_versions"] is True
    assert rollout["response"]["output"][-1]["weight_version"] == "8"
    assert samples(rollout)[0].versions == ["8", "9", "9"]
    assert samples(other)[0].versions == ["1", "1", "1"]

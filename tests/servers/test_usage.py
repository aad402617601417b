"""Whose tokens a rollout counts: the policy's, and those of models behind tools and the verifier."""

import json
from typing import Any

import pytest

from gym_serve import (
    CompareRequest,
    Comparison,
    EnvironmentClient,
    ModelClient,
    ModelServer,
    ResourcesServer,
    ServerRunner,
    Verdict,
    VerifyRequest,
    tool,
)
from gym_serve.client.rollout_client import RolloutClient
from gym_serve.deployments.refinement_agent import RefinementAgent
from gym_serve.deployments.simple_agent import SimpleAgent
from gym_serve.deployments.user_simulator_agent import UserSimulatorAgent
from gym_serve.rollouts import Backoff
from gym_serve.servers.transport import Call, Reply
from gym_serve.servers.usage import UsageMeter, read_prices
from gym_serve.transports import InlineTransport
from gym_serve.types.errors import InvalidRequest, Unavailable


class Policy(ModelServer):
    """Calls the tool once, then answers; says what it used."""

    async def responses(self, body: dict[str, Any]) -> dict[str, Any]:
        turn = len(body["input"])
        item: dict[str, Any] = {"type": "message", "role": "assistant", "content": "Done"}
        if turn == 1:
            item = {"type": "function_call", "call_id": "c", "name": "ask", "arguments": "{}"}
        details = {"cached_tokens": 10 * (turn - 1)}
        usage = {"input_tokens": 10 * turn, "input_tokens_details": details, "output_tokens": 1}
        return {"id": "r", "output": [item], "usage": usage}


class Judge(ModelServer):
    async def chat_completions(self, body: dict[str, Any]) -> dict[str, Any]:
        usage = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
        message = {"role": "assistant", "content": body["messages"][0]["content"]}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return {"id": "c", "created": 0, "model": "j", "choices": [choice], "usage": usage}


class Judged(ResourcesServer):
    class Config(ResourcesServer.Config):
        judge: ModelClient
        broken: bool = False

    config: Config

    @tool
    async def ask(self) -> str:
        """Ask a model."""
        answer = await self.config.judge.chat_completions({"messages": [{"role": "user", "content": "Hi"}]})
        return str(answer["choices"][0]["message"]["content"])

    async def verify(self, request: VerifyRequest) -> Verdict:
        for _ in range(2):
            await self.config.judge.responses({"input": "good?"})
        if self.config.broken:
            raise Unavailable("down")
        return Verdict(reward=1.0)

    async def compare(self, request: CompareRequest) -> Comparison:
        await self.config.judge.responses({"input": "better?"})
        if self.config.broken:
            raise Unavailable("down")
        return Comparison(rewards=[0.0] * len(request.response_objs))


def judged(calls: int) -> dict[str, int]:
    return {
        "calls": calls,
        "unreported": 0,
        "input_tokens": 7 * calls,
        "cached_tokens": 0,
        "output_tokens": 2 * calls,
    }


@pytest.mark.parametrize("broken", [False, True])
async def test_the_models_of_an_episode_are_counted_by_stage(broken: bool) -> None:
    judge, policy = ServerRunner(Judge(name="judge")), ServerRunner(Policy(name="policy"))
    env = ServerRunner(Judged(name="env", judge=ModelClient(InlineTransport(judge)), broken=broken))
    agent = ServerRunner(
        SimpleAgent(
            model=ModelClient(InlineTransport(policy)), resources=EnvironmentClient(InlineTransport(env))
        )
    )
    row = {"responses_create_params": {"input": "Hi"}}
    rollout = (await agent.dispatch(Call("run", json.dumps(row).encode()))).json()
    counts = {"calls": 2, "unreported": 0, "input_tokens": 40, "cached_tokens": 20, "output_tokens": 2}
    assert rollout["model_usage"].pop("model") == {"policy": counts}
    assert ("failure" in rollout) == broken
    # Where the verifier fails, the end of the session tells.
    assert rollout["model_usage"] == {
        stage: {"judge": judged(n)} for stage, n in (("tool", 1), ("verify", 2))
    }


async def test_two_verdicts_of_one_session_count_once() -> None:
    judge = ServerRunner(Judge(name="judge"))
    env = ServerRunner(Judged(name="env", judge=ModelClient(InlineTransport(judge))))
    seeded = await env.dispatch(Call("seed_session", b"{}"))
    body = json.dumps({"responses_create_params": {"input": "Hi"}, "response": {"output": []}}).encode()
    for _ in range(2):
        verdict = (await env.dispatch(Call("verify", body, seeded.session))).json()
        assert verdict["model_usage"]["verify"]["judge"]["calls"] == 2


@pytest.mark.parametrize("broken", [False, True])
async def test_a_comparison_tells_what_it_used_also_where_it_fails(broken: bool) -> None:
    env = ServerRunner(
        Judged(
            name="env", judge=ModelClient(InlineTransport(ServerRunner(Judge(name="judge")))), broken=broken
        )
    )
    await env.start()
    graph = {"agents": {"agent": {"resources": "env"}}, "resources": {"env": {}}}
    client = RolloutClient(graph, "agent", lambda name: InlineTransport(env), None, "graph")
    row = {"agent_ref": {"name": "agent"}}
    body = {"conversation_history": [], "response_objs": [{"output": []}]}
    meter = UsageMeter()
    if broken:
        with pytest.raises(Unavailable, match="down"):
            await client.compare(row, body, meter)
    else:
        answer = await client.compare(row, body, meter)
        assert answer is not None
        assert answer["rewards"] == [0.0]
    await env.stop()
    assert meter.to_json() == {"compare": {"judge": judged(1)}}


@pytest.mark.parametrize("away", [3, 99])
async def test_whether_groups_are_compared_is_asked_again_while_the_graph_is_away(
    monkeypatch: pytest.MonkeyPatch, away: int
) -> None:
    class Away(InlineTransport):
        calls = 0

        async def call(self, call: Call) -> Reply:
            Away.calls += 1
            if Away.calls <= away:
                raise Unavailable("the gateway restarts")
            return await super().call(call)

    monkeypatch.setattr("gym_serve.client.rollout_client._BACKOFF", Backoff(0.0))
    env = ServerRunner(Judged(name="env", judge=ModelClient(InlineTransport(ServerRunner(Judge(name="j"))))))
    graph = {"agents": {"agent": {"resources": "env"}}, "resources": {"env": {}}}
    await env.start()
    client = RolloutClient(graph, "agent", lambda name: Away(env), None, "graph")
    if away == 99:
        with pytest.raises(Unavailable, match="restarts"):
            await client.comparer()
    else:
        assert await client.comparer() == client.compare
    await env.stop()
    assert Away.calls == min(away + 1, 9)


async def test_the_models_beside_the_policy_are_counted_under_their_names() -> None:
    """A simulated user and a critic are models of the stage ``model``, as the policy is."""
    policy, env = (
        ServerRunner(Policy(name="policy")),
        ServerRunner(
            Judged(name="env", judge=ModelClient(InlineTransport(ServerRunner(Judge(name="judge")))))
        ),
    )
    other = ModelClient(InlineTransport(ServerRunner(Judge(name="other"))))
    common = {
        "model": ModelClient(InlineTransport(policy)),
        "resources": EnvironmentClient(InlineTransport(env)),
    }
    row = {"responses_create_params": {"input": "Hi"}}
    talk = UserSimulatorAgent(**common, user=other, max_turns=2)
    refine = RefinementAgent(**common, critic=other, target_reward=2.0, max_attempts=3)
    for agent, calls in ((talk, 1), (refine, 2)):
        rollout = await agent.run(row)
        assert "failure" not in rollout
        assert rollout["model_usage"]["model"]["other"] == judged(calls)
        assert rollout["model_usage"]["model"]["policy"]["calls"] > calls
    assert rollout["model_usage"]["verify"]["judge"] == judged(6)  # three attempts, each was verified


@pytest.mark.parametrize(
    "price", ["policy", "=1/2", "policy=1", "policy=1/2/3/4", "policy=1/-2", "policy=a/2"]
)
def test_a_price_that_is_none(price: str) -> None:
    with pytest.raises(InvalidRequest, match="a price must be MODEL=INPUT/OUTPUT"):
        read_prices([price])

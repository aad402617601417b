"""Without a snapshot: the episode starts again from seed, at most N times, and each attempt is journaled."""

from pathlib import Path
from typing import Any

from support.failover import Chain, MortalEdge
from support.rollouts import JSON, collection, read_jsonl, rows

from gym_serve import EnvironmentClient
from gym_serve.cluster.routing.failover import FailoverTransport
from gym_serve.deployments.simple_agent import SimpleAgent
from gym_serve.rollouts import collect


class Forgetful(Chain):
    restorable = False


class FakeModel:
    """Calls ``add`` once, then answers."""

    async def responses(self, params: dict[str, Any]) -> dict[str, Any]:
        item: JSON
        if params["input"][-1].get("type") == "function_call_output":
            item = {"type": "message", "role": "assistant", "content": []}
        else:
            item = {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"what": "a"}'}
        return {"id": "r", "object": "response", "output": [item], "usage": None}

    async def chat_completions(self, body: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError("the agent speaks Responses")


async def run(transport: MortalEdge, output: Path) -> None:
    agent = SimpleAgent(model=FakeModel(), resources=EnvironmentClient(FailoverTransport(transport)))
    await collect(rows(1), output, collection(agent.run, concurrency=1))


async def test_a_lost_session_is_tried_again_from_seed(tmp_path: Path) -> None:
    await run(MortalEdge(Forgetful), tmp_path / "calm.jsonl")
    # An episode's calls are tool, verify and close; one that fails at its tool has no verify.
    transport = MortalEdge(Forgetful, {0: "after", 3: "before"})
    await run(transport, tmp_path / "out.jsonl")
    failures = read_jsonl(tmp_path / "out_failures.jsonl")
    assert [f["failure"]["kind"] for f in failures] == ["session_lost"] * 2
    assert [f["failure"]["stage"] for f in failures] == ["tool", "verify"]
    (calm,), (rollout,) = read_jsonl(tmp_path / "calm.jsonl"), read_jsonl(tmp_path / "out.jsonl")
    assert (rollout["reward"], rollout["digest"]) == (calm["reward"], calm["digest"])


async def test_it_is_not_tried_for_ever(tmp_path: Path) -> None:
    transport = MortalEdge(Forgetful, dict.fromkeys(range(0, 20, 2), "after"))
    await run(transport, tmp_path / "out.jsonl")
    assert len(read_jsonl(tmp_path / "out_failures.jsonl")) == 3
    assert read_jsonl(tmp_path / "out.jsonl") == []

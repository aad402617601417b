"""Harnesses without Ray: the graph's own address, for the programs that an agent starts."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from support.letters import END, Letters
from support.scenarios import say

from gym_serve import (
    GraphError,
    Gym,
    PolicyAnswer,
    PolicyRequest,
    ResourcesServer,
    Verdict,
    VerifyRequest,
    tool,
)
from gym_serve.cluster.preflight import problems_here
from gym_serve.graph import GraphSpec, resolve
from gym_serve.training import samples
from gym_serve.training.episodes import Episodes

# Calls a tool of its environment and asks a sub-agent, with nothing but the standard library.
PROGRAM = """
import json, os, sys, urllib.request

def post(url, body, **headers):
    headers |= {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))

def ask(*messages):
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    return post(url, {"model": "policy", "messages": messages})["choices"][0]["message"]

json.load(sys.stdin)
session = {"X-Session-Id": os.environ["GYM_SERVE_SESSION_ID"]}
print(os.environ["OPENAI_BASE_URL"], post(os.environ["GYM_SERVE_RESOURCES_URL"] + "/ring", {}, **session))
ask({"role": "user", "content": "sub-agent"})
first = ask({"role": "user", "content": "main"})
ask({"role": "user", "content": "main"}, first, {"role": "user", "content": "sure"})
"""


class Bell(ResourcesServer):
    """Is content if it was rung."""

    class Session:
        """The state of an episode."""

        rung: int = 0

    @tool
    async def ring(self, session: Session) -> str:
        """Ring."""
        session.rung += 1
        return "ding"

    async def verify(self, request: VerifyRequest, session: Session) -> Verdict:
        return Verdict(reward=float(session.rung))


def graph(policy: Mapping[str, Any], **harness: Any) -> dict[str, Any]:
    agent = {"type": "harness_agent", "model": "policy", "resources": "bell"}
    return {
        "models": {"policy": policy},
        "resources": {"bell": {"type": Bell}},
        "agents": {"program": {**agent, "command": [sys.executable, "-c", PROGRAM], **harness}},
    }


SCRIPTED = {"type": "scripted_model", "script": [[say("yes")]] * 3}
ROW = {"prompt": "Ring."}


def test_a_program_reaches_its_model_and_its_tools() -> None:
    with Gym.from_graph(graph(SCRIPTED), ray=False) as gym:
        first, second = gym.run([ROW, ROW])
        for rollout in (first, second):
            assert rollout.failure is None
            assert rollout.reward == 1.0
            roles = [item["role"] for item in rollout["response"]["output"]]
            assert roles == ["assistant", "user", "assistant"]
            assert [item["content"] for item in rollout["captured_input"]] == ["main"]
            assert [branch["input"][0]["content"] for branch in rollout["branches"]] == ["sub-agent"]
        url = urlsplit(first["harness"]["output"].split()[0])
        assert url.hostname == "127.0.0.1"
        assert "ding" in first["harness"]["output"]
        refused = httpx.get(f"http://{url.netloc}/graph", headers={"authorization": "Bearer none"})
        assert refused.status_code == 401
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((url.hostname, url.port or 0), timeout=5)


def test_graphs_of_one_process_have_an_address_each_whatever_the_file_says() -> None:
    elsewhere = {"gateway_url": "http://127.0.0.1:9/nowhere"}
    with (
        Gym.from_graph(graph(SCRIPTED, **elsewhere), ray=False) as one,
        Gym.from_graph(graph(SCRIPTED), ray=False) as other,
    ):
        addresses = {gym.run([ROW])[0]["harness"]["output"].split("/")[2] for gym in (one, other)}
    assert len(addresses) == 2


# What a harness may do to its policy: it reads the version, and changes nothing.
STEERING = """
import json, os, sys, urllib.error, urllib.request

def ask(path, body=None):
    root = os.environ["GYM_SERVE_RESOURCES_URL"].removesuffix("/bell")
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    request = urllib.request.Request(f"{root}/{path}", body and body.encode(), headers)
    try:
        return 200, json.load(urllib.request.urlopen(request))
    except urllib.error.HTTPError as refused:
        return refused.code, json.load(refused)["error"]["message"]

json.load(sys.stdin)
reads = [ask("policy/policy/version"), ask("health")]
told = [("version", '{"version": "8"}'), ("pause", "{}"), ("resume", "{}"),
        ("endpoints", '{"base_urls": ["http://127.0.0.1:9/v1"]}')]
print(json.dumps([reads, [ask(f"policy/policy/{op}", body) for op, body in told]]))
"""


def test_a_program_reads_the_version_of_the_policy_and_changes_nothing() -> None:
    with Gym.from_graph(graph(SCRIPTED, command=[sys.executable, "-c", STEERING]), ray=False) as gym:
        gym.policy.update_weights("policy", "7")
        (rollout,) = gym.run([ROW])
        (version, health), refusals = json.loads(rollout["harness"]["output"])
        assert gym.policy.version() == "7"
    assert version == [200, {"weight_version": "7", "paused": False, "updates": 1}]
    ready = {"state": "ready"}
    assert health == [200, {"status": "ok", "servers": {"policy": ready, "bell": ready, "program": ready}}]
    assert [status for status, _ in refusals] == [404] * 4
    assert all("call `pause`, `resume` or `update_weights` of its Gym" in message for _, message in refusals)


async def test_a_trainers_engine_generates_for_a_harness() -> None:
    async def generate(request: PolicyRequest, context: object) -> PolicyAnswer:
        ids = [*Letters.ids("yes"), END]
        return PolicyAnswer(ids, [-0.5] * len(ids), "stop", versions="7")

    policy = {"type": "chat_model", "base_url": "http://127.0.0.1:9/v1", "model": "m"}
    episodes = Episodes(graph(policy), Letters(), generate)
    (rollout,) = await episodes.run_all([ROW])
    main, sub_agent = samples(rollout)
    assert rollout.reward == 1.0
    assert (sum(main.loss_mask), sum(sub_agent.loss_mask)) == (8, 4)
    assert (main.branch, sub_agent.branch) == (0, 1)
    episodes.close()


def test_on_ray_the_address_is_a_setting() -> None:
    (problem,) = problems_here(resolve(GraphSpec(**graph(SCRIPTED))))
    assert problem.startswith("agents.program: gateway_url is missing: set the graph's address")
    assert not list(problems_here(resolve(GraphSpec(**graph(SCRIPTED, gateway_url="http://127.0.0.1:8000")))))
    with pytest.raises(GraphError, match="gateway_url"):
        resolve(GraphSpec(**graph(SCRIPTED, gateway_url="no address")))

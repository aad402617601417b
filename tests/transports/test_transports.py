"""One behaviour over three kinds of transport, and without Ray: the same rollouts, byte for byte."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from support.scenarios import SCRIPTS, ScenarioEnvironment, ScenarioModel

from gym_serve import Gym

TRANSPORTS = ("replica", "inline", "http")
LOCAL = "local"
"""The same graph without Ray."""
# Long enough for 10 MB through the HTTP proxy of a busy machine; what hangs costs it once per transport.
TIMEOUTS = {f"{stage}_timeout": 10.0 for stage in ("seed", "model", "tool", "verify", "close")}
FAILURES = {
    "model down": ("unavailable", "model", True),
    "model busy": ("wait_too_long", "model", False),
    "model hangs": ("model_timeout", "model", True),
    "model talks nonsense": ("unavailable", "model", True),
    "tool not there": ("unavailable", "tool", True),
    "seed fails": ("unavailable", "seed", True),
    "seed hangs": ("seed_timeout", "seed", True),
    "verifier fails": ("verifier_failed", "verify", True),
    "verifier breaks": ("verify_failed", "verify", False),
    "verifier hangs": ("verify_timeout", "verify", True),
    "verifier says nan": ("verify_failed", "verify", False),
}
REWARDS = {
    "one call": 2,
    "message and call": 2,
    "calls in order": 6,
    "tool seed": 5,
    "lone surrogate": 2,
    "extra argument": 1,  # it is left out: the state of the session is not the model's to give
    "max steps": 4,
    "cut off": 1,
    "tool hangs": 0,  # the time is the policy's: what it did until then is verified
}


@pytest.fixture(scope="module")
def gym(cluster: str, deploy: Any) -> Gym:
    url = f"{cluster}/transports"
    common = {"type": "simple_agent", "max_steps": 4, **TIMEOUTS}
    graph = {
        "models": {
            "model": {"type": ScenarioModel},
            "model_http": {"type": "http", "url": f"{url}/model"},
        },
        "resources": {
            "env": {"type": ScenarioEnvironment},
            "env_http": {"type": "http", "url": f"{url}/env"},
        },
        "agents": {
            "replica": {**common, "model": "model", "resources": "env"},
            "inline": {**common, "model": "model", "resources": "env", "inline": ["model", "env"]},
            "http": {**common, "model": "model_http", "resources": "env_http"},
        },
    }
    return deploy(graph, name="transports")


@pytest.fixture(scope="module")
def local() -> Iterator[Gym]:
    agent = {"type": "simple_agent", "max_steps": 4, **TIMEOUTS, "model": "model", "resources": "env"}
    graph = {
        "models": {"model": {"type": ScenarioModel}},
        "resources": {"env": {"type": ScenarioEnvironment}},
        "agents": {LOCAL: agent},
    }
    with Gym.from_graph(graph, name="transports", ray=False) as gym:
        yield gym


@pytest.fixture(scope="module")
def rollouts(gym: Gym, local: Gym) -> dict[str, dict[str, dict[str, Any]]]:
    """By transport and scenario, all of them run at the same time: each transport waits as long for what
    hangs."""
    rows = [
        {
            "responses_create_params": {"input": "go", "user": scenario},
            "_ng_rollout_id": scenario,
            "kept": [1, None],
        }
        for scenario in SCRIPTS
    ]

    async def over(transport: str) -> dict[str, dict[str, Any]]:
        found = {}
        # "model busy" is pushed back for as long as the timeout, which is longer than that of any stage.
        used = local if transport == LOCAL else gym
        async for rollout in used.rollouts(rows, agent=transport, concurrency=16, attempts=1, timeout=15):
            del rollout["_ng_latency_s"], rollout["_ng_timeline"]
            assert rollout.pop("agent_ref")["name"] == transport
            found[rollout["_ng_rollout_id"]] = rollout
        return found

    async def over_all() -> dict[str, dict[str, dict[str, Any]]]:
        found = await asyncio.gather(*map(over, (*TRANSPORTS, LOCAL)))
        return dict(zip((*TRANSPORTS, LOCAL), found, strict=True))

    return asyncio.run(over_all())


@pytest.mark.parametrize("scenario", SCRIPTS)
def test_the_rollout_is_the_same_over_every_edge(rollouts: Any, scenario: str) -> None:
    found = [orjson.dumps(rollouts[transport][scenario]) for transport in (*TRANSPORTS, LOCAL)]
    handle, inline, http, local = (re.sub(rb"until [\d: +-]+,", b"until then,", each) for each in found)
    assert inline == local == handle
    assert http.replace(b'"model_http"', b'"model"') == handle


@pytest.mark.parametrize("scenario", SCRIPTS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_rollout_is_right(rollouts: Any, transport: str, scenario: str) -> None:
    rollout = rollouts[transport][scenario]
    assert rollout["kept"] == [1, None]
    if scenario in FAILURES:
        failure = rollout["failure"]
        assert (failure["kind"], failure["stage"], failure["retryable"]) == FAILURES[scenario], failure
        assert rollout["mask_sample"] is True
        assert rollout["instance_config"] == {"mask_sample": True}
    else:
        assert "failure" not in rollout, rollout.get("failure")
        assert rollout["reward"] == REWARDS.get(scenario, 0)
        assert rollout["items"] == len(rollout["response"]["output"])


def outputs(rollout: dict[str, Any]) -> list[str]:
    return [i["output"] for i in rollout["response"]["output"] if i["type"] == "function_call_output"]


@pytest.mark.parametrize(
    ("scenario", "said"),
    [
        ("no json", "Invalid tool call arguments"),
        ("python literal", "Invalid tool call arguments"),
        ("array", "expected a JSON object, got list"),
        ("huge argument", "Invalid tool call arguments"),
        ("deep argument", "Invalid tool call arguments"),
        ("wrong type", "amount"),
        ("unknown tool", "subtract"),
        ("no name", "no tool"),
        ("tool verify", "verify"),
        ("tool path", "verify"),
        ("tool close", "close_session"),
        ("tool describe op", "v1/models"),
        ("tool breaks", "sparks and smoke"),
    ],
)
def test_what_a_hostile_model_calls_becomes_an_error_output(rollouts: Any, scenario: str, said: str) -> None:
    (output,) = outputs(rollouts["replica"][scenario])
    assert said in str(orjson.loads(output)["error"])


@pytest.mark.parametrize("transport", [*TRANSPORTS, LOCAL])
def test_a_row_without_tools_gets_those_of_the_environment(rollouts: Any, transport: str) -> None:
    rollout = rollouts[transport]["tools offered"]
    assert rollout["response"]["output"][0]["content"][0]["text"].split() == list(ScenarioEnvironment.tools)
    assert "tools" not in rollout["responses_create_params"]


def test_calling_a_route_neither_resets_nor_closes_the_session(rollouts: Any) -> None:
    rollout = rollouts["replica"]["tool seed"]
    assert orjson.loads(outputs(rollout)[0]) == {"total": 5}
    assert "error" in orjson.loads(outputs(rollout)[1])
    assert rollout["reward"] == 5


def test_outputs_stand_behind_all_calls_of_their_turn_in_order(rollouts: Any) -> None:
    items = rollouts["replica"]["calls in order"]["response"]["output"]
    assert [i["type"] for i in items] == ["function_call"] * 3 + ["function_call_output"] * 3 + ["message"]
    assert [i["call_id"] for i in items[3:6]] == ["c3", "c1", "c2"]
    assert [orjson.loads(i["output"])["total"] for i in items[3:6]] == [3, 4, 6]


def test_a_cut_off_turn_runs_no_tool(rollouts: Any) -> None:
    rollout = rollouts["replica"]["cut off"]
    assert len(outputs(rollout)) == 1
    assert rollout["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_empty_turns_are_asked_again_twice(rollouts: Any) -> None:
    assert len(rollouts["replica"]["only reasoning"]["response"]["output"]) == 3
    assert rollouts["replica"]["nothing"]["response"]["output"] == []


def test_usage_is_the_sum_over_the_calls(rollouts: Any) -> None:
    assert rollouts["replica"]["one call"]["response"]["usage"]["input_tokens"] == 1 + 3


def test_no_session_is_left(gym: Gym, local: Gym, rollouts: Any) -> None:
    assert gym.call("env", "tools/live", {}) == 1  # its own
    assert local.call("env", "tools/live", {}) == 1

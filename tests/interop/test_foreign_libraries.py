"""The foreign environments themselves: NeMo Gym's servers, OpenEnv's environments, tasksets of verifiers.

Each runs in its own process of a virtual environment (`venvs`), without any network.
"""

import pytest
from venvs import FOREIGN, INTEROP, needs, printed

from gym_serve.interop.nemo_gym import import_config
from gym_serve.types.errors import GraphError

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]

REPLAYED = [
    "equivalence_llm_judge",
    "example_session_state_mgmt",
    "example_multi_step",
    "example_multi_turn_gymnasium",
    "mcqa",
    "example_mcp_weather",
    "workplace_assistant",
]
REFUSED = (  # what NeMo Gym itself would not start without more configs, and what cannot be had here
    "of NeMo Gym's servers, agents cannot be hosted",
    "of NeMo Gym's servers, models cannot be hosted",
    ": there is no server '",
    ": it calls a model by its address",
    ": the name of the server is left open",
    ": a required setting is missing",
    ": must be a model, got '",
    "resources_servers.ns_tools_",  # NeMo Gym 0.4.0 has no such servers
)


@needs(FOREIGN, "nemo_gym")
def test_replays_of_nemo_gyms_own_rollouts():
    found = printed(FOREIGN, "host_nemo_gym.py", *REPLAYED)
    for name in REPLAYED:
        assert found[name]["differences"] == [], name
        assert {"agent_metrics", "group_level_metrics", "key_metrics"} <= set(found[name]["metrics"])
    for name in REPLAYED[:-1]:
        assert len(found[name]["rewards"]) == 5
        assert all(then == now for then, now in found[name]["rewards"]), name
    assert found["example_session_state_mgmt"]["calls"] == 15
    assert found["workplace_assistant"]["calls"] == 8, "their tools are one route for any name"
    assert found["workplace_assistant"]["solved"] == [1.0] * 5


@needs(FOREIGN, "nemo_gym")
def test_every_config_that_comes_with_nemo_gym():
    (site,) = FOREIGN.glob("lib/python*/site-packages")
    kinds = ("resources_servers", "responses_api_agents", "responses_api_models")
    marks = [f"{kind}:" for kind in (*kinds, "config_paths")]
    files = [file for folder in (*kinds, "benchmarks") for file in sorted((site / folder).rglob("*.yaml"))]
    configs = [file for file in files if any(mark in file.read_text() for mark in marks)]
    hosted, refused = set(), {}
    for config in configs:
        try:
            graph = import_config([config]).config["applications"][0]["args"]
        except GraphError as error:
            refused[str(config.relative_to(site))] = error.problems
            continue
        servers = graph.get("resources", {}).values()
        hosted |= {server["server"] for server in servers if server["type"] == "nemo_gym"}
    assert (len(configs), len(refused)) == (322, 100)
    assert len(hosted) == 61
    unexpected = [
        problem
        for problems in refused.values()
        for problem in problems
        if not any(reason in problem for reason in REFUSED)
    ]
    assert unexpected == []


@needs(FOREIGN, "openenv")
def test_openenvs_environments_in_process_and_by_url(tmp_path):
    found = printed(FOREIGN, "host_openenv.py", tmp_path)
    assert found["echo"] == found["echo_by_url"]
    assert (found["echo"]["reward"], found["echo"]["num_steps"]) == (0.8, 2)
    assert '"echoed_message":"hello"' in found["echo"]["response"]["output"][1]["content"]
    assert found["till"] == found["till_by_url"]
    outputs = [
        i["output"] for i in found["till"]["response"]["output"] if i["type"] == "function_call_output"
    ]
    assert outputs == ["7", "10"]
    assert found["till"]["reward"] == 2.0


@needs(INTEROP, "verifiers")
def test_tasksets_of_verifiers():
    found = printed(INTEROP, "host_verifiers.py")
    assert [row["verifier_metadata"]["task"]["answer"] for row in found["rows"]] == ["6", "8", "10"]
    assert [item["role"] for item in found["rows"][0]["responses_create_params"]["input"]] == [
        "system",
        "user",
    ]
    right, wrong = found["right"]["rollout"], found["wrong"]["rollout"]
    assert (right["reward"], right["reward_components"]) == (1.0, {"right": 0.75, "short": 0.25})
    assert (wrong["reward"], wrong["characters"]) == (0.0, 25.0)
    shopping = found["shopping"]
    assert shopping["rollout"]["reward"] == 1.0, "rewards see the state that the tools left"
    assert shopping["rollout"]["turns"] == 4.0
    output = shopping["rollout"]["response"]["output"]
    outputs = [item["output"] for item in output if item["type"] == "function_call_output"]
    assert "not for sale" in outputs[0]
    assert "tool_failed" in outputs[1], "an argument of another type"
    assert outputs[2] == '"3 in the basket"'
    (tool,) = shopping["tools"]
    assert (tool["name"], tool["description"]) == ("shop_put", "Put something in the basket.")
    assert found["no_task"]["rollout"]["failure"]["retryable"] is False
    assert "the reward in_a_box needs a runtime" in found["refused"]["Boxed"]
    assert "has no rewards" in found["refused"]["Game"], "else each rollout would have a reward of 0"
    assert found["refused"].keys() == {"Boxed", "Game", "TwoPlayers"}

"""The names of NeMo Gym that NeMo RL imports. `make interop` runs NeMo RL's own code on them."""

from __future__ import annotations

import asyncio
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from support.bells import bell_graph, sample
from support.endpoint import endpoint
from support.export_cases import bundle, episode, failed, rollout, said
from support.eyes import PROMPT, SHOWN
from support.letters import Letters

from gym_serve.interop.nemo_gym import names
from gym_serve.interop.nemo_gym.names import (
    BaseServerConfig,
    GlobalConfigDictParserConfig,
    RolloutCollectionHelper,
    RolloutError,
    RunHelper,
    Settings,
    graph_of,
    result_of,
    results_of,
)
from gym_serve.rollouts import Group
from gym_serve.types.errors import GymError
from gym_serve.types.media import pictures_in
from gym_serve.types.rows import Rollout

PORT = 5123


def row(word: str, index: int) -> dict[str, Any]:
    return {
        "responses_create_params": {"input": [{"role": "user", "content": word}], "temperature": 1.0},
        "agent_ref": {"type": "responses_api_agents", "name": "ringer"},
        "_rowidx": index,
    }


def started(url: str, **settings: Any) -> RunHelper:
    config = {
        "gym_serve": {"graph": bell_graph(), "ray": False, "attempts": 1, **settings},
        "policy_base_url": [url],
        "policy_model_name": "m",
        "policy_api_key": "dummy_key",
        "default_host": "127.0.0.1",
        "head_server": {"host": "0.0.0.0", "port": PORT},
    }
    helper = RunHelper()
    helper.start(
        global_config_dict_parser_config=GlobalConfigDictParserConfig(initial_global_config_dict=config)
    )
    return helper


async def collected(words: list[str]) -> dict[int, dict[str, Any]]:
    rows = [row(word, index) for index, word in enumerate(words)]
    address = BaseServerConfig(host="127.0.0.1", port=PORT)
    found = {}
    for task in RolloutCollectionHelper().run_examples(examples=rows, head_server_config=address):
        given, result = await task
        assert given in rows
        found[given["_rowidx"]] = result
    return found


def turns_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The items that NeMo RL trains on, checked as it checks them."""
    turns = [item for item in result["response"]["output"] if item.get("generation_token_ids")]
    seen: list[int] = []
    for turn in turns:
        assert turn["prompt_token_ids"][: len(seen)] == seen
        seen = turn["prompt_token_ids"] + turn["generation_token_ids"]
    return turns


def test_rollouts_of_an_endpoint() -> None:
    with endpoint(Letters(), sample) as url:
        helper = started(url)
        try:
            helper.poll()
            found = asyncio.run(
                collected(["ring", "flaky uneven", "refuse", "flaky uneven", "flaky uneven", "break"])
            )
        finally:
            helper.shutdown()
            helper.shutdown()
    assert sorted(found) == list(range(6))
    assert len(turns_of(found[0])) == 2
    assert (found[0]["reward"], found[2]["reward"]) == (1.0, 0.0)
    flaky = [found[i] for i in (1, 3, 4)]
    masked = [result for result in flaky if result.get("mask_sample")]
    assert [result["reward"] for result in masked] == [0.5]
    assert sorted(result["reward"] for result in flaky) == [0.0, 0.5, 1.0]
    for result in (*masked, found[5]):
        assert result["instance_config"]["mask_sample"] is True
        assert turns_of(result)
    with pytest.raises(RuntimeError, match="no graph runs here"):
        helper.poll()


def test_a_failure_ends_the_stream_where_that_is_wanted() -> None:
    with endpoint(Letters(), sample) as url:
        helper = started(url, failures="raise")
        try:
            with pytest.raises(RolloutError, match="the bell is broken") as caught:
                asyncio.run(collected(["break"]))
        finally:
            helper.shutdown()
    assert caught.value.status == 503  # NeMo RL sends such rows again


def test_a_rollout_without_tokens_holds_its_place() -> None:
    broken = failed()
    del broken["response"]
    result = result_of(broken, 0.25)
    assert [turn["generation_token_ids"] for turn in turns_of(result)] == [[0]]
    assert (result["reward"], result["instance_config"]["mask_sample"]) == (0.25, True)
    scored = result_of(rollout([said("x")], reward=1.0))
    assert (scored["reward"], scored["mask_sample"]) == (1.0, True)
    assert "mask_sample" not in result_of(episode())


@pytest.mark.parametrize("mark", [{"mask_sample": True}, {"instance_config": {"mask_sample": True}}])
def test_a_masked_rollout_does_not_move_its_group(mark: dict[str, Any]) -> None:
    rewards = ({"reward": 0.5}, {"reward": 9.0, **mark}, {"reward": 1.0})
    rollouts = [Rollout({**episode(), "_ng_rollout_index": i, **own}) for i, own in enumerate(rewards)]
    results = results_of(Group(rollouts[0], rollouts, [Rollout(failed())], usable=True))
    told = [(result["reward"], result.get("mask_sample", False)) for result in results]
    assert told == [(0.5, False), (1.0, False), (0.75, True), (0.75, True)]


def test_a_history_that_was_tokenized_again_keeps_its_first_turns() -> None:
    broken = rollout([{**said("a"), **bundle([1], [2])}, {**said("b"), **bundle([1, 7], [8])}])
    result = result_of(broken)
    assert [turn["generation_token_ids"] for turn in turns_of(result)] == [[2]]
    assert result["response"]["output"][1]["content"] == said("b")["content"]
    assert broken["response"]["output"][1]["generation_token_ids"] == [8]


def pictures_by_turn(result: dict[str, Any]) -> list[list[str]]:
    """The pictures of each trained turn, as NeMo RL collects them: of messages, and of an answer that is one
    URL."""
    given = result["response"].get("agent_input") or result["responses_create_params"]["input"]
    turns, before = [], list[str]()
    for item in (*given, *result["response"]["output"]):
        if item.get("generation_token_ids"):
            turns.append(before)
            before = []
        elif item.get("type") == "function_call_output":
            before += [item["output"]] if str(item["output"]).startswith("data:image/") else []
        elif item.get("role") != "assistant":
            before += pictures_in(item.get("content"))
    return turns


def test_each_turn_has_the_pictures_that_it_saw() -> None:
    answer = {"type": "function_call_output", "call_id": "c", "output": [SHOWN, SHOWN]}
    call = {"type": "function_call", "call_id": "c", "name": "ring", "arguments": "{}"}
    seen = rollout([{**call, **bundle([1], [2])}, answer, {**said("b"), **bundle([1, 2, 7], [8])}])
    seen["responses_create_params"]["input"] = [{"role": "user", "content": [PROMPT]}]
    url = SHOWN["image_url"]
    assert pictures_by_turn(result_of(seen)) == [[PROMPT["image_url"]], [url, url]]
    assert answer in seen["response"]["output"]
    assert len(seen["response"]["output"]) == 3, "the rollout itself is as it was"
    lost = {**failed(), "responses_create_params": seen["responses_create_params"]}
    lost.pop("response", None)
    assert pictures_by_turn(result_of(lost, 0.0)) == [[]]


CONFIG = """
quiz:
  resources_servers:
    mcqa: {entrypoint: app.py}
judge:
  responses_api_models:
    vllm_model: {base_url: "http://127.0.0.1:7/v1", api_key: none, model: j}
quiz_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: quiz}
      model_server: {type: responses_api_models, name: policy_model}
"""


def test_the_configs_of_nemo_gym_become_the_graph(tmp_path: Path) -> None:
    (tmp_path / "quiz.yaml").write_text(CONFIG)
    config = {
        "config_paths": [str(tmp_path / "quiz.yaml")],
        "quiz_agent": {"responses_api_agents": {"simple_agent": {"max_steps": 3}}},
        "policy_base_url": ["http://a/v1", "http://b/v1"],
        "policy_model_name": "m",
        "policy_api_key": "dummy_key",
        "head_server": {"port": PORT},
    }
    graph, overrides = graph_of(config, Settings())
    assert graph["agents"]["quiz_agent"]["max_steps"] == 3
    assert overrides.pop("models.policy_model.api_key").get_secret_value() == "dummy_key"
    assert overrides == {
        "models.policy_model.base_url": ["http://a/v1", "http://b/v1"],
        "models.policy_model.model": "m",
        "models.policy_model.return_token_ids": True,
    }
    with pytest.raises(GymError, match="no_such"):
        graph_of({"config_paths": ["no_such.yaml"]}, Settings())


def test_the_names_stand_where_nemo_rl_looks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("", ".cli", ".rollout_collection", ".server_utils"):
        monkeypatch.setitem(sys.modules, f"nemo_gym{part}", sys)  # put back afterwards
    names.install()
    cli = importlib.import_module("nemo_gym.cli")
    assert (cli.RunHelper, cli.GlobalConfigDictParserConfig) == (RunHelper, GlobalConfigDictParserConfig)
    assert importlib.import_module("nemo_gym.server_utils").HEAD_SERVER_KEY_NAME == "head_server"
    assert (
        importlib.import_module("nemo_gym.rollout_collection").RolloutCollectionHelper
        is RolloutCollectionHelper
    )

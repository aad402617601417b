from datetime import datetime

import pytest
from hypothesis import given
from support.export_cases import (
    SUBAGENT,
    bundle,
    call,
    captured,
    episode,
    episodes,
    failed,
    returned,
    rollout,
    said,
    timed,
)

from gym_serve import Gym
from gym_serve.interop.export import NotExportable, Rollout
from gym_serve.interop.export.traces import atif_trajectory, verifiers_episode


def atif(raw):
    return atif_trajectory(Rollout.read(raw))


def trace(raw):
    (found,) = verifiers_episode(Rollout.read(raw))["traces"]
    return found


def branches(found):
    """Token ids of every path from a root to a leaf."""
    nodes = found["nodes"]
    parents = {node.get("parent") for node in nodes}
    paths = []
    for leaf in range(len(nodes)):
        path, at = [], leaf
        while leaf not in parents and at is not None:
            path.append(at)
            at = nodes[at].get("parent")
        if path:
            paths.append([token for i in reversed(path) for token in nodes[i].get("token_ids", [])])
    return paths


def test_atif_steps():
    found = atif(episode())
    assert [step["step_id"] for step in found["steps"]] == [1, 2, 3, 4]
    assert [step["source"] for step in found["steps"]] == ["system", "user", "agent", "agent"]
    acted = found["steps"][2]
    arguments = {"city": "Oslo"}
    assert acted["tool_calls"] == [{"tool_call_id": "c1", "function_name": "weather", "arguments": arguments}]
    assert acted["observation"] == {"results": [{"content": "3 degrees", "source_call_id": "c1"}]}
    assert acted["reasoning_content"] == "Ask the tool."
    assert found["steps"][3]["metrics"] == {
        "prompt_tokens": 7,
        "completion_tokens": 1,
        "prompt_token_ids": [1, 2, 3, 4, 5, 6, 7],
        "completion_token_ids": [8],
        "logprobs": [-1.0],
    }
    assert found["final_metrics"]["total_cached_tokens"] == 4
    assert found["extra"]["reward"] == 1.0


def test_atif_keeps_failures_and_odd_calls():
    found = atif(failed())
    assert found["extra"]["failure"]["kind"] == "model_timeout"
    found = atif(rollout([call(arguments="not JSON"), returned("other"), said("x")]))
    assert found["steps"][2]["tool_calls"][0]["arguments"] == {}
    assert found["steps"][2]["tool_calls"][0]["extra"] == {"raw_arguments": "not JSON"}
    assert found["steps"][2]["observation"]["results"][0]["extra"] == {"tool_call_id": "other"}


def test_atif_tells_a_given_turn_from_the_agents_own():
    raw = rollout([returned(), said("x")])
    raw["responses_create_params"]["input"] += [
        call(),
        returned(),
        said("Before."),
        {"role": "user", "content": "?"},
    ]
    found = atif(raw)["steps"]
    assert [step.get("is_copied_context", False) for step in found] == [0, 0, 1, 1, 0, 0, 0]
    assert found[5] == {
        "step_id": 6,
        "source": "system",
        "message": "",
        "observation": {"results": [{"content": "3 degrees", "extra": {"tool_call_id": "c1"}}]},
    }


def test_atif_media():
    raw = rollout([said("x")])
    parts = [
        {"type": "input_text", "text": "see"},
        {"type": "input_image", "image_url": "https://host/a.PNG?size=1"},
        {"type": "input_image", "image_url": "data:image/png;base64,AA"},
        {"type": "input_image", "image_url": "https://[bad/a.png"},
    ]
    raw["responses_create_params"]["input"] = [{"role": "user", "content": parts}]
    (step, _) = atif(raw)["steps"]
    source = {"media_type": "image/png", "path": "https://host/a.PNG?size=1"}
    assert step["message"] == [{"type": "text", "text": "see"}, {"type": "image", "source": source}]
    assert [part["image_url"]["url"] for part in step["extra"]["media"]] == [
        "data:image/png;base64,AA",
        "https://[bad/a.png",
    ]


def test_a_trace():
    found = verifiers_episode(Rollout.read(episode(score=0.5, note="n")))
    (made,) = found["traces"]
    assert (found["ok"], found["group"], found["env"]) == (True, {"id": "0"}, {"id": "weather_agent"})
    assert found["task"] == made["task"]
    assert [node["message"]["role"] for node in made["nodes"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert [node.get("parent") for node in made["nodes"]] == [None, 0, 1, 2, 3]
    assert made["nodes"][0]["tools"] == made["tools"]
    assert made["nodes"][3]["message"]["name"] == "weather"
    assert made["nodes"][4]["token_ids"] == [6, 7, 8]
    assert made["nodes"][4]["mask"] == [False, False, True]
    assert [entry["finish_reason"] for entry in made["calls"]] == ["tool_calls", "stop"]
    assert made["rewards"] == {"reward": {"score": 1.0}}
    assert made["metrics"] == {"score": 0.5}
    assert made["info"]["rollout"]["note"] == "n"
    assert made["stop_condition"] == "agent_completed"


def test_reward_components_are_rewards_where_they_add_up():
    parts = {"form": 0.25, "answer": 0.75}
    assert trace(episode(reward_components=parts))["rewards"] == {
        "form": {"score": 0.25},
        "answer": {"score": 0.75},
    }
    for odd in ({"form": 1.0, "answer": 1.0}, {"form": "1"}, [], {}):
        assert trace(episode(reward_components=odd))["rewards"] == {"reward": {"score": 1.0}}


def test_a_failed_trace_has_an_error_and_no_reward():
    found = trace(failed())
    assert (found["ok"], found["is_timeout"], found["stop_condition"]) == (False, True, "model_timeout")
    assert found["errors"] == [{"type": "model_timeout", "message": "too slow", "status_code": 504}]
    assert found["rewards"] == {"reward": None}
    assert found["agent"]["trainable"] is False
    other = trace({**failed(), "_ng_failure_class": "unavailable", "failure": "odd"})
    assert (other["is_timeout"], other["stop_condition"]) == (False, "error")


def test_a_cut_off_answer_is_of_length():
    raw = rollout([said("x")])
    raw["response"]["incomplete_details"] = {"reason": "max_output_tokens"}
    assert trace(raw)["calls"][-1]["finish_reason"] == "length"
    assert "usage" not in trace(raw)["calls"][-1]


def test_a_broken_prefix_is_a_branch():
    first = {**call(), **bundle([1, 2], [3])}
    second = {**call("c2"), **bundle([1, 2, 3, 4], [5])}
    third = {**said("x"), **bundle([1, 2, 3, 9, 9], [6])}
    found = trace(rollout([first, returned(), second, returned("c2"), third]))
    assert branches(found) == [[1, 2, 3, 4, 5], [1, 2, 3, 9, 9, 6]]
    again = [
        node for node in found["nodes"] if node["message"]["role"] == "assistant" and not node.get("sampled")
    ]
    assert [node["message"]["tool_calls"][0]["id"] for node in again] == ["c2"]
    rewritten = trace(rollout([first, returned(), {**said("x"), **bundle([7], [8])}]))
    assert branches(rewritten) == [[1, 2, 3], [7, 8]]


@given(episodes(with_tokens=True))
def test_a_path_holds_what_its_last_call_saw(raw):
    found = trace(raw)
    bundles = [item for item in raw["response"]["output"] if "prompt_token_ids" in item]
    last = bundles[-1]["prompt_token_ids"] + bundles[-1]["generation_token_ids"]
    assert branches(found)[-1] == last
    assert [sum(node["mask"]) for node in found["nodes"] if node.get("sampled")] == [
        len(item["generation_token_ids"]) for item in bundles
    ]


def test_media_that_verifiers_lacks():
    raw = rollout([said("x")])
    audio = {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}
    image = {"type": "input_image", "image_url": "https://host/a.png"}
    raw["responses_create_params"]["input"] = [{"role": "user", "content": [audio]}]
    with pytest.raises(NotExportable, match="input_audio"):
        trace(raw)
    raw["responses_create_params"]["input"] = [{"role": "developer", "content": [image]}]
    assert trace(raw)["nodes"][0]["message"] == {
        "role": "system",
        "content": [{"type": "image_url", "image_url": {"url": "https://host/a.png"}}],
    }


BEGAN = 1_800_000_000.5


def test_a_timeline_gives_atif_its_times_and_usage():
    raw = timed(episode())
    found = atif(raw)
    times = [datetime.fromisoformat(step["timestamp"]).timestamp() - BEGAN for step in found["steps"]]
    assert times == [0, 0, 3, 4]
    assert found["steps"][2]["metrics"] == {
        "prompt_tokens": 3,  # as the token ids say, which are kept
        "completion_tokens": 2,
        "cached_tokens": 4,
        "prompt_token_ids": [1, 2, 3],
        "completion_token_ids": [4, 5],
        "logprobs": [-0.25, -0.5],
        "extra": {
            "duration": 1.0,
            "queued": 0.0,
            "retries": 0,
            "server": "policy",
            "replica": "p1",
            "endpoint": "http://host/v1",
            "version": "7",
            "finish_reason": "stop",
        },
    }
    assert found["extra"]["_ng_timeline"] == raw["_ng_timeline"]
    without_tokens = atif(timed(rollout([call(), returned(), said("x")])))["steps"][2]
    assert (without_tokens["llm_call_count"], without_tokens["metrics"]["prompt_tokens"]) == (1, 20)


def test_a_timeline_gives_a_trace_its_times_and_usage():
    found = trace(timed(episode()))
    assert [node["timestamp"] - BEGAN for node in found["nodes"]] == [0, 0, 3, 3, 4]
    first, second = found["calls"]
    assert [call["time"]["start"] - BEGAN for call in (first, second)] == [2, 3]
    assert first["usage"] == {"prompt_tokens": 16, "completion_tokens": 9, "cached_input_tokens": 4}
    assert found["timing"] == {"start": BEGAN}
    assert found["info"]["rollout"]["_ng_timeline"]["steps"][5][-1]["answer"] == "yes"


@pytest.mark.parametrize("raw", [timed(episode(), calls=3), timed(captured(SUBAGENT))])
def test_calls_that_could_belong_to_several_messages_give_no_times(raw):
    assert [step.get("timestamp") for step in atif(raw)["steps"] if step["source"] == "agent"] == [None, None]
    assert not any("time" in call for call in trace(raw)["calls"] if "node" in call)
    assert trace(raw)["timing"]["start"] == BEGAN


@pytest.mark.parametrize(
    "line",
    [
        None,
        {"began": float("nan")},
        {"began": 1e300, "dur": 1, "agent": "a", "servers": [], "steps": []},
        {"began": 1.0, "dur": 1e300, "agent": "a", "servers": [], "steps": []},
        {"began": 1.0, "dur": 10**400, "agent": "a", "servers": [], "steps": []},
        {"began": 1.0, "dur": 1, "agent": "a", "servers": [], "steps": [["model"]]},
        {"began": 1.0, "dur": 1, "agent": "a", "servers": [], "steps": [["seed", 0, 1, 0, 0]]},
    ],
)
def test_a_timeline_that_cannot_be_is_as_none(line):
    raw = {**episode(), "_ng_timeline": line}
    assert Rollout(raw, {}, {}, []).timeline is None


def test_real_rollouts_keep_their_timeline():
    with Gym.from_graph("graphs/weather.yaml", ray=False) as gym:
        rollouts = gym.run("environments/simple_weather/data/example.jsonl")
    for raw in rollouts:
        own = [step for step in raw.timeline.steps if step.kind == "model"]
        steps = [step for step in atif(raw)["steps"] if step["source"] == "agent"]
        ends = [datetime.fromisoformat(step["timestamp"]).timestamp() for step in steps]
        assert ends == pytest.approx([raw.timeline.began + step.end for step in own], abs=1e-5)
        assert [step["metrics"]["completion_tokens"] for step in steps] == [s.output_tokens for s in own]
        calls = trace(raw)["calls"]
        assert [call["time"]["end"] for call in calls] == pytest.approx(ends, abs=1e-5)
        assert (
            sum(call["usage"]["completion_tokens"] for call in calls)
            == raw["response"]["usage"]["output_tokens"]
        )

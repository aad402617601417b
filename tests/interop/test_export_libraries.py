"""What the real libraries make of exported files: verl, TRL, OpenRLHF, verifiers and Harbor.

Each reader runs in its own process of a virtual environment (`venvs`), without any network.
"""

import json

import pytest
from support.export_cases import (
    RETRY,
    SUBAGENT,
    WEATHER_TOOL,
    bundle,
    call,
    captured,
    episode,
    failed,
    returned,
    rollout,
    said,
    timed,
)
from venvs import INTEROP, needs, printed

from gym_serve.interop.export import export

pytest.importorskip("pyarrow", reason="pip install 'gym-serve[export]'")

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600), needs(INTEROP)]

ROLLOUTS = [
    episode(),
    episode("4 degrees.", index=1, reward=0.5),
    failed(index=2),
    rollout(
        [{**call(), **bundle([1], [2])}, returned(output=""), {**said("ok"), **bundle([1, 2], [3])}], task=1
    ),
]
SYSTEM = "<|im_start|>system\nBe brief.<|im_end|>"
QUESTION = f"{SYSTEM}<|im_start|>user\nWeather in Oslo?<|im_end|>"
LEARNED = '<think>Ask the tool.</think>Let me look.<call>weather {"city": "Oslo"}</call><|im_end|>'
ANSWER = "<think>Now answer.</think>3 degrees.<|im_end|>"
OTHER = "<think>Now answer.</think>4 degrees.<|im_end|>"
PLAIN = '<call>weather {"city": "Oslo"}</call><|im_end|>ok<|im_end|>'
FUNCTION = {key: WEATHER_TOOL[key] for key in ("name", "description", "parameters")}
TOOLS = f"<tools>{json.dumps([{'type': 'function', 'function': FUNCTION}])}</tools>"


def read_with(library, folder):
    return printed(INTEROP, "read_with_library.py", library, folder, folder=folder)


def rendered(answer):
    turn = f"<|im_start|>assistant\n{LEARNED}<|im_start|>tool\n3 degrees<|im_end|><|im_start|>assistant\n"
    return f"{QUESTION}{turn}{answer}"


def test_verl(tmp_path):
    export(ROLLOUTS, "verl", tmp_path / "rollouts.parquet")
    export(ROLLOUTS, "verl", tmp_path / "tasks.parquet", per="task")
    found = read_with("verl", tmp_path)
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather in Oslo?"}]
    assert [task["index"] for task in found["tasks"]] == [0, 1]
    assert all(task["raw_prompt"] == prompt for task in found["tasks"])
    assert found["tasks"][0]["reward_model"] == {"style": "rule", "ground_truth": "3"}
    assert found["tasks"][0]["data_source"] == "weather_agent"
    assert found["batch"]["raw_prompt"] == [prompt] * 3
    assert found["batch"]["reward"] == [1.0, 0.5, 1.0]
    assert found["learned"] == [LEARNED + ANSWER, LEARNED + OTHER, PLAIN]
    assert found["rendered"][0] == TOOLS + rendered(ANSWER)
    assert found["outputs"][0] == {
        "prompts": [1, 2, 3],
        "responses": [4, 5, 6, 7, 8],
        "response_mask": [1, 1, 0, 0, 1],
        "rollout_log_probs": [-0.25, -0.5, 0.0, 0.0, -1.0],
        "rm_scores": [0.0, 0.0, 0.0, 0.0, 1.0],
    }
    export([captured(SUBAGENT, RETRY)], "verl", tmp_path / "rollouts.parquet", overwrite=True)
    outputs = read_with("verl", tmp_path)["outputs"]
    assert [output["responses"] for output in outputs] == [[4, 5, 6, 7, 8], [42], [50, 51]]
    assert [output["rm_scores"][-1] for output in outputs] == [1.0] * 3


def test_trl(tmp_path):
    for kind in ("completion", "tokens"):
        export(ROLLOUTS, "trl", tmp_path / f"{kind}.parquet", kind=kind)
    found = read_with("trl", tmp_path)
    first, _, plain = found["loaded"]["completion"]
    assert first["completion"][0]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    assert first["tools"] == [{"type": "function", "function": FUNCTION}]
    assert plain["completion"][-1] == {"role": "assistant", "content": "ok"}
    assert plain["tools"] is None
    assert found["completion"] == [LEARNED + ANSWER, LEARNED + OTHER, PLAIN]
    assert found["rendered"][:2] == [TOOLS + rendered(ANSWER), TOOLS + rendered(OTHER)]
    assert found["tokens"][0] == {
        "input_ids": [1, 2, 3, 4, 5, 6, 7, 8],
        "labels": [-100, -100, -100, 4, 5, -100, -100, 8],
    }


def test_openrlhf(tmp_path):
    export(ROLLOUTS, "openrlhf", tmp_path / "rollouts.parquet")
    found = read_with("openrlhf", tmp_path)
    assert found["prompts"][0] == ["weather_agent", f"{QUESTION}<|im_start|>assistant\n", "3", None]
    assert found["learned"] == [LEARNED + ANSWER, LEARNED + OTHER, PLAIN]


def test_verifiers(tmp_path):
    image = {"type": "input_image", "image_url": "https://host/a.png"}
    broken = rollout(
        [{**call(), **bundle([1, 2], [3])}, returned(output=[image]), {**said("x"), **bundle([1, 9], [4])}],
        task=2,
    )
    broken["response"]["incomplete_details"] = {"reason": "max_output_tokens"}
    harness = captured(SUBAGENT, RETRY, task=4)
    nothing = failed(task=3)
    del nothing["response"]
    rollouts = [*ROLLOUTS, broken, nothing, harness, timed(episode(task=5))]
    export(rollouts, "verifiers", tmp_path / "traces.jsonl")
    found = read_with("verifiers", tmp_path)
    assert [(t["ok"], t["reward"], t["trainable"], t["error"]) for t in found] == [
        (True, 1.0, True, None),
        (True, 0.5, True, None),
        (False, 0, False, "model_timeout"),
        (True, 1.0, True, None),
        (True, 1.0, True, None),
        (False, 0, False, "model_timeout"),
        (True, 1.0, True, None),
        (True, 1.0, True, None),
    ]
    assert found[0]["branches"] == [
        {
            "token_ids": [1, 2, 3, 4, 5, 6, 7, 8],
            "sampled_mask": [False, False, False, True, True, False, False, True],
            "logprobs": [0.0, 0.0, 0.0, -0.25, -0.5, 0.0, 0.0, -1.0],
        }
    ]
    assert [m["role"] for m in found[0]["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert found[0]["messages"][2]["tool_calls"][0]["arguments"] == '{"city": "Oslo"}'
    assert (found[0]["usage"]["prompt_tokens"], found[0]["usage"]["completion_tokens"]) == (10, 3)
    assert [branch["token_ids"] for branch in found[4]["branches"]] == [[1, 2, 3], [1, 9, 4]]
    assert found[4]["truncated"]
    assert [branch["token_ids"] for branch in found[6]["branches"]] == [
        [1, 2, 3, 4, 5, 6, 7, 8],
        [40, 41, 42],
        [1, 2, 3, 4, 5, 9, 50, 51],
    ]
    assert found[6]["branches"][2]["sampled_mask"] == [False] * 6 + [True] * 2


def test_harbor(tmp_path):
    odd = rollout(
        [call(arguments="not JSON"), returned("other"), said("x")], task=2, _ng_rollout_id="../../x"
    )
    raw = rollout([said("x")], task=3)
    images = [
        {"type": "input_image", "image_url": url}
        for url in ("https://host/a.png", "data:image/png;base64,AA")
    ]
    raw["responses_create_params"]["input"] = [{"role": "user", "content": images}]
    harness = captured(SUBAGENT, RETRY, task=4)
    rollouts = [*ROLLOUTS, odd, raw, harness, timed(episode(task=5))]
    export(rollouts, "atif", tmp_path / "trajectories")
    found = read_with("harbor", tmp_path)
    assert [t["trajectory_id"] for t in found] == ["0-0", "0-1", "0-2", "1-0", "../../x", "3-0", "4-0", "5-0"]
    assert len(list((tmp_path / "trajectories").iterdir())) == 8
    assert found[7]["steps"][2]["timestamp"] == "2027-01-15T08:00:03.500000+00:00"
    assert found[7]["steps"][2]["metrics"]["extra"]["endpoint"] == "http://host/v1"
    assert found[0]["steps"][3]["metrics"]["completion_token_ids"] == [8]
    assert found[2]["extra"]["failure"]["kind"] == "model_timeout"
    assert found[4]["steps"][2]["tool_calls"][0]["extra"] == {"raw_arguments": "not JSON"}
    assert found[5]["steps"][0]["message"][0]["source"]["path"] == "https://host/a.png"
    inner = found[6]["subagent_trajectories"]
    assert [t["trajectory_id"] for t in inner] == ["4-0.1", "4-0.2"]
    assert inner[0]["steps"][1]["metrics"]["completion_token_ids"] == [42]

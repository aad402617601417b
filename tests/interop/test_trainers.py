"""Trainers' own released code with gym_serve's adapters, on a CPU, with engines that really sample.

Each trainer runs in a process of the venv that `make interop` builds.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
VENV = Path(os.environ.get("INTEROP_VENV", ROOT / ".venv-interop"))

pytestmark = [
    pytest.mark.interop,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (VENV / "bin/python").exists(), reason=f"{VENV} is not there: run `make interop`"),
]


def run(script: str, folder: Path) -> Any:
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "WANDB_MODE": "disabled",
    }
    command = [str(VENV / "bin/python"), str(Path(__file__).with_name(script)), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


DONE = [67, 78, 77, 68, 256]
"""``done`` and the end of the turn, as the tiny engine's tokens: what the bell is content with."""


def is_done(response: list[int]) -> bool:
    return response[-5:] == DONE


def sampled(
    asked: list[dict[str, Any]], prompt: list[int], response: list[int]
) -> tuple[list[int], list[float]]:
    """The mask and the log-probabilities of a response, by what the engine was asked and said."""
    seen = prompt + response
    turns = [a for a in asked if a["prompt"] + a["generation"] == seen[: len(a["prompt"] + a["generation"])]]
    mask, logprobs = [0] * len(response), [0.0] * len(response)
    for turn in turns:
        at = len(turn["prompt"]) - len(prompt)
        for i, logprob in enumerate(turn["logprobs"]):
            mask[at + i], logprobs[at + i] = 1, logprob
    return mask, logprobs


@pytest.fixture(scope="module")
def verl(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run("run_verl.py", tmp_path_factory.mktemp("verl"))


def test_verl_v0_trains_on_what_its_engine_sampled(verl: Any) -> None:
    found = verl["v0"]
    assert found["shapes"]["responses"] == [6, 200]
    for i in (0, 1, 3, 4):
        mask, logprobs = sampled(verl["asked"], found["prompts"][i], found["responses"][i])
        n = len(mask)
        assert found["response_mask"][i] == mask + [0] * (200 - n)
        assert found["logprobs"][i] == pytest.approx(logprobs + [0.0] * (200 - n), abs=1e-6)
    assert found["turns"][3:] == [2, 3, 2]
    assert found["steps"] == [[5] * 6] * 2
    assert found["keys"] == ["failed", "score", "truncated"]


def test_verl_v0_masks_a_failure_and_compares_the_others_as_if_it_were_not_there(verl: Any) -> None:
    found = verl["v0"]
    assert found["failed"] == [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert sum(found["response_mask"][2]) == 0
    assert len(found["responses"][5]) == 200  # cut off
    rewards = [float(is_done(response)) for response in found["responses"]]
    for group in ([0, 1], [3, 4, 5]):
        mean = sum(rewards[i] for i in group) / len(group)
        for i in group:
            assert found["scores"][i] == rewards[i]
            assert found["advantages"][i] == [pytest.approx(rewards[i] - mean)]
    assert found["scores"][2] == pytest.approx((rewards[0] + rewards[1]) / 2)
    assert found["advantages"][2] == []


def test_verl_v1_has_no_trajectory_of_a_failure(verl: Any) -> None:
    rows = verl["v1"]["rows"]
    assert sorted(row["key"] for row in rows) == [
        f"{word}_{session}_0" for word in ("refuse", "ring") for session in range(3)
    ]
    for row in rows:
        mask, logprobs = sampled(verl["asked"], row["prompts"], row["responses"])
        assert row["response_mask"] == mask
        assert row["rollout_log_probs"] == pytest.approx(logprobs, abs=1e-6)
        assert (row["tag"]["min_global_steps"], row["tag"]["max_global_steps"]) == (5, 5)
        assert row["rm_scores"][-1] == float(is_done(row["responses"]))


@pytest.fixture(scope="module")
def openrlhf(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run("run_openrlhf.py", tmp_path_factory.mktemp("openrlhf"))


def test_openrlhf_makes_experiences_of_what_its_engine_sampled(openrlhf: Any) -> None:
    for found in openrlhf["groups"]:
        if not found["failed"]:
            mask, logprobs = sampled(openrlhf["asked"], found["sequence"][:1], found["sequence"][1:])
            assert found["action_mask"] == mask
            assert found["logprobs"] == pytest.approx(logprobs, abs=1e-6)
            assert found["reward"] == float(is_done(found["sequence"]))
    assert all(found["truncated"] == (found["word"] == "chatter") for found in openrlhf["groups"])


def test_openrlhf_gives_a_failure_one_action(openrlhf: Any) -> None:
    failed = [found for found in openrlhf["groups"] if found["failed"]]
    assert [found["word"] for found in failed] == ["break"] * 3
    assert [sum(found["action_mask"]) for found in failed] == [1] * 3
    assert [found["reward"] for found in failed] == [0.0] * 3


def test_openrlhf_asks_the_graphs_verifier_for_rewards(openrlhf: Any) -> None:
    assert [found["reward"] for found in openrlhf["rewards"]] == [1.0, 0.0]


@pytest.fixture(scope="module")
def nemo_rl(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run("run_nemo_rl.py", tmp_path_factory.mktemp("nemo_rl"))


def trained(asked: list[dict[str, Any]], log: list[dict[str, Any]]) -> list[int]:
    """All tokens of NeMo RL's message log, whose assistant turns must be what the engine sampled."""
    seen: list[int] = []
    for message in log:
        if message["role"] == "assistant":
            turn = {"prompt": seen, "generation": message["token_ids"]}
            [logprobs] = [a["logprobs"] for a in asked if {**a, "logprobs": 0} == {**turn, "logprobs": 0}][:1]
            assert message["logprobs"] == pytest.approx(logprobs, abs=1e-6)
        seen = seen + message["token_ids"]
    return seen


def test_nemo_rl_trains_on_what_the_endpoint_sampled(nemo_rl: Any) -> None:
    for group in nemo_rl["groups"]:
        assert group["masked"] == [False, False]
        for log, reward in zip(group["logs"], group["rewards"], strict=True):
            assert reward == float(is_done(trained(nemo_rl["asked"], log)))
    assert max(len(log) for group in nemo_rl["groups"] for log in group["logs"]) == 4  # two turns


def test_nemo_rl_masks_failures_and_compares_the_others_as_if_they_were_not_there(nemo_rl: Any) -> None:
    [failing] = nemo_rl["failing"]
    assert (failing["masked"], failing["rewards"]) == ([True, True], [0.0, 0.0])
    [flaky] = nemo_rl["flaky"]
    assert sorted(zip(flaky["masked"], flaky["rewards"], flaky["advantages"], strict=True)) == [
        (False, 0.0, -0.5),
        (False, 1.0, 0.5),
        (True, 0.5, 0.0),
    ]


def test_nemo_rls_actor_goes_on_after_a_restart(nemo_rl: Any) -> None:
    [group] = nemo_rl["restarted"]
    assert group["masked"] == [False, False]


def test_nemo_rl_classifies_failures_and_sends_their_rows_again(nemo_rl: Any) -> None:
    assert (nemo_rl["raised"]["type"], nemo_rl["raised"]["class"]) == ("GymTransportError", "infra")
    assert "the bell is broken" in nemo_rl["raised"]["text"]
    assert len(nemo_rl["sent_again"]["rewards"]) == 2


@pytest.fixture(scope="module")
def skyrl(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run("run_skyrl.py", tmp_path_factory.mktemp("skyrl"))


def test_skyrl_accepts_the_output_and_makes_its_batch_of_it(skyrl: Any) -> None:
    assert skyrl["stop_reasons"].count("error") == 1
    assert skyrl["shapes"]["sequences"][0] == 6
    for i, reason in enumerate(skyrl["stop_reasons"]):
        mask, logprobs = sampled(skyrl["asked"], skyrl["prompt_token_ids"][i], skyrl["response_ids"][i])
        if reason == "error":
            assert sum(skyrl["loss_masks"][i]) == 0
            continue
        assert skyrl["loss_masks"][i] == mask
        assert skyrl["rollout_logprobs"][i] == pytest.approx(logprobs, abs=1e-6)
    for i in range(3):
        assert skyrl["scores"][i] == float(is_done(skyrl["response_ids"][i]))
    assert skyrl["metrics"]["generate/gym_failed"] == pytest.approx(1 / 6)


def test_skyrl_compares_a_group_as_if_its_failure_were_not_there(skyrl: Any) -> None:
    assert sorted(skyrl["scores"][3:]) == [0.0, 0.5, 1.0]
    assert sorted(sum(values) for values in skyrl["advantages"][3:]) == [-0.5, 0.0, 0.5]


@pytest.fixture(scope="module")
def slime(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run("run_slime.py", tmp_path_factory.mktemp("slime"))


def test_slime_fills_its_samples_with_what_the_engine_sampled(slime: Any) -> None:
    statuses = [sample["status"] for sample in slime["samples"]]
    assert (statuses.count("failed"), statuses[6:]) == (1, ["truncated"] * 3)
    for sample in slime["samples"]:
        assert sample["again"]
        assert sample["removed"] == (sample["status"] == "failed")
        mask, logprobs = sampled(slime["asked"], sample["prompt"], sample["response"])
        if sample["removed"]:
            assert (sum(sample["loss_mask"]), sample["reward"]) == (0, 0.5)
            continue
        assert sample["loss_mask"] == mask
        assert sample["logprobs"] == pytest.approx(logprobs, abs=1e-6)
    assert sorted(sample["reward"] for sample in slime["samples"][3:6]) == [0.0, 0.5, 1.0]


def test_areal_keeps_the_tokens_of_an_episode_and_its_reward(tmp_path: Path) -> None:
    areal = run("run_areal.py", tmp_path)
    call, done = areal["ring"]
    # Half of a reward goes on to the turn before it, by the workflow's discount.
    assert (call["rewards"], done["rewards"], areal["refuse"][0]["rewards"]) == (0.5, 1.0, 0.0)
    for turn in (call, done, *areal["refuse"]):
        (asked,) = [a for a in areal["asked"] if a["prompt"] + a["generation"] == turn["input_ids"]]
        empty = [0] * len(asked["prompt"])
        assert turn["loss_mask"] == [*empty, *(1 for _ in asked["generation"])]
        assert turn["logprobs"] == pytest.approx([*empty, *asked["logprobs"]], abs=1e-6)
    assert areal["break"] == "RolloutFailed: unavailable: the bell is broken"


def test_prime_rls_client_runs_cancels_and_outlives_its_server(tmp_path: Path) -> None:
    found = run("run_prime_rl.py", tmp_path)
    assert (found["runs"], found["ok"]) == (500, 375)
    ring, refuse, chatter, broken = found["episodes"]
    assert [each["ok"] for each in (ring, refuse, chatter, broken)] == [True, True, True, False]
    assert [each["reward"] for each in (ring, refuse, chatter)] == [1.0, 0.0, 0.0]
    assert (ring["truncated"], chatter["truncated"]) == (False, True)
    [branch] = ring["branches"]
    assert sum(branch["sampled_mask"]) > 0
    assert {
        p for p, is_sampled in zip(branch["logprobs"], branch["sampled_mask"], strict=True) if is_sampled
    } == {-0.25}
    assert (found["after_cancels"], found["after_kill"]) == (True, True)

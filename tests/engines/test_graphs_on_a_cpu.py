"""Graphs with models on GPUs, run on a CPU by a settings file; their weights, and what of them is killed."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from gym_serve import Gym
from gym_serve.types.errors import BadRequest, GraphError, Retryable

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default"), pytest.mark.timeout(500)]

ROOT = Path(__file__).parents[2]
_GREEDY = {
    "input": "What is the weather?",
    "max_output_tokens": 8,
    "temperature": 0,
    "metadata": {"extra_body": '{"structured_outputs": null}'},
}


def _row() -> dict[str, Any]:
    question = "What is 2 + 2?"
    return {"responses_create_params": {"input": question}, "question": question, "expected_answer": "5"}


@pytest.mark.parametrize(
    ("graph", "problem"),
    [("math_gpu_judge", r"models\.gpu_judge\.num_gpus"), ("reward_model", r"models\.scorer\.num_gpus")],
)
def test_without_a_gpu_the_missing_resource_is_named(cluster: str, graph: str, problem: str) -> None:
    with pytest.raises(GraphError, match=f"{problem}: a replica needs 1 GPU"):
        Gym.from_graph(ROOT / f"graphs/{graph}.yaml", name="no_gpu")


def test_rollouts_with_a_judge_on_vllm(judged: Gym) -> None:
    rollouts = judged.run([_row() for _ in range(4)])
    for rollout in rollouts:
        assert "failure" not in rollout, rollout["failure"]["detail"]
        last = rollout["response"]["output"][-1]
        assert len(last["generation_token_ids"]) == len(last["generation_log_probs"])
        assert rollout["judge_evaluations"]


def test_new_weights_of_hf_engine_outlive_a_replica(judged: Gym, other: Path) -> None:
    before = _said(judged, "policy")
    judged.policy.update_weights("policy", "1", path=other)
    after = _said(judged, "policy")
    assert (after[0] != before[0], after[1]) == (True, "1")
    judged.policy.update_weights("policy", "2", tensors=(other / "model.safetensors").read_bytes())
    with pytest.raises(BadRequest, match="not the weights"):
        judged.policy.update_weights("policy", "3", tensors=_of_another_model())
    _kill("ServeReplica:math_gpu_judge:policy")
    assert _said(judged, "policy") == (after[0], "2")


@pytest.mark.slow  # the engine starts again; the same of hf_engine is above
def test_new_weights_of_vllm_outlive_its_engine(judged: Gym, other: Path) -> None:
    before = _said(judged, "gpu_judge")
    judged.policy.update_weights("gpu_judge", "1", tensors=(other / "model.safetensors").read_bytes())
    after = _said(judged, "gpu_judge")
    assert (after[0] != before[0], after[1]) == (True, "1")
    _kill("EngineCore", below="ServeReplica:math_gpu_judge:gpu_judge")
    assert _said(judged, "gpu_judge") == after


def _said(gym: Gym, model: str) -> tuple[tuple[int, ...] | str, str]:
    """What a model says, and the version of its weights; of one that starts, once it runs."""
    while True:
        try:
            item = gym.call(model, "v1/responses", _GREEDY)["output"][-1]
        except Retryable:
            time.sleep(0.5)  # the test's time limit ends it
        else:
            return tuple(item.get("generation_token_ids") or [json.dumps(item["content"])]), item[
                "weight_version"
            ]


def _of_another_model() -> bytes:
    import torch
    from safetensors.torch import save

    return save({"lm_head.weight": torch.zeros(2, 2)})


def _kill(title: str, below: str = "") -> None:
    """Kill the processes of this test with such a title, and such a parent, as soon as there is one."""
    ends = time.monotonic() + 180
    while not (meant := [p for p in _processes() if _is_meant(p, title, below)]):
        assert time.monotonic() < ends, [_titles(p) for p in _processes()]
        time.sleep(0.5)
    for process in meant:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _processes() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _is_meant(process: psutil.Process, title: str, below: str) -> bool:
    own, parent = _titles(process)
    return title in own and below in parent


def _titles(process: psutil.Process) -> tuple[str, str]:
    """A process's title and its parent's; nothing for one that ended meanwhile."""
    try:
        parent = process.parent()
        return _title(process), _title(parent) if parent is not None else ""
    except psutil.NoSuchProcess:
        return "", ""


def _title(process: psutil.Process) -> str:
    return " ".join(process.cmdline() or [process.name()])
